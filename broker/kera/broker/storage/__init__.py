"""Memory and disk: what is written, kept in memory, loaded again, removed, and found by a start.

``persistence`` decides, and owns the memory; ``jobs`` are what it plans, ``segment_files`` performs them on ``disk``,
``index`` (LMDB; ``index_format`` says how) remembers them. ``loads``, ``removals`` and ``adoptions`` are parts of it,
and ``restart`` finds after a start what there was. Others use `PersistenceManager`, `Restart` and the index; which
chunks have to be durable before anybody reads them is left to ``replication``.
"""
