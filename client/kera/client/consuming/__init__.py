"""Consumers: of a range of a stream, or of what a consumer group leaves to each of its members.

``consumer`` and ``group_consumer`` are what users have; ``range_reading`` reads a range to its end. What they are made
of lies in packages, each on those before it:

    fetching    fetches chunks ahead, by push or pull; a queue is between it and the consumer
    plugins     the places at which something can be plugged into a consumer
    delivering  opens what has come, and makes batches, records, and Python objects of it
    groups      a member of a consumer group: leases, rounds with the coordinator, heartbeats
    latency     what is plugged in: measurements for latency constraints; ``traced``: spans

How a broker is read from is ``cluster``'s business.
"""
