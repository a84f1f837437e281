"""The operations besides recovery, on request or by the coordinator itself: one module for each.

``members`` (registering and heartbeats), ``streams`` and ``drops``, ``producers``, ``migration`` and ``rebalancing``,
``drains``, ``restarts``, ``forgetting``, ``feature_levels``. ``unknown``, ``catching_up`` and ``restored`` handle
metadata that are older than their cluster, ``rereading`` handles records that somebody else changed. Each takes the
`State` and writes before it acts. ``control`` decides when to run them.
"""
