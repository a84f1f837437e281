"""Reading a streamlet: turns positions into ranges of segments, with whole chunks before the durable head only.

No bytes are touched here: the services turn the ranges into bytes on a socket, or references into the arena. Nor does
planning wait for the disk: the plan names the segment that has to be loaded first.

Of a streamlet that has moved, this broker serves only a part: at the end of a closed interval, reading goes on where
the next interval begins, at another broker (``kera.broker.log.intervals``).
"""

from __future__ import annotations

from typing import NamedTuple

from kera.broker.log.entry import Entry, length_of
from kera.broker.log.intervals import Interval, interval_of
from kera.broker.log.segment import Segment
from kera.broker.log.streamlet import Streamlet
from kera.broker.records import Gap, Hole, Key, SegmentRecord
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import DataLost, InvalidCursor, NotOwner, UnknownGroup


class Range(NamedTuple):
    """Whole chunks of one segment, all before its durable head."""

    segment: Segment
    start: int
    end: int


class ReadPlan(NamedTuple):
    """The ranges that a read returns, and the position of the next read."""

    ranges: list[Range]
    next: Position
    missing: Key | None = None
    """The segment of `next`, if it has to be loaded from disk before the read can continue."""
    moved: bool = False
    """Whether `next` is the start of the following interval, because the interval before it gets no more data."""


def entry_of(streamlet: Streamlet, index: int) -> Entry:
    """Return an entry of a streamlet. Raises `InvalidCursor` if there is none with this index."""
    if not 0 <= index < len(streamlet.entries):
        raise InvalidCursor(
            f"streamlet {streamlet.streamlet_id} has {len(streamlet.entries)} entries, not an entry {index}",
            entry=index,
        )
    return streamlet.entries[index]


def plan_read(
    streamlet: Streamlet, index: int, start: Position, end: Position | None, bytes_max: int, *, strict: bool = False
) -> ReadPlan:
    """Plan a read of whole chunks from `start` up to `end`, the durable head or the end of the interval.

    The chunks have at most `bytes_max` bytes. A single chunk that is larger is returned alone, or no reader could get
    past it; but not if `strict`, for a reader that gets other data in the same answer. Raises `NotOwner`,
    `InvalidCursor`, or `DataLost` with the exact gap.
    """
    entry = entry_of(streamlet, index)
    if entry.unsure is not None:  # readers stop before the unsure tail, without having reached an end
        end = entry.end if end is None else min(end, entry.end)
    at_head = _plan_at_head(streamlet, entry, start, bytes_max) if end is None else None
    return at_head or _plan(streamlet, entry, start, end, bytes_max, strict=strict)


def begins_at(plan: ReadPlan, start: Position) -> int:
    """Return the offset in its segment at which a plan's data begins; 0 if the data begins at `start`."""
    if not plan.ranges:
        return 0
    segment, begin, _ = plan.ranges[0]
    return 0 if start == (*segment.key, begin) else begin


def _plan(
    streamlet: Streamlet, entry: Entry, start: Position, end: Position | None, bytes_max: int, *, strict: bool
) -> ReadPlan:
    interval = interval_at(streamlet, start.group_id)
    if start.group_id == 0:
        gap = entry.loss_before_start()
        if gap is not None:
            raise _lost_in(gap, streamlet, entry, interval, EARLIEST)
        start = entry.start
        if interval.closed and (start == EARLIEST or start.group_id >= interval.end_group_id):
            return ReadPlan([], interval.following, moved=True)
        if start == EARLIEST:
            return ReadPlan([], *_behind_all(streamlet, entry, interval, EARLIEST, end))
    key, offset = _resolve(streamlet, entry, interval, start)
    ranges: list[Range] = []
    budget = bytes_max
    while (found := entry.find(key)) is not None:
        if not isinstance(found, Segment) or found.loading:
            if offset < length_of(found) and (end is None or (*key, offset) < end):
                return ReadPlan(ranges, Position(*key, offset), missing=key)
            closed = True
        else:
            stop = _readable(streamlet, found, offset, budget, end, alone=not ranges, strict=strict)
            if stop > offset:
                ranges.append(Range(found, offset, stop))
                budget -= stop - offset
                offset = stop
            closed = found.closed
        if not closed or offset < length_of(found) or entry.gap_at(Position(*key, offset)) is not None:
            # No more data yet, the budget is used up, `end` is reached, or the next read has to report the gap.
            return ReadPlan(ranges, Position(*key, offset))
        following = following_in(entry, key, interval)
        if following is None or is_to_come(following[1]) or (end is not None and (*key, offset) >= end):
            break
        key, offset = following[0], 0
    here = Position(*key, offset)
    if (end is None or here < end) and following_in(entry, key, interval) is None:
        return ReadPlan(ranges, *_behind_all(streamlet, entry, interval, here, end))
    return ReadPlan(ranges, here)


