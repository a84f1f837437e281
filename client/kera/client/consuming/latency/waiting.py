"""Counts waits that are not over: an application that hangs completes none, and would have no measurements.

So the time so far counts, too: of the data of a stream that have waited longest, once per report. A completed wait
counts in full. Counting the time so far of a wait no longer than usual would only lower the mean. So it counts once it
is longer than the time between two reports, and longer than recent long waits: for an application that works as
before, the figures do not change. Pure; times in microseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from kera.client.consuming.fetching.ranges import Range
from kera.core.base.ids import EntryId
from kera.core.latency.hop import Hop

FADES = 8
"""Each completed wait reduces the longest earlier one by this fraction (1 / 8)."""


class Came(NamedTuple):
    """The arrival of chunks: the time and the broker."""

    broker_id: int
    at_s: float


class Waiting(NamedTuple):
    """Fetched data of a range that are not taken yet."""

    range: Range
    entry: EntryId
    came: Came | None
    """Their arrival; None: they have no chunks."""


class StreamHop(NamedTuple):
    """A hop of a stream."""

    stream_id: int
    hop: Hop


class Usual:
    """How long hops took recently."""

    def __init__(self) -> None:
        self._longest_us: dict[StreamHop, int] = {}

    def over(self, of: StreamHop, us: int) -> None:
        """Note how long a completed hop took."""
        known_us = self._longest_us.get(of, 0)
        self._longest_us[of] = max(us, known_us - known_us // FADES)

    def is_exceeded(self, of: StreamHop, us: int, least_us: int) -> bool:
        """Return whether a wait of `us` so far counts already. `least_us`: the time between two reports."""
        return us > max(least_us, self._longest_us.get(of, 0))

    def keep(self, stream_ids: Collection[int]) -> None:
        """Forget all other streams."""
        self._longest_us = {of: us for of, us in self._longest_us.items() if of.stream_id in stream_ids}


def oldest(waiting: Iterable[Waiting], stream_ids: Collection[int]) -> Mapping[int, Waiting]:
    """Return the first waiting chunks of each of these streams, without data that belong to another member by now."""
    found: dict[int, Waiting] = {}
    for each in waiting:
        if len(found) == len(stream_ids):
            break
        stream_id = each.entry.stream_id
        if stream_id in stream_ids and each.came is not None and not each.range.dropped:
            found.setdefault(stream_id, each)
    return found
