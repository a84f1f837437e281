"""Latency constraints: how late records may be on a path of streams and those who work between them.

    paths      what a constraint may be: its path, limit and window; pure
    figures    what brokers have measured of the hops, as of their last heartbeats
    filling    which chunks are full before they have waited for as long as they may; pure
    splitting  how a limit is split over the hops of its path; pure
    budgets    what several constraints together allow the buffers of each stream; pure
    news       what the log is told of constraints that are not held, many in one line
    records    how constraints are kept in the metadata
    planning   once per window: who holds, who does not, and what brokers are told
    service    the requests

Others use `LatencyService`. What a broker makes of a budget is its own; the terms are those of ``latency.proto``.
"""
