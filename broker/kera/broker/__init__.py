"""The broker: takes chunks in, keeps them in shared memory, serves them (thesis 6.3.2).

From the bottom up: ``arena`` (slots of shared memory) → ``segment`` (segments and groups) → ``streamlet`` (entries,
appending, deduplication, reading) → ``stream`` (all streams of the broker) → ``service`` (remote calls) →
``registration`` (the coordinator) → ``__main__`` (the process). Beside them ``persistence`` (memory and disk) and
``replication`` (memory and backups). One event loop owns all of it, so there are no locks.
"""
