"""The log in memory: slots of the arena, segments and groups, entries, streamlets, and what a reader gets next.

``arena`` (slots of shared memory) → ``segment`` → ``entry`` (an append-only chain of segments) → ``streamlet``
(deduplication, appending) are what there is; ``read_plan``, ``bounds``, ``locate`` and ``retention`` say where in it
something is; ``scan`` finds chunks in bytes, ``intervals`` which group ids are here, ``waiting`` wakes who waits for an
entry. No I/O: what is on disk only, an entry knows by the `SegmentLookup` that it was given. When something is written
to disk or replicated is left to ``storage`` and ``replication``.
"""
