"""From lanes to brokers: a ``sender`` per broker, ``routes`` to the owners of streamlets, and the ``buffer``.

Nothing here knows about latency constraints, quotas or traces: these are plugged in (``hooks``).
"""
