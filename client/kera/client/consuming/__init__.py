"""Consumers: of a range of a stream, or of the share that a consumer group assigns to each of its members.

Users have ``consumer`` and ``group_consumer``; ``range_reading`` reads a range to its end. Their parts lie in packages,
each of which builds on those before it:

    fetching    fetches chunks ahead, by push or pull; a queue is between it and the consumer
    plugins     hooks for plug-ins of a consumer
    delivering  opens fetched chunks, and makes batches, records, and Python objects of them
    groups      a member of a consumer group: leases, rounds with the coordinator, heartbeats
    latency     a plug-in: measurements for latency constraints; ``traced`` is another one: spans

``cluster`` reads from brokers.
"""
