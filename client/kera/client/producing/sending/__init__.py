"""From lanes to brokers: a ``sender`` for each broker, ``routes`` to the one that owns a streamlet, and the ``buffer``.

Nothing here knows of latency constraints, of quotas or of traces: these are plugged in (``hooks``).
"""
