"""Brokers' last measurements of hops. In memory only: after a failover each broker sends them again.

A broker that measures more hops than a heartbeat has room for tells of them in turn; of the others counts what it said
before, until it has had its turn.

Each broker knows the streamlets that it owns. What several say of a hop becomes one: counts add up, means are weighed
by them, and of 99th percentiles the highest counts, which is no less than that of all together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kera.coordinator.ids import Launch
from kera.v1 import latency_pb2 as messages

GROUP_CHARS_MAX = 255
COUNT_MAX = 1 << 53
TIME_US_MAX = 24 * 3_600_000_000
"""More than any limit: who says more has a clock that is wrong."""
_HOPS = frozenset(value for value in messages.Hop.values() if value)


TURNS_MAX = 8
"""In so many heartbeats a broker tells of all hops; what was not told again by then is forgotten."""


class HopKey(NamedTuple):
    """A hop, as brokers name it."""

    stream_id: int
    hop: messages.Hop.ValueType
    group: str


class Figures(NamedTuple):
    """The figures of a hop, over the last window."""

    chunks: int
    mean_us: int
    p99_us: int
    worst_mean_us: int
    """Mean of the worst streamlet."""
    worst_streamlet_id: int
    clock_error_us: int = 0
    """By how much the mean can be off; 0: nobody knows, or it is of one clock alone."""
    own_linger_us: int = 0
    """The longest linger_ms that a writer has of its own."""


class _Told(NamedTuple):
    """The report of a launch."""

    beat: int
    hops: dict[HopKey, tuple[int, Figures]]
    """With the number of the heartbeat that told of it."""


class MeasuredHops:
    """By launch of a broker."""

    def __init__(self, is_alive: Callable[[Launch], bool]) -> None:
        self._is_alive = is_alive
        self._told: dict[Launch, _Told] = {}

    def note(self, launch: Launch, told: Sequence[messages.HopFigures], left_out: int = 0) -> None:
        """Note the figures of a launch's heartbeat: all that it has, except for so many hops that were left out."""
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
        """Drop what those have said that are not alive, or not the current launch any more."""
        for launch in [launch for launch in self._told if not self._is_alive(launch)]:
            del self._told[launch]

    def of(self, key: HopKey) -> Figures | None:
        """The figures of a hop over all brokers; None: no chunk went through it."""
        found = [told.hops[key][1] for told in self._told.values() if key in told.hops]
        return merged(found) if found else None


def merged(figures: Iterable[Figures]) -> Figures:
    """The figures of a hop from those of several brokers, at least one."""
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
