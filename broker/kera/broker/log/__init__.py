"""The log in memory: slots of the arena, segments and groups, entries, streamlets, and reading them.

The data structures are ``arena`` (slots of shared memory), ``segment``, ``entry`` (an append-only chain of segments)
and ``streamlet`` (deduplication, appending). ``read_plan``, ``bounds``, ``locate`` and ``retention`` find places in
them. ``scan`` finds chunks in bytes, ``intervals`` knows which group ids are here, and ``waiting`` waits for entries.
This package does no I/O: an entry finds segments that are only on disk by its `SegmentLookup`. ``storage`` and
``replication`` decide when data is written to disk or replicated.
"""
