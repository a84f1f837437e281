"""Latency constraints at the broker: how long hops of its streams take, and how long clients may let buffers fill.

The coordinator sets how long each buffer of a stream may hold records (`budgets`); the broker measures only such
streams. `manager.LatencyManager` sums up the reports of writers and readers and the broker's own measurements, and
makes the figures for heartbeats and the advice for answers. `holding` decides what the broker itself holds back, and
until when; `held_back` delays references to chunks by it. Nothing here does I/O, except that `hold_timer` sets a timer.
``kera.broker.plugins`` plugs it in.
"""
