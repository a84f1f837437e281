"""Where the entries and groups of a streamlet start and end at this broker, and how much a reader has before it.

Only what is durable at the stream's level counts. What is at other brokers is not part of it, though ordinals count it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from kera.broker.log.entry import Entry, length_of
from kera.broker.log.intervals import interval_of, records_elsewhere
from kera.broker.log.read_plan import ordinal_of
from kera.broker.log.segment import Segment
from kera.broker.log.streamlet import Streamlet
from kera.broker.records import Key, SegmentRecord
from kera.core.base.ids import EARLIEST, Position

LAG_SEGMENTS_MAX = 1024
"""Segments before a reader whose bytes are counted exactly; those behind them are estimated."""


def ordinal_at(streamlet: Streamlet, entry: Entry, position: Position) -> int:
    """Ordinal of the first record at or after `position`, within its interval or at that one's end."""
    interval = interval_of(streamlet.intervals, position.group_id)
    record = ordinal_of(entry, position)
    return min(record, interval.end_record(entry.index)) if interval is not None and interval.closed else record


def end_of(streamlet: Streamlet, entry: Entry) -> tuple[Position, int]:
    """Up to where readers can read here, and the ordinal of the next record to come there."""
    last, end = streamlet.intervals[-1], entry.end
    if last.inherits and end < last.start:
        return last.start, last.first_record(entry.index)
    return end, ordinal_at(streamlet, entry, end)


def removed_before(streamlet: Streamlet, entry: Entry) -> tuple[Position, int] | None:
    """Up to where an entry is gone, and the ordinal there, wherever that was: something of it was removed here.

    Not where it once began while the streamlet was here before: that is older than all that is here now. And an
    interval from which nothing was removed says nothing of what others have between it and the one before it here.
    """
    first, before = streamlet.intervals[0], None
    if entry.start <= first.start or entry.start_record <= first.first_record(entry.index):
        return None
    for interval in streamlet.intervals:
        if interval.has(entry.start.group_id):
            if before is None or entry.start_record > interval.first_record(entry.index):
                break
            records = before.end_record(entry.index)
            return (before.following, records) if records > first.first_record(entry.index) else None
        before = interval
    return entry.start, entry.start_record


def lag_records(streamlet: Streamlet, entry: Entry, position: Position) -> int:
    """Records of this broker between `position` and the durable head."""
    end = entry.end
    if position >= end or end == EARLIEST:
        return 0
    position = max(position, entry.start)
    first_record, end_record = ordinal_at(streamlet, entry, position), ordinal_at(streamlet, entry, end)
    records = max(0, end_record - first_record)
    if records and len(streamlet.intervals) > 1:
        records -= records_elsewhere(streamlet.intervals, entry.index, first_record, end_record)
    return records


