"""How long each buffer of a stream may hold records, as the coordinator has told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kera.core.latency.hop import Hop
from kera.v1 import latency_pb2

STREAMS_MAX = 1000
"""Maximum of streams with budgets; the coordinator has no more constraints than that."""
WINDOW_MS_MIN = 100
WINDOW_MS_MAX = 3_600_000
WAIT_US_MAX = 3_600_000_000
"""An hour: nothing waits for longer, whatever is told."""

NEXT_MAX = 1000
"""Streams that come next, and consumer groups with which paths end: of as many paths as there are."""


class Budget(NamedTuple):
    """The budget of a stream; odd values are bounded, since waiting for too little is better than for too much."""

    window_s: float
    gather_us: int
    replicate_us: int
    hand_over_us: int
    next_ids: Mapping[str, tuple[int, ...]] = {}
    """By consumer group: the streams to which goes what it makes of this one."""
    groups: frozenset[str] | None = None
    """Those that read it on the paths; None: the coordinator, of a version before, has not told."""

    @classmethod
    def of(cls, message: latency_pb2.StreamBudget) -> Budget:
        """As a message has it."""
        window_ms = min(max(message.window_ms, WINDOW_MS_MIN), WINDOW_MS_MAX)
        waits = (message.gather_us, message.replicate_us, message.hand_over_us)
        next_ids: dict[str, tuple[int, ...]] = {}
        for each in message.next[:NEXT_MAX]:
            next_ids[each.consumer_group] = *next_ids.get(each.consumer_group, ()), each.stream_id
        gather_us, replicate_us, hand_over_us = (min(each, WAIT_US_MAX) for each in waits)
        groups = None
        if message.HasField("ends"):
            groups = frozenset([*next_ids, *message.ends.consumer_groups[:NEXT_MAX]])
        return cls(window_ms / 1000, gather_us, replicate_us, hand_over_us, next_ids, groups)

    def measures(self, hop: int, group: str) -> bool:
        """Whether a hop of the stream is on a path: those of writers, and of the consumer groups there."""
        return hop < Hop.HAND_OVER or self.groups is None or group in self.groups
