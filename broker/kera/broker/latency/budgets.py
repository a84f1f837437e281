"""How long each buffer of a stream may hold records, according to the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kera.core.latency.hop import Hop
from kera.v1 import latency_pb2

STREAMS_MAX = 1000
"""Maximum number of streams with budgets; the coordinator has no more constraints."""
WINDOW_MS_MIN = 100
WINDOW_MS_MAX = 3_600_000
WAIT_US_MAX = 3_600_000_000
"""One hour: no buffer waits longer, whatever the coordinator sets."""

NEXT_MAX = 1000
"""Maximum number of next streams, and of consumer groups at which paths end."""


class Budget(NamedTuple):
    """The budget of a stream; extreme values are bounded, because a short wait is better than a long one."""

    window_s: float
    gather_us: int
    replicate_us: int
    hand_over_us: int
    next_ids: Mapping[str, tuple[int, ...]] = {}
    """By consumer group: the streams that it writes its results to."""
    groups: frozenset[str] | None = None
    """The consumer groups that read the stream on paths; None: unknown, from a coordinator of an earlier version."""

    @classmethod
    def of(cls, message: latency_pb2.StreamBudget) -> Budget:
        """Return the budget in a message."""
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
        """Whether a hop of the stream is on a path: a hop of writers, or of a consumer group on a path."""
        return hop < Hop.HAND_OVER or self.groups is None or group in self.groups
