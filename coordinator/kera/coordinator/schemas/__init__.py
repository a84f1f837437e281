"""The schema registry: the schemas of subjects, and which schemas may follow.

    bookkeeping   the content of the registry, and its changes; pure
    records       the records in the metadata
    checking      compares schemas, large ones outside the event loop
    service       the requests
    columns       the columns of typed streams, which are registered with them

``kera.core.schemas`` defines what a definition means, and which ones are compatible.
"""