def _behind_all(
    streamlet: Streamlet, entry: Entry, interval: Interval, here: Position, end: Position | None
) -> tuple[Position, Key | None, bool]:
    """Return the last fields of a `ReadPlan` that has read all of an interval: where reading goes on."""
    if interval.closed:
        return interval.following, None, True
    return end if end is not None and _nothing_comes_before(streamlet, entry, end) else here, None, False


def _nothing_comes_before(streamlet: Streamlet, entry: Entry, end: Position) -> bool:
    """Whether an entry that was read completely gets no more data before `end`.

    That holds if `end` was the start of an interval when a client asked for the latest position: the interval was
    empty, and has been joined with the one before it.
    """
    return end[1:] == (1, 0) and end.group_id <= streamlet.next_group_id and entry.head is None


def _plan_at_head(streamlet: Streamlet, entry: Entry, start: Position, bytes_max: int) -> ReadPlan | None:
    """Plan a read of a reader that keeps up: all readable data of the open segment, if it fits into `bytes_max`.

    Returns None in all other cases. An open segment belongs to the last interval, which is here, and nothing is behind
    it.
    """
    segment = entry.head
    if (
        segment is None
        or start[:2] != segment.key
        or segment.holes
        or any(gap.end > start for gap in entry.gaps)
        or start < entry.start
    ):
        return None
    offset, durable_head = start.offset, segment.durable_head
    if not (offset < durable_head <= offset + bytes_max and segment.is_boundary(offset)):
        return None
    if interval_of(streamlet.intervals, start.group_id) is None:
        return None
    return ReadPlan([Range(segment, offset, durable_head)], Position(*segment.key, durable_head))


def interval_at(streamlet: Streamlet, group_id: int) -> Interval:
    """Return this broker's interval of a group. Raises `NotOwner` if another broker has it."""
    interval = interval_of(streamlet.intervals, group_id)
    if interval is None:
        what = f"group {group_id}" if group_id else "the oldest group"
        raise NotOwner(
            f"{what} of streamlet {streamlet.streamlet_id} is at another broker",
            streamlet_id=streamlet.streamlet_id,
            group_id=group_id,
        )
    return interval


def following_in(entry: Entry, key: Key, interval: Interval) -> tuple[Key, Segment | SegmentRecord] | None:
    """Return the segment behind `key`, if it is in the same interval."""
    following = entry.following(key)
    return following if following is not None and following[0][0] < interval.end_group_id else None


def _readable(
    streamlet: Streamlet, segment: Segment, offset: int, budget: int, end: Position | None, *, alone: bool, strict: bool
) -> int:
    """Return the offset up to which to read in a segment. Raises `DataLost` if a read begins with damage."""
    limit = _limit(streamlet, segment, end)
    hole = segment.hole_at(offset)
    if hole is not None:
        if hole.start <= offset < limit and alone:
            raise _damaged(streamlet, segment, hole)
        limit = min(limit, max(hole.start, offset))
    if offset >= limit:
        return offset
    stop = segment.boundary_within(offset, budget, limit)
    return segment.chunk_end_after(offset) if stop == offset and alone and not strict else stop


