"""Waits that are not over, as figures of completed ones: an application that hangs completes nothing, and would have
none.

So the time so far counts, too: of what has waited longest of a stream, once per report. What is over counts in full,
and by itself; so the time so far of something that takes no longer than others did would only make the mean less than
it is. It counts from when it is longer than the time between two reports, and than what took long not long ago: so of
an application that is as it was before, figures are what they would be without. Pure; times in microseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from kera.client.consuming.fetching.ranges import Range
from kera.core.base.ids import EntryId
from kera.core.latency.hop import Hop

FADES = 8
"""By an eighth with each that is over the longest before it is forgotten."""


class Came(NamedTuple):
    """When chunks came, and from where."""

    broker_id: int
    at_s: float


class Waiting(NamedTuple):
    """Data of a range that have come and are not taken."""

    range: Range
    entry: EntryId
    came: Came | None
    """None: they have no chunks."""


class StreamHop(NamedTuple):
    """A hop, for which somebody reads a stream."""

    stream_id: int
    hop: Hop


class Usual:
    """How long hops took not long ago."""

    def __init__(self) -> None:
        self._longest_us: dict[StreamHop, int] = {}

    def over(self, of: StreamHop, us: int) -> None:
        """It took so long."""
        known_us = self._longest_us.get(of, 0)
        self._longest_us[of] = max(us, known_us - known_us // FADES)

    def is_exceeded(self, of: StreamHop, us: int, least_us: int) -> bool:
        """Whether something that has waited for so long counts already. `least_us`: the time between two reports."""
        return us > max(least_us, self._longest_us.get(of, 0))

    def keep(self, stream_ids: Collection[int]) -> None:
        """Other streams are not measured any more."""
        self._longest_us = {of: us for of, us in self._longest_us.items() if of.stream_id in stream_ids}


def oldest(waiting: Iterable[Waiting], stream_ids: Collection[int]) -> Mapping[int, Waiting]:
    """By stream, of these, the first chunks that wait; those do not that belong to somebody else by now."""
    found: dict[int, Waiting] = {}
    for each in waiting:
        if len(found) == len(stream_ids):
            break
        stream_id = each.entry.stream_id
        if stream_id in stream_ids and each.came is not None and not each.range.dropped:
            found.setdefault(stream_id, each)
    return found
