"""The broker: takes chunks, keeps them in shared memory, and serves them (thesis 6.3.2).

From the bottom up; no part imports a part above it:

    records        plain data: addresses, and the index's records of segments, entries and producers
    log/           the log in memory: the arena's slots, segments, entries, streamlets; planning reads. No I/O
    storage/       memory and disk: segment files, the index, eviction, the findings of a start
    replication/   memory and backups: virtual logs, the places of replicas, sending and repairing
    ownership/     what this broker owns: streams, the coordinator's orders, hand-over, leases, fences
    latency/       latency constraints: measures, advises and holds back; plugged into replication and serving
    recovery/      data of lost brokers: reading replicas, merging, taking over, rebuilding
    serving/       remote calls: writing, reading, pushing, looking up
    engine         makes everything of a data directory except its remote calls, and runs its work
    plugins        the plug-ins of replication and serving: latency constraints and traces
    __main__       the process: engine, serving, registration with the coordinator

One event loop owns all of it, so there are no locks.
"""
