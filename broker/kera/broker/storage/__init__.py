"""Memory and disk: writes segments, keeps them in memory, loads and removes them, and finds them after a start.

``persistence`` plans ``jobs``, and owns the memory. ``segment_files`` performs the jobs on ``disk`` and records them in
``index`` (LMDB, in the format of ``index_format``). ``loads``, ``removals`` and ``arrivals`` are parts of the
persistence manager, and ``restart`` finds the data of earlier launches. Other packages use `PersistenceManager`,
`Restart` and the index. ``replication`` decides which chunks have to be durable before readers get them.
"""
