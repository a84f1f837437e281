"""The coordinator: the streams, the owners of their streamlets, the live daemons (thesis 6.3.1).

The parts from the bottom up; no part imports one above it:

    ids               identifiers of streamlets and of launches
    store/            what survives a coordinator: metadata in LMDB or ZooKeeper, and the election of the leader
    cluster/          the coordinator's knowledge of the cluster, and the calls to brokers and backups
    recovery/         moves the data of a dead broker to others
    operations/       all other operations: registering, streams, moves, drains, restarts, forgetting, restoring
    consumer_groups/  consumers that share streams
    control           looks periodically for pending work, and starts it
    coordinator       builds all of these, and answers requests
    service, __main__ remote calls, and the process

One event loop owns all of it. Changes are made one at a time (``cluster.changing``): written first, then acted on.
"""
