"""Latency constraints: limits on how late records may be on a path of streams and the consumer groups between them.

    paths      checks a constraint: its path, limit and window; pure
    figures    the brokers' measurements of hops, as of their last heartbeats
    filling    finds chunks that are full before their permitted wait is over; pure
    splitting  splits a limit over the hops of its path; pure
    budgets    the time that several constraints together allow the buffers of each stream; pure
    news       logs which constraints are not held, many in one line
    records    the records of constraints in the metadata
    planning   once per window: evaluates each constraint, and sets the brokers' budgets
    service    the requests

Others use `LatencyService`. Brokers themselves decide how to use a budget; ``latency.proto`` defines the terms.
"""
