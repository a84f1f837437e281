"""Latency constraints at the broker: what hops of its streams take, and how long clients may let their buffers fill.

The coordinator tells how long each buffer of a stream may hold records (`budgets`); only of such streams anything is
measured. `manager.LatencyManager` sums up what writers and readers report and what the broker sees itself, makes the
figures that heartbeats carry, and the advice that answers carry. What the broker itself holds back, and until when, is
in `holding`; `held_back` has references to chunks wait for that. Nothing here does I/O, but that `hold_timer` is set.
``kera.broker.plugins`` plugs it in.
"""