def resolve(streamlet: Streamlet, entry: Entry, position: Position) -> tuple[Key, int]:
    """Return the segment and offset of `position`. Raises `NotOwner`, `InvalidCursor` or `DataLost`."""
    return _resolve(streamlet, entry, interval_at(streamlet, position.group_id), position)


def _resolve(streamlet: Streamlet, entry: Entry, interval: Interval, position: Position) -> tuple[Key, int]:
    check_possible(position)
    begins = interval.inherits and position == interval.start
    # An empty interval may have been joined with the one before it after readers were sent to its start.
    sent = begins or (position[1:] == (1, 0) and entry.gap_at(position) is None)
    if sent and entry.start > position and not interval.lost_before(entry.index, entry.start, entry.start_record):
        if entry.start.group_id >= interval.end_group_id:
            return position[:2], 0  # the entry has no data in it
        position = entry.start  # the entry's first group in it is a later one
    gap = entry.gap_at(position)
    if gap is not None and gap.end >= entry.start:
        raise _lost_in(gap, streamlet, entry, interval, position)
    if position < entry.start:
        available = min(entry.start, interval.following) if interval.closed else entry.start
        raise _lost(streamlet, entry, position, available, "it was removed by retention or truncation")
    key, offset = (position.group_id, position.segment_id), position.offset
    found = entry.find(key)
    if found is not None:
        if isinstance(found, Segment) and not found.loading:
            if offset <= found.durable_head and found.is_boundary(offset):
                return key, offset
            hole = found.hole_at(offset)
            if hole is not None and hole.start < offset:
                raise _lost(streamlet, entry, position, Position(*key, hole.end), f"it is damaged ({hole.reason})")
        elif offset <= length_of(found):
            return key, offset
        raise no_boundary(streamlet, position)
    # An interval may begin with a group of another entry, or have no group yet. It may also have been joined with the
    # one before it after a reader was sent to its start.
    begins = begins or (position[1:] == (1, 0) and position.group_id <= streamlet.next_group_id)
    if begins or position == entry.start or any(position == gap.end for gap in entry.gaps):
        following = following_in(entry, (key[0], key[1] - 1), interval)
        return (key, offset) if following is None or is_to_come(following[1]) else (following[0], 0)
    raise InvalidCursor(
        f"entry {entry.index} of streamlet {streamlet.streamlet_id} has no segment {key[1]} of group {key[0]}",
        streamlet_id=streamlet.streamlet_id,
        entry=entry.index,
        position=list(position),
    )


def check_possible(position: Position) -> None:
    """Raise `InvalidCursor` for a position that no entry can have: it must not pass for one that was removed."""
    if position.group_id and not position.segment_id:
        raise InvalidCursor(
            f"{tuple(position)} is not a position: segments are counted from 1, and a group starts at"
            f" {(position.group_id, 1, 0)}",
            position=list(position),
        )


def is_to_come(found: Segment | SegmentRecord) -> bool:
    """Whether a segment has no durable data: it may still be lost with the host, so no reader is sent there."""
    return isinstance(found, Segment) and not found.durable_head


def first_record(entry: Entry) -> int:
    """Return the ordinal of the oldest record that is left."""
    return ordinal_of(entry, entry.start)


def ordinal_of(entry: Entry, position: Position) -> int:
    """Return the ordinal of the first record at or after `position`.

    Inside a segment that is only on disk, it is estimated from the offset.
    """
    if position == entry.start:
        return entry.start_record
    if entry.unsure is not None and position == entry.unsure.position:
        return entry.unsure.record
    if position == entry.stored_end and not entry.tail:
        return entry.next_record
    key, offset = (position.group_id, position.segment_id), position.offset
    found = entry.find(key)
    if found is not None and offset < length_of(found):
        if isinstance(found, Segment) and not found.loading:
            hole = found.hole_at(offset)
            return (
                found.first_record
                if hole is not None and hole.start <= offset
                else found.header_at(offset).first_record
            )
        return found.first_record + found.record_count * offset // max(1, length_of(found))
    following = entry.following(key)
    return following[1].first_record if following is not None else entry.next_record


