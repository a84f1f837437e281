"""Where the groups of a streamlet are: the intervals of its assignment. Pure.

    group ids   1 ──────── 57 ──────── 90 ────────►
    broker      │    1     │     2     │  3, the owner
                interval 0   interval 1   interval 2

Invariants, of every assignment that comes out of here:

1. The last interval is the owner's, and intervals begin one behind the other: each group is at exactly one broker.
2. Two intervals in a row are not of one broker: they are joined.
3. One interval, which can only be the owner's, is written as none: all groups are at the owner.

A change gives a new assignment and leaves the old one as it was. Groups go to another broker only where the caller
says so; where nothing is left of an interval, there are no groups that could.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kera.core.errors import invariant
from kera.v1.common_pb2 import GroupInterval, StreamletAssignment

FIRST_GROUP_ID = 1
"""First group id of a new streamlet."""


def intervals_of(assignment: StreamletAssignment) -> list[GroupInterval]:
    """Its intervals, in their order: at least one, the last one is the owner's."""
    if assignment.intervals:
        return [_copy(interval) for interval in assignment.intervals]
    return [GroupInterval(first_group_id=FIRST_GROUP_ID, broker_id=assignment.broker_id)]


def before_last(assignment: StreamletAssignment) -> GroupInterval | None:
    """The interval behind which the owner's begins; None: that is the first one."""
    return _copy(assignment.intervals[-2]) if len(assignment.intervals) > 1 else None


def index_of_group(assignment: StreamletAssignment, group_id: int) -> int:
    """Which interval has this group; the first one if it is below all of them (0: the oldest there is)."""
    begun = [index for index, interval in enumerate(assignment.intervals) if interval.first_group_id <= group_id]
    return max(begun, default=0)


def broker_of_group(assignment: StreamletAssignment, group_id: int) -> int:
    """The broker that has this group, or would have it."""
    return intervals_of(assignment)[index_of_group(assignment, group_id)].broker_id


def broker_ids_of(assignment: StreamletAssignment) -> set[int]:
    """The brokers that have groups of the streamlet: its owner, and those of older intervals."""
    return {assignment.broker_id, *(interval.broker_id for interval in assignment.intervals)}


def moved(
    assignment: StreamletAssignment,
    broker_id: int,
    broker_epoch: int,
    *,
    next_group_id: int,
    first_records: Sequence[int],
) -> StreamletAssignment:
    """The streamlet goes to a new owner from group `next_group_id` on; older groups stay where they are.

    An owner that wrote no group leaves no interval behind.
    """
    intervals = intervals_of(assignment)
    invariant(next_group_id >= intervals[-1].first_group_id, "groups go on behind those there are")
    if intervals[-1].first_group_id == next_group_id:
        intervals.pop()
    intervals.append(GroupInterval(first_group_id=next_group_id, broker_id=broker_id, first_records=first_records))
    return _owned(assignment, broker_id, broker_epoch, next_group_id, intervals)


def taken_over(
    assignment: StreamletAssignment, lost_broker_id: int, broker_id: int, broker_epoch: int, *, next_group_id: int
) -> StreamletAssignment:
    """All intervals of a broker that was lost go to `broker_id`, which is the owner from now on.

    It is the owner already, or takes the place of the lost one.
    """
    invariant(assignment.broker_id in {lost_broker_id, broker_id}, "nobody loses a streamlet who was not lost")
    intervals = intervals_of(assignment)
    for interval in intervals:
        if interval.broker_id == lost_broker_id:
            interval.broker_id = broker_id
    return _owned(assignment, broker_id, broker_epoch, next_group_id, intervals)


def emptied(
    assignment: StreamletAssignment, broker_id: int, first_group_id: int, end_group_id: int
) -> StreamletAssignment:
    """Nothing is left of this interval of this broker: it goes. The owner's stays, and so does one that is not there.

    One that was joined with later ones ends elsewhere: whoever says that it is empty did not know of those. Positions
    in it then belong to the interval before it, or, if it was the first one, to the one behind it; there is
    no group that they could mean.
    """
    intervals = intervals_of(assignment)
    gone = (broker_id, first_group_id, end_group_id)
    kept = [
        one for one, after in pairwise(intervals) if (one.broker_id, one.first_group_id, after.first_group_id) != gone
    ]
    return _written(assignment, [*kept, intervals[-1]])


def _owned(
    assignment: StreamletAssignment,
    broker_id: int,
    broker_epoch: int,
    first_group_id: int,
    intervals: list[GroupInterval],
) -> StreamletAssignment:
    changed = _written(assignment, intervals)
    changed.broker_id, changed.broker_epoch = broker_id, broker_epoch
    changed.first_group_id = max(assignment.first_group_id, first_group_id)
    return changed


def _written(assignment: StreamletAssignment, intervals: list[GroupInterval]) -> StreamletAssignment:
    joined: list[GroupInterval] = []
    for interval in intervals:
        if not joined or joined[-1].broker_id != interval.broker_id:
            joined.append(interval)
    changed = StreamletAssignment()
    changed.CopyFrom(assignment)
    del changed.intervals[:]
    if len(joined) > 1:
        changed.intervals.extend(joined)
    return changed


def _copy(interval: GroupInterval) -> GroupInterval:
    copied = GroupInterval()
    copied.CopyFrom(interval)
    return copied
