"""The coordinator: the streams, the owners of their streamlets, the live daemons (thesis 6.3.1).

From the bottom up, and nothing imports what is above it:

    ids               what others are called by
    store/            what survives a coordinator: metadata in LMDB or ZooKeeper, who leads
    cluster/          what a coordinator knows, and the ways to reach those that it knows
    recovery/         what happens to what a dead broker had
    operations/       everything else that is done: registering, streams, moves, drains, restarts, forgetting, restoring
    consumer_groups/  consumers that share streams
    control           finds out what there is to do, and has it done
    coordinator       makes all of these, and is what is asked
    service, __main__ remote calls, and the process

One event loop owns all of it. Changes are made one at a time (``cluster.changing``): written first, then acted on.
"""
