"""The operations on request or by the coordinator itself, besides recovery: one module for each operation.

``members`` (registering and heartbeats), ``streams`` and ``drops``, ``producers``, ``migration`` and ``rebalancing``,
``drains``, ``restarts``, ``forgetting``, ``feature_levels``; ``unknown``, ``catching_up`` and ``restored`` are about
metadata that are older than their cluster, ``rereading`` about records that somebody else changed. Each takes the
`State` and writes before it acts. What has to be done when is left to ``control``.
"""
