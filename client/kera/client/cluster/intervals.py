"""Entries whose groups are at several brokers, as one. Pure: no connection, no clock.

A streamlet that has moved leaves its older groups where they are: each broker has some intervals of its groups, and the
last one is its owner's. Positions of an entry compare in log order whichever broker they are at, and ordinals of
records go on, so putting answers together is a matter of minimum, maximum and sum.
"""

from __future__ import annotations

from collections.abc import Mapping

from kera.client.types import Assignment, EntryBounds
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import NotOwner
from kera.v1 import broker_pb2

FIRST_SEGMENT_ID = 1


def start_of_group(group_id: int) -> Position:
    """Where a group starts: what brokers answer when a reader goes on in the next interval."""
    return Position(group_id, FIRST_SEGMENT_ID, 0)


def check_part(assignment: Assignment, broker_id: int, info: broker_pb2.StreamletInfo) -> None:
    """Raise `NotOwner` when a broker says that it has not the part of a streamlet for which it was asked.

    One that is not the owner does not know the end: metadata that were restored from a copy name an earlier owner,
    until they have caught up. One that has yet to hear that older groups are its own as well, since the broker that had
    them was drained or lost, does not know the start: from there on they would be passed over.
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
    """Bounds of an entry from what each of its brokers says; the owner must be among them.

    It starts where the oldest interval of which there is anything starts, and ends where it ends at the owner.
    """
    owner = parts[assignment.broker_id]
    if not assignment.intervals or len(parts) == 1:
        return owner
    last = assignment.intervals[-1]
    end = max(owner.end, start_of_group(last.first_group_id))  # what it has may all be of an earlier interval
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
    """The meaning of "all before `position`" at each broker that has some of it; the broker of `position` is the last.

    A broker all of whose groups come before is told the start of the interval that follows its last one.
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
