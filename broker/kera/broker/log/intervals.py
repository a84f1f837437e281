"""Which part of a streamlet is at this broker: intervals of its groups, and whether it takes chunks for it. Pure.

    groups      1 ........ 7 | 8 ........ 12 | 13 ................►
    broker      3              5               3
                closed         closed          open: the owner's

A streamlet that has moved left its older groups where they were: each broker goes on serving the intervals that it has,
and keeps their replicas. Group ids and ordinals of records go on over the intervals without a gap, so a reader at the
end of one goes on at the start of the next, wherever that is. See docs/design-notes.md,
"Two homes of a streamlet".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from kera.core.base.ids import Position
from kera.v1 import common_pb2

NO_END = 1 << 64
"""Above all group ids: where an interval ends that is still written to."""


class Interval(NamedTuple):
    """Groups of a streamlet that follow each other and are at this broker."""

    first_group_id: int
    end_group_id: int = NO_END
    """The first group of the following interval; `NO_END`: there is none."""
    first_records: tuple[int, ...] = ()
    """Per entry, the ordinal of the interval's first record; empty: all 0."""
    end_records: tuple[int, ...] = ()
    """Per entry, the ordinal of the following interval's first record, likewise."""
    leads: bool = True
    """It is the first one that the streamlet has: who starts with what is oldest starts here."""

    @property
    def closed(self) -> bool:
        """Nothing more comes to it."""
        return self.end_group_id != NO_END

    @property
    def inherits(self) -> bool:
        """Something was before it, at another broker or in an older interval."""
        return not self.leads or self.first_group_id > 1

    @property
    def start(self) -> Position:
        """Where it begins. There need not be a segment: its first group belongs to one entry only."""
        return Position(max(1, self.first_group_id), 1, 0)

    @property
    def following(self) -> Position:
        """Where the following interval begins, if it is closed."""
        return Position(self.end_group_id, 1, 0)

    def first_record(self, entry: int) -> int:
        """Ordinal of the first record of an entry in it."""
        return self.first_records[entry] if entry < len(self.first_records) else 0

    def end_record(self, entry: int) -> int:
        """Ordinal behind the last record of an entry in it, if it is closed."""
        return self.end_records[entry] if entry < len(self.end_records) else 0

    def lost_before(self, entry: int, start: Position, start_record: int) -> bool:
        """Whether an entry that starts at `start` has lost records of this interval; `start` is in it or behind it."""
        first = self.first_record(entry)
        return (self.end_record(entry) if start.group_id >= self.end_group_id else start_record) > first

    def has(self, group_id: int) -> bool:
        """Whether a group belongs to it; 0, the oldest one there is, belongs to the one that leads."""
        return (self.leads or self.first_group_id <= group_id) and group_id < self.end_group_id


_ALL = (Interval(0),)
"""The intervals of a streamlet that has never been elsewhere: one for all groups."""


class Holding(NamedTuple):
    """The part of a streamlet that a broker holds."""

    intervals: tuple[Interval, ...] = _ALL
    """In the order of their groups; none: nothing of the streamlet is here."""
    owned: bool = True
    """It takes the streamlet's chunks; the last interval is open then."""
    broker_epoch: int = 0
    """Epoch of the launch that owns the streamlet, this broker's or another one's."""

    @property
    def inherits(self) -> bool:
        """Whether an owner can go on only with what its predecessor has handed over."""
        return self.owned and self.intervals[-1].inherits


def holding(assignment: common_pb2.StreamletAssignment, broker_id: int) -> Holding:
    """The part of a streamlet that an assignment gives to a broker."""
    owned = assignment.broker_id == broker_id
    if not assignment.intervals:
        return Holding(_ALL if owned else (), owned, assignment.broker_epoch)
    ours: list[Interval] = []
    following = [*assignment.intervals[1:], None]
    for number, (interval, after) in enumerate(zip(assignment.intervals, following, strict=True)):
        if interval.broker_id != broker_id:
            continue
        ours.append(
            Interval(
                interval.first_group_id,
                NO_END if after is None else after.first_group_id,
                tuple(interval.first_records),
                () if after is None else tuple(after.first_records),
                leads=number == 0,
            )
        )
    return Holding(tuple(ours), owned and bool(ours) and not ours[-1].closed, assignment.broker_epoch)


def interval_of(intervals: Sequence[Interval], group_id: int) -> Interval | None:
    """The interval that a group belongs to (0: the oldest one there is); None when that is not here."""
    for interval in intervals:
        if interval.has(group_id):
            return interval
    return None


def interval_before(intervals: Sequence[Interval], group_id: int) -> Interval | None:
    """The last interval that ends at or before a group."""
    return next((interval for interval in reversed(intervals) if interval.end_group_id <= group_id), None)


def interval_after(intervals: Sequence[Interval], group_id: int) -> Interval | None:
    """The first interval that begins behind a group."""
    return next((interval for interval in intervals if interval.first_group_id > group_id), None)


def records_elsewhere(intervals: Sequence[Interval], entry: int, first_record: int, end_record: int) -> int:
    """The number of records from one ordinal up to another that other brokers have."""
    return sum(
        max(0, min(end_record, after.first_record(entry)) - max(first_record, before.end_record(entry)))
        for before, after in pairwise(intervals)
    )


def held_streamlets(infos: Iterable[common_pb2.StreamInfo], broker_id: int) -> set[tuple[int, int]]:
    """Streams and streamlets of which anything is at a broker."""
    return {
        (info.stream_id, assignment.streamlet_id)
        for info in infos
        for assignment in info.assignments
        if holding(assignment, broker_id).intervals
    }
