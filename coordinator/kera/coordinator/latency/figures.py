"""Brokers' last measurements of hops. In memory only: after a failover each broker sends them again.

A broker that measures more hops than fit into a heartbeat reports them in turn; a hop keeps its earlier figures until
its next turn.

Each broker measures the streamlets that it owns. The figures of several brokers for a hop are merged: counts add up,
means are weighted by them, and the highest 99th percentile counts, which is no less than the one of all together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kera.coordinator.ids import Launch
from kera.v1 import latency_pb2 as messages

GROUP_CHARS_MAX = 255
COUNT_MAX = 1 << 53
TIME_US_MAX = 24 * 3_600_000_000
"""Maximum of a time, above every limit: only a wrong clock measures more."""
_HOPS = frozenset(value for value in messages.Hop.values() if value)


TURNS_MAX = 8
"""The number of heartbeats within which a broker reports all hops; figures that are older than that are dropped."""


class HopKey(NamedTuple):
    """A hop, as brokers name it."""

    stream_id: int
    hop: messages.Hop.ValueType
    group: str


class Figures(NamedTuple):
    """The figures of a hop over the last window."""

    chunks: int
    mean_us: int
    p99_us: int
    worst_mean_us: int
    """Mean of the worst streamlet."""
    worst_streamlet_id: int
    clock_error_us: int = 0
    """The error bound of the mean; 0: unknown, or a single clock measured it."""
    own_linger_us: int = 0
    """The longest linger_ms that a writer has set itself."""


class _Told(NamedTuple):
    """The figures that a launch has reported."""

    beat: int
    hops: dict[HopKey, tuple[int, Figures]]
    """The figures, each with the number of the heartbeat that contained it."""


class MeasuredHops:
    """The measurements of all brokers, by launch."""

    def __init__(self, is_alive: Callable[[Launch], bool]) -> None:
        self._is_alive = is_alive
        self._told: dict[Launch, _Told] = {}

    def note(self, launch: Launch, told: Sequence[messages.HopFigures], left_out: int = 0) -> None:
        """Note the figures of a launch's heartbeat: all that it has, except for `left_out` hops."""
        before = self._told.get(launch, _Told(0, {}))
        beat, found = before.beat + 1, {}
        if left_out:
            turns = min(TURNS_MAX, -(-left_out // max(1, len(told))) + 1)
            found = {key: known for key, known in before.hops.items() if known[0] > beat - turns}
        for each in told:
            if each.count and each.hop in _HOPS and len(each.consumer_group) <= GROUP_CHARS_MAX:
                figures = Figures(
                    min(each.count, COUNT_MAX),
                    min(each.mean_us, TIME_US_MAX),
                    min(each.p99_us, TIME_US_MAX),
                    min(max(each.worst_mean_us, each.mean_us), TIME_US_MAX),
                    each.worst_streamlet_id,
                    min(each.clock_error_us, TIME_US_MAX),
                    min(each.own_linger_us, TIME_US_MAX),
                )
                found[HopKey(each.stream_id, each.hop, each.consumer_group)] = beat, figures
        if found:
            self._told[launch] = _Told(beat, found)
        else:
            self._told.pop(launch, None)

    def forget_lost(self) -> None:
        """Drop the figures of launches that are not alive, or not current any more."""
        for launch in [launch for launch in self._told if not self._is_alive(launch)]:
            del self._told[launch]

    def of(self, key: HopKey) -> Figures | None:
        """Return the figures of a hop over all brokers; None: no chunk went through it."""
        found = [told.hops[key][1] for told in self._told.values() if key in told.hops]
        return merged(found) if found else None


def merged(figures: Iterable[Figures]) -> Figures:
    """Return the figures of a hop, merged from those of several brokers, at least one."""
    found = list(figures)
    count = sum(each.chunks for each in found)
    worst = max(found, key=lambda each: each.worst_mean_us)
    return Figures(
        count,
        round(sum(each.chunks * each.mean_us for each in found) / count),
        max(each.p99_us for each in found),
        worst.worst_mean_us,
        worst.worst_streamlet_id,
        max(each.clock_error_us for each in found),
        max(each.own_linger_us for each in found),
    )