def lag_bytes(entry: Entry, position: Position, records: int) -> int:
    """Bytes of chunks between `position` and the durable head, where so many `records` are."""
    position = max(position, entry.start)
    key = (position.group_id, position.segment_id)
    found = entry.find(key)
    length = max(0, _durable(found) - position.offset) if found is not None else 0
    seen = found.first_record + found.record_count if found is not None else 0
    for number, (_, segment) in enumerate(entry.segments(key)):
        if number == LAG_SEGMENTS_MAX:
            known = max(1, seen - ordinal_of(entry, position))
            return max(length, length * records // known)
        length += _durable(segment)
        seen = segment.first_record + segment.record_count
    return length


def oldest_us(entry: Entry, position: Position) -> int:
    """When the chunk at `position` was made; 0: there is none yet.

    Of a segment that is on disk only, it is when its newest one was made: it is not loaded for that.
    """
    position = max(position, entry.start)
    found: tuple[Key, Segment | SegmentRecord] | None
    key = (position.group_id, position.segment_id)
    at, offset = entry.find(key), position.offset
    if at is None or offset >= _durable(at):
        found, offset = entry.following(key), 0
    else:
        found = (key, at)
    if found is None or offset >= _durable(found[1]):
        return 0
    segment = found[1]
    if isinstance(segment, Segment) and not segment.loading and segment.hole_at(offset) is None:
        return segment.header_at(offset).created_us
    return segment.newest_us


class GroupBounds(NamedTuple):
    """A group, as far as it is durable."""

    group_id: int
    entry: int
    closed: bool
    """Nothing more comes to it, and all of it is durable."""
    start: Position
    end: Position
    first_record: int
    next_record: int
    length_bytes: int


def list_groups(
    streamlet: Streamlet, after_group_id: int, groups_max: int
) -> Generator[None, None, tuple[list[GroupBounds], bool]]:
    """Groups behind one, in the order of their ids; and whether there are no more to be seen.

    Up to the first one of which nothing is durable: if later ones were listed before it, it would be overlooked. So
    would one that is opened meanwhile, by an entry that had none left when it was asked; so none of these is listed.
    Yields after each segment; the answer is of no one moment then, but each group that it has, was so at one.
    """
    found: list[GroupBounds] = []
    through_id = streamlet.next_group_id - 1
    heads = {entry: _next_group(entry, after_group_id) for entry in streamlet.entries.made}
    while len(found) < groups_max:
        candidates = [
            (group_id, entry.index)
            for entry, group_id in heads.items()
            if group_id is not None and group_id <= through_id
        ]
        if not candidates:
            return found, True
        group_id, index = min(candidates)
        entry = streamlet.entries[index]
        bounds = yield from group_bounds(streamlet, entry, group_id)
        if bounds is None:
            return found, True
        found.append(bounds)
        heads[entry] = _next_group(entry, group_id)
    return found, False


def _next_group(entry: Entry, after: int) -> int | None:
    """The first one behind `after` of which anything is left, or to which more comes, all that it had being removed."""
    left, head = entry.next_group(after), entry.head
    if left is None and head is not None and head.address.group_id > after:
        return head.address.group_id
    return left


def group_bounds(streamlet: Streamlet, entry: Entry, group_id: int) -> Generator[None, None, GroupBounds | None]:
    """The bounds of one group; None while nothing of it was ever durable, or if nothing is left of it and nothing more
    comes.
    """
    active = streamlet.is_active(group_id, entry)  # first: what comes while others run is not in what was looked at
    start = entry.start if entry.start.group_id == group_id else None
    end, first_record, record, length, whole = EARLIEST, 0, 0, 0, True
    for key, segment in entry.group_segments(group_id):
        if start is None:
            start = Position(*key, 0)
        if end == EARLIEST:
            end, first_record = start, ordinal_of(entry, start)
            record = first_record
        durable = _told(entry, key, segment)
        begin = start.offset if key == (start.group_id, start.segment_id) else 0
        if durable > begin:
            end, length = Position(*key, durable), length + durable - begin
            record = _record_at(entry, segment, end)
        whole = durable == length_of(segment) and not _is_unsure(entry, Position(*key, durable))
        if not whole:
            break
        yield
    if not length and active and start is not None and start > Position(group_id, 1, 0):
        end, record = start, entry.start_record  # all that was in it has been removed
        return GroupBounds(group_id, entry.index, whole and not active, start, end, record, record, 0)
    if not length or start is None:
        return None
    return GroupBounds(group_id, entry.index, whole and not active, start, end, first_record, record, length)


def _record_at(entry: Entry, segment: Segment | SegmentRecord, end: Position) -> int:
    if end.offset == length_of(segment):
        return segment.first_record + segment.record_count
    return ordinal_of(entry, end)


def _told(entry: Entry, key: Key, segment: Segment | SegmentRecord) -> int:
    """Bytes of a segment that are durable, and of which somebody may be told."""
    durable = _durable(segment)
    if entry.unsure is None or not _is_unsure(entry, Position(*key, durable)):
        return durable
    return min(durable, entry.unsure.position.offset) if key == entry.unsure.position[:2] else 0


def _is_unsure(entry: Entry, position: Position) -> bool:
    return entry.unsure is not None and position >= entry.unsure.position


def _durable(segment: Segment | SegmentRecord) -> int:
    return segment.durable_head if isinstance(segment, Segment) else segment.length