def group_entry(streamlet: Streamlet, group_id: int) -> Entry:
    """Return the entry of a group. Raises `NotOwner`, `DataLost` or `UnknownGroup`."""
    if group_id:
        interval_at(streamlet, group_id)
    entry = streamlet.entry_of(group_id)
    if entry is not None:
        return entry
    if 0 < group_id < streamlet.next_group_id:
        following = min((found for entry in streamlet.entries if (found := entry.next_group(group_id))), default=0)
        raise DataLost(
            f"group {group_id} of streamlet {streamlet.streamlet_id} is gone",
            streamlet_id=streamlet.streamlet_id,
            lost_from=[group_id, 1, 0],
            available_from=[following or streamlet.next_group_id, 1, 0],
        )
    raise UnknownGroup(
        f"streamlet {streamlet.streamlet_id} has no group {group_id}",
        streamlet_id=streamlet.streamlet_id,
        group_id=group_id,
    )


def _limit(streamlet: Streamlet, segment: Segment, end: Position | None) -> int:
    """Return the offset up to which a reader that stops at `end` may read `segment`. Raises `InvalidCursor`."""
    here = segment.key
    if end is None or here < end[:2] or (here == end[:2] and end.offset >= segment.durable_head):
        return segment.durable_head
    if here > end[:2]:
        return 0
    if not segment.is_boundary(end.offset):
        raise no_boundary(streamlet, end)
    return end.offset


def no_boundary(streamlet: Streamlet, position: Position) -> InvalidCursor:
    """Return the error for a position that is not a chunk boundary."""
    return InvalidCursor(
        f"{tuple(position)} is not a chunk boundary before the durable head of streamlet {streamlet.streamlet_id}",
        streamlet_id=streamlet.streamlet_id,
        position=list(position),
    )


def _lost(streamlet: Streamlet, entry: Entry, position: Position, available: Position, why: str) -> DataLost:
    return DataLost(
        f"streamlet {streamlet.streamlet_id}, entry {entry.index}: what was from {tuple(position)} up to"
        f" {tuple(available)} is gone: {why}; read on from there",
        streamlet_id=streamlet.streamlet_id,
        entry=entry.index,
        lost_from=list(position),
        available_from=list(available),
        reason=why,
        available_record=_record_from(streamlet, entry, position, available),
    )


def _lost_in(gap: Gap, streamlet: Streamlet, entry: Entry, interval: Interval, position: Position) -> DataLost:
    """Return the error for a reader at `position`, in a gap or before the start; it may read on behind the gap."""
    following = entry.following((gap.end.group_id, gap.end.segment_id - 1)) if position >= entry.start else None
    after = Position(*following[0], 0) if following is not None else gap.end
    after = min(after, interval.following) if interval.closed else after
    return _lost(streamlet, entry, position, after, "it was lost with the memory of the broker's host")


def _record_from(streamlet: Streamlet, entry: Entry, position: Position, available: Position) -> int:
    """Return the ordinal of the record at `available`, for a reader that comes from `position`."""
    interval = interval_of(streamlet.intervals, position.group_id)
    if interval is not None and interval.closed and available >= interval.following:
        return interval.end_record(entry.index)  # the rest is at another broker
    return ordinal_of(entry, available)


def _damaged(streamlet: Streamlet, segment: Segment, hole: Hole) -> DataLost:
    start, end = Position(*segment.key, hole.start), Position(*segment.key, hole.end)
    return _lost(streamlet, segment.entry, start, end, f"it is damaged ({hole.reason})")
