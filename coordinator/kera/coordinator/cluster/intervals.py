"""The intervals of an assignment, which say which broker has which groups of a streamlet. Pure.

    group ids   1 ──────── 57 ──────── 90 ────────►
    broker      │    1     │     2     │  3, the owner
                interval 0   interval 1   interval 2

Invariants of every assignment that these functions return:

1. The last interval is the owner's, and intervals begin one behind the other: each group is at exactly one broker.
2. Two neighbouring intervals never belong to the same broker: they are joined.
3. A single interval, which can only be the owner's, is written as no interval: all groups are at the owner.

A change returns a new assignment and does not modify the old one. Groups go to another broker only where the caller
says so; where nothing is left of an interval, there are no groups to go.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kera.core.errors import invariant
from kera.v1.common_pb2 import GroupInterval, StreamletAssignment

FIRST_GROUP_ID = 1
"""First group id of a new streamlet."""


def intervals_of(assignment: StreamletAssignment) -> list[GroupInterval]:
    """Return a copy of the intervals in order: at least one, and the last one is the owner's."""
    if assignment.intervals:
        return [_copy(interval) for interval in assignment.intervals]
    return [GroupInterval(first_group_id=FIRST_GROUP_ID, broker_id=assignment.broker_id)]


def before_last(assignment: StreamletAssignment) -> GroupInterval | None:
    """Return the interval before the owner's; None if the owner's is the first one."""
    return _copy(assignment.intervals[-2]) if len(assignment.intervals) > 1 else None


def index_of_group(assignment: StreamletAssignment, group_id: int) -> int:
    """Return which interval has this group; the first one if the group is below all of them (0: the oldest group)."""
    begun = [index for index, interval in enumerate(assignment.intervals) if interval.first_group_id <= group_id]
    return max(begun, default=0)


def broker_of_group(assignment: StreamletAssignment, group_id: int) -> int:
    """Return the broker that has this group, or would have it."""
    return intervals_of(assignment)[index_of_group(assignment, group_id)].broker_id


def broker_ids_of(assignment: StreamletAssignment) -> set[int]:
    """Return the brokers that have groups of the streamlet: its owner, and the brokers of older intervals."""
    return {assignment.broker_id, *(interval.broker_id for interval in assignment.intervals)}


def moved(
    assignment: StreamletAssignment,
    broker_id: int,
    broker_epoch: int,
    *,
    next_group_id: int,
    first_records: Sequence[int],
) -> StreamletAssignment:
    """Return the assignment with a new owner from group `next_group_id` on; older groups stay where they are.

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
    """Return the assignment in which all intervals of a lost broker go to `broker_id`, the owner from now on.

    `broker_id` is the owner already, or replaces the lost broker as owner.
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
    """Return the assignment without this interval of this broker, of which nothing is left.

    The owner's interval stays, and an interval that does not exist is no error. An interval that was joined with later
    ones ends elsewhere and stays: the broker that reported it empty did not know of those. Positions in a removed
    interval then belong to the interval before it, or, if it was the first one, to the one behind it; no group exists
    at them.
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
