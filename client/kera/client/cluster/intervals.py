"""Merges what several brokers say about an entry whose groups are spread over them. Pure: no connection, no clock.

When a streamlet moves, its older groups stay where they are: each broker has some intervals of its groups, and the
owner has the last one. Positions of an entry compare in log order on all brokers, and ordinals of records continue, so
answers are merged by minimum, maximum and sum.
"""

from __future__ import annotations

from collections.abc import Mapping

from kera.client.types import Assignment, EntryBounds
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import NotOwner
from kera.v1 import broker_pb2

FIRST_SEGMENT_ID = 1


def start_of_group(group_id: int) -> Position:
    """Return the start of a group: the position that brokers answer when a reader goes on in the next interval."""
    return Position(group_id, FIRST_SEGMENT_ID, 0)


def check_part(assignment: Assignment, broker_id: int, info: broker_pb2.StreamletInfo) -> None:
    """Raise `NotOwner` when a broker says that it does not have the part of a streamlet that it was asked for.

    A broker that is not the owner does not know the end: metadata that were restored from a copy name an earlier owner,
    until they have caught up. A broker that does not know yet that it also has the older groups, because their broker
    was drained or lost, does not know the start: readers would miss these groups.
    """
    if broker_id == assignment.broker_id and info.HasField("owned") and not info.owned:
        raise NotOwner(
            f"streamlet {info.streamlet_id} is owned by another broker than broker {broker_id}",
            streamlet_id=info.streamlet_id,
            broker_id=broker_id,
        )
    oldest = assignment.intervals[0].broker_id if assignment.intervals else assignment.broker_id
    if broker_id == oldest and info.HasField("leads") and not info.leads:
        raise NotOwner(
            f"broker {broker_id} has yet to hear that the oldest groups of streamlet {info.streamlet_id} are its own",
            streamlet_id=info.streamlet_id,
            broker_id=broker_id,
        )


def merged_bounds(assignment: Assignment, entry: int, parts: Mapping[int, EntryBounds]) -> EntryBounds:
    """Merge the bounds of an entry at each of its brokers; the owner must be among them.

    The entry starts where the oldest non-empty interval starts, and ends where it ends at the owner.
    """
    owner = parts[assignment.broker_id]
    if not assignment.intervals or len(parts) == 1:
        return owner
    last = assignment.intervals[-1]
    end = max(owner.end, start_of_group(last.first_group_id))  # the owner may only have data of an earlier interval
    next_record = max(
        last.first_records[entry] if entry < len(last.first_records) else 0,
        *(part.next_record for part in parts.values()),
    )
    present = [part for part in parts.values() if part.next_record > part.first_record]
    oldest = min(present, key=lambda part: part.start, default=None)
    return EntryBounds(
        start=end if oldest is None else oldest.start,
        end=end,
        first_record=next_record if oldest is None else oldest.first_record,
        next_record=next_record,
        length_bytes=sum(part.length_bytes for part in parts.values()),
        lost=max(
            (part.lost for part in parts.values() if part.lost is not None), key=lambda lost: lost[1], default=None
        ),
        watermark_us=max((part.watermark_us for part in parts.values() if part.watermark_us is not None), default=None),
        promised_us=owner.promised_us,
        promised_at=owner.promised_at if owner.promised_us is None else max(owner.promised_at, end),
        removed_watermark_us=max(
            (part.removed_watermark_us for part in parts.values() if part.removed_watermark_us is not None),
            default=None,
        ),
        settled_us=max((part.settled_us for part in parts.values() if part.settled_us is not None), default=None),
    )


def cuts(assignment: Assignment, position: Position) -> dict[int, Position]:
    """Return the meaning of "all before `position`" for each broker with data of it; the broker of `position` is last.

    For a broker whose groups all come before, it is the start of the interval that follows its last one.
    """
    if position == EARLIEST or not assignment.intervals:
        return {assignment.broker_at(position): position}
    found: dict[int, Position] = {}
    for interval, following in zip(assignment.intervals, [*assignment.intervals[1:], None], strict=True):
        found.pop(interval.broker_id, None)
        if following is None or position.group_id < following.first_group_id:
            found[interval.broker_id] = position
            break
        found[interval.broker_id] = start_of_group(following.first_group_id)
    return found
