"""The starts and ends of a streamlet's entries and groups at this broker, and how far a reader lags behind.

Only data that is durable at the stream's level counts. Data at other brokers does not count, although ordinals do count
its records.
"""

from __future__ import annotations

from collections.abc import Generator
from heapq import heappop, heappush
from typing import NamedTuple

from kera.broker.log.entry import Entry, length_of
from kera.broker.log.intervals import interval_of, records_elsewhere
from kera.broker.log.read_plan import ordinal_of
from kera.broker.log.segment import Segment
from kera.broker.log.streamlet import Streamlet
from kera.broker.records import Key, SegmentRecord
from kera.core.base.ids import EARLIEST, Position

LAG_SEGMENTS_MAX = 1024
"""Segments of a reader's lag whose bytes are counted exactly; the bytes of further ones are estimated."""


def ordinal_at(streamlet: Streamlet, entry: Entry, position: Position) -> int:
    """Return the ordinal of the first record at or after `position`, but at most that of its interval's end."""
    interval = interval_of(streamlet.intervals, position.group_id)
    record = ordinal_of(entry, position)
    return min(record, interval.end_record(entry.index)) if interval is not None and interval.closed else record


def end_of(streamlet: Streamlet, entry: Entry) -> tuple[Position, int]:
    """Return the position up to which readers can read here, and the ordinal of the next record there."""
    last, end = streamlet.intervals[-1], entry.end
    if last.inherits and end < last.start:
        return last.start, last.first_record(entry.index)
    return end, ordinal_at(streamlet, entry, end)


def removed_before(streamlet: Streamlet, entry: Entry) -> tuple[Position, int] | None:
    """Return the position and ordinal before which an entry was removed; None if nothing was removed here.

    The start of an earlier time of the streamlet at this broker does not count: it is older than all that is here now.
    If nothing was removed from the interval of the start, the end of the interval before it here counts, because other
    brokers may have data in between.
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
    """Return the number of this broker's records between `position` and the durable head."""
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
    """Return the bytes of chunks between `position` and the durable head, which have `records` records."""
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
    """Return when the chunk at `position` was made; 0 if there is none yet.

    For a segment that is only on disk, return when its newest chunk was appended: it is not loaded for that.
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
    """The durable part of a group."""

    group_id: int
    entry: int
    closed: bool
    """Whether the group gets no more data, and all of it is durable."""
    start: Position
    end: Position
    first_record: int
    next_record: int
    length_bytes: int


def list_groups(
    streamlet: Streamlet, after_group_id: int, groups_max: int
) -> Generator[None, None, tuple[list[GroupBounds], bool]]:
    """Return the groups behind `after_group_id` in the order of their ids, and whether the list is complete.

    The list ends at the first group without durable data: a reader that saw later groups would miss that one. For the
    same reason, groups that are opened during the call are not listed. Yields after each entry and segment, so the list
    is not a snapshot of one moment, but the bounds of each group are.
    """
    found: list[GroupBounds] = []
    through_id = streamlet.next_group_id - 1
    heads: list[tuple[int, int]] = []
    for entry in list(streamlet.entries.made):
        _push_next(heads, entry, after_group_id, through_id)
        yield
    while len(found) < groups_max:
        if not heads:
            return found, True
        group_id, index = heappop(heads)
        entry = streamlet.entries[index]
        if _next_group(entry, group_id - 1) == group_id:  # otherwise it was removed meanwhile
            bounds = yield from group_bounds(streamlet, entry, group_id)
            if bounds is None:
                return found, True
            found.append(bounds)
        _push_next(heads, entry, group_id, through_id)
    return found, False


def _push_next(heads: list[tuple[int, int]], entry: Entry, after: int, through_id: int) -> None:
    """Add the first group of an entry behind `after`, if there is one up to `through_id`, to a heap of groups."""
    group_id = _next_group(entry, after)
    if group_id is not None and group_id <= through_id:
        heappush(heads, (group_id, entry.index))


def _next_group(entry: Entry, after: int) -> int | None:
    """Return the first group behind `after` that has data left, or is open although all its data was removed."""
    left, head = entry.next_group(after), entry.head
    if left is None and head is not None and head.address.group_id > after:
        return head.address.group_id
    return left


def group_bounds(streamlet: Streamlet, entry: Entry, group_id: int) -> Generator[None, None, GroupBounds | None]:
    """Return the bounds of one group.

    Returns None if nothing of it was ever durable, or if all of it was removed and it gets no more data.
    """
    active = streamlet.is_active(group_id, entry)  # first: the walk does not see data that arrives between its steps
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
        end, record = start, entry.start_record  # all its data was removed
        return GroupBounds(group_id, entry.index, whole and not active, start, end, record, record, 0)
    if not length or start is None:
        return None
    return GroupBounds(group_id, entry.index, whole and not active, start, end, first_record, record, length)


def _record_at(entry: Entry, segment: Segment | SegmentRecord, end: Position) -> int:
    if end.offset == length_of(segment):
        return segment.first_record + segment.record_count
    return ordinal_of(entry, end)


def _told(entry: Entry, key: Key, segment: Segment | SegmentRecord) -> int:
    """Return the durable bytes of a segment that lie before the entry's unsure tail."""
    durable = _durable(segment)
    if entry.unsure is None or not _is_unsure(entry, Position(*key, durable)):
        return durable
    return min(durable, entry.unsure.position.offset) if key == entry.unsure.position[:2] else 0


def _is_unsure(entry: Entry, position: Position) -> bool:
    return entry.unsure is not None and position >= entry.unsure.position


def _durable(segment: Segment | SegmentRecord) -> int:
    return segment.durable_head if isinstance(segment, Segment) else segment.length
