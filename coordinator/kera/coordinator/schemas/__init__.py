"""The registry of schemas: which schemas subjects have, and which may follow.

    bookkeeping   what the registry has, and what a change makes of it; pure
    records       how that is kept in the metadata
    checking      comparing schemas, large ones beside the event loop
    service       the requests
    columns       the columns of typed streams, which are registered with them

What a definition means, and which ones are compatible, is ``kera.core.schemas``'.
"""
