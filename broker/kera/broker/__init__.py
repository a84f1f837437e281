"""The broker: takes chunks in, keeps them in shared memory, serves them (thesis 6.3.2).

From the bottom up, and nothing imports what is above it:

    records        plain data: addresses, what is known of segments, what is said when something is done
    log/           the log in memory: the arena's slots, segments, entries, streamlets; what is read next. No I/O
    storage/       memory and disk: segment files, the index, who is in memory, what a start finds
    replication/   memory and backups: virtual logs, who has a copy of what, sending and repairing
    ownership/     what this broker owns: streams, the coordinator's orders, hand-over, leases, fences
    latency/       latency constraints: what is measured, advised, and held back; plugged into what is below and above
    recovery/      what was a lost broker's: reading replicas, merging, taking over, rebuilding
    serving/       remote calls: writing, reading, pushing, looking up
    engine         makes all of a data directory but its remote calls, and runs its work
    plugins        what is plugged into replication and serving: latency constraints and traces
    __main__       the process: engine, serving, registration with the coordinator

One event loop owns all of it, so there are no locks.
"""
