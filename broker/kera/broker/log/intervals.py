"""The part of a streamlet that a broker has: intervals of its groups, and whether it takes chunks. Pure.

    groups      1 ........ 7 | 8 ........ 12 | 13 ................►
    broker      3              5               3
                closed         closed          open: the owner's

When a streamlet moves, its older groups stay where they are: each broker continues to serve its intervals, and keeps
their replicas. Group ids and ordinals of records continue over the intervals without a gap. So a reader at the end of
an interval goes on at the start of the next one, at whichever broker. See docs/design-notes.md,
"Two homes of a streamlet".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from kera.core.base.ids import Position
from kera.v1 import common_pb2

NO_END = 1 << 64
"""The end of an interval that is still written to; greater than all group ids."""


class Interval(NamedTuple):
    """Consecutive groups of a streamlet at this broker."""

    first_group_id: int
    end_group_id: int = NO_END
    """The first group of the following interval; `NO_END` if there is none."""
    first_records: tuple[int, ...] = ()
    """The ordinals of the interval's first record, by entry; empty: all 0."""
    end_records: tuple[int, ...] = ()
    """The ordinals of the following interval's first record, by entry; empty: all 0."""
    leads: bool = True
    """Whether this is the streamlet's first interval, at which readers from the earliest position start."""

    @property
    def closed(self) -> bool:
        """Whether the interval gets no more data."""
        return self.end_group_id != NO_END

    @property
    def inherits(self) -> bool:
        """Whether the streamlet had data before this interval, at another broker or in an older interval."""
        return not self.leads or self.first_group_id > 1

    @property
    def start(self) -> Position:
        """The start of the interval. It need not have a segment there: its first group belongs to one entry only."""
        return Position(max(1, self.first_group_id), 1, 0)

    @property
    def following(self) -> Position:
        """The start of the following interval, if this one is closed."""
        return Position(self.end_group_id, 1, 0)

    def first_record(self, entry: int) -> int:
        """Return the ordinal of an entry's first record in the interval."""
        return self.first_records[entry] if entry < len(self.first_records) else 0

    def end_record(self, entry: int) -> int:
        """Return the ordinal behind an entry's last record in the interval, if it is closed."""
        return self.end_records[entry] if entry < len(self.end_records) else 0

    def lost_before(self, entry: int, start: Position, start_record: int) -> bool:
        """Whether an entry that starts at `start`, in or behind this interval, has lost records of this interval."""
        first = self.first_record(entry)
        return (self.end_record(entry) if start.group_id >= self.end_group_id else start_record) > first

    def has(self, group_id: int) -> bool:
        """Whether a group belongs to the interval; group 0, the oldest one, belongs to the interval that leads."""
        return (self.leads or self.first_group_id <= group_id) and group_id < self.end_group_id


_ALL = (Interval(0),)
"""The intervals of a streamlet that has never moved: a single one for all groups."""


class Holding(NamedTuple):
    """The part of a streamlet that a broker holds."""

    intervals: tuple[Interval, ...] = _ALL
    """The intervals in the order of their groups; empty if the broker has nothing of the streamlet."""
    owned: bool = True
    """Whether the broker takes the streamlet's chunks; the last interval is open then."""
    broker_epoch: int = 0
    """Epoch of the launch that owns the streamlet, at this broker or another one."""

    @property
    def inherits(self) -> bool:
        """Whether this broker owns the streamlet, and needs the state that the former owner handed over."""
        return self.owned and self.intervals[-1].inherits


def holding(assignment: common_pb2.StreamletAssignment, broker_id: int) -> Holding:
    """Return the part of a streamlet that an assignment gives to a broker."""
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
    """Return the interval of a group (0: the oldest group); None if it is not here."""
    for interval in intervals:
        if interval.has(group_id):
            return interval
    return None


def interval_before(intervals: Sequence[Interval], group_id: int) -> Interval | None:
    """Return the last interval that ends at or before a group."""
    return next((interval for interval in reversed(intervals) if interval.end_group_id <= group_id), None)


def interval_after(intervals: Sequence[Interval], group_id: int) -> Interval | None:
    """Return the first interval that begins behind a group."""
    return next((interval for interval in intervals if interval.first_group_id > group_id), None)


def records_elsewhere(intervals: Sequence[Interval], entry: int, first_record: int, end_record: int) -> int:
    """Return how many records between two ordinals other brokers have."""
    return sum(
        max(0, min(end_record, after.first_record(entry)) - max(first_record, before.end_record(entry)))
        for before, after in pairwise(intervals)
    )


def held_streamlets(infos: Iterable[common_pb2.StreamInfo], broker_id: int) -> set[tuple[int, int]]:
    """Return the stream and streamlet ids of which a broker has any interval."""
    return {
        (info.stream_id, assignment.streamlet_id)
        for info in infos
        for assignment in info.assignments
        if holding(assignment, broker_id).intervals
    }
