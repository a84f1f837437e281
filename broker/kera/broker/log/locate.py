"""Finds the place after a number of records or bytes, or at a time, in an entry, and lists the segments of a range.

Pure, and reads nothing of chunks but their headers. The index knows the bytes, records and times of each segment, so a
search skips most segments; it looks at chunks only to find a boundary inside a segment. If such a segment is only on
disk, the answer names it, and the caller has to load it first.

A reader can read on from an answer, so the rules of reading apply (``kera.broker.log.read_plan``): only data before the
durable head counts, and behind the end of a closed interval the search continues at another broker. Two rules differ,
because nothing is read here. The search passes over lost positions (`Gap`), and a damaged chunk (`Hole`) counts as one
chunk with the records that are missing there, and without a time. Only a lost start is an error. An answer right behind
a loss or damage says so (`FoundPlace.lost_from`): the record in question may have been there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kera.broker.log.bounds import ordinal_at
from kera.broker.log.entry import Entry, length_of
from kera.broker.log.intervals import Interval
from kera.broker.log.read_plan import entry_of, following_in, interval_at, is_to_come, no_boundary, resolve
from kera.broker.log.segment import Segment
from kera.broker.log.streamlet import Streamlet
from kera.broker.records import Key, SegmentRecord
from kera.core.base.ids import EARLIEST, Position
from kera.core.format.chunk import MAX_TIMESTAMP_AT


class Query(NamedTuple):
    """A query for a place, up to `end` or the durable head. Exactly one of the last three is set."""

    end: Position | None = None
    records_max: int | None = None
    """Find the furthest boundary with at most this many records before it, but at least one chunk if there is one."""
    bytes_max: int | None = None
    """Find the furthest boundary with at most this many bytes of chunks before it, likewise."""
    timestamp_us: int | None = None
    """Find the first chunk with a record at or after this time, or the end if there is none."""


class Progress(NamedTuple):
    """How far a search has got: it has passed over all chunks before `position`."""

    position: Position
    """At first the start of the search."""
    bytes: int = 0
    """Size of the chunks that the search has passed over."""
    start_record: int | None = None
    """Ordinal at the start of the search, once it is known."""
    lost_from: Position | None = None
    """The start of something lost or damaged that ends at `position`."""


class FoundPlace(NamedTuple):
    """The answer."""

    position: Position
    record: int
    """Ordinal of the record there."""
    bytes: int
    """Size of the chunks between the start and the place."""
    moved: bool = False
    """Whether the place is behind `position`: at another broker, or to be found with another request."""
    lost_from: Position | None = None
    """See `Progress.lost_from`. Not set for a chunk that also has records before the wanted time."""


class Step(NamedTuple):
    """The result of one step of a search."""

    place: FoundPlace | None
    """The place; None: `missing` has to be loaded before the search can continue from `progress`."""
    progress: Progress
    walked: int
    """Number of segments that the step has walked through."""
    missing: Key | None = None
    cut: bool = False
    """Whether the step has reached its limit of segments; `place` then says how far it got."""


class Bounds(NamedTuple):
    """The part of a range that lies in one segment; not empty."""

    start: Position
    end: Position
    first_record: int
    next_record: int
    resident: bool


class Listing(NamedTuple):
    """Parts of a range, in order."""

    segments: list[Bounds]
    next: Position
    """The position at which to continue."""
    complete: bool
    """Whether these are the last parts here: `next` is the range's end, the durable head, or at another broker."""
    missing: Key | None = None
    """The segment that has to be loaded before the listing can continue."""


class _Piece(NamedTuple):
    """A segment, and the part of it that a reader could read: from `offset` up to `limit`."""

    key: Key
    found: Segment | SegmentRecord
    offset: int
    limit: int

    @property
    def segment(self) -> Segment | None:
        """The segment, if it is in memory, so its chunks can be looked at."""
        return self.found if isinstance(self.found, Segment) and not self.found.loading else None


def locate(streamlet: Streamlet, index: int, query: Query, begun: Progress, segments_max: int) -> Step:
    """Continue a search through at most `segments_max` segments. Raises the errors of `plan_read` for its start."""
    entry = entry_of(streamlet, index)
    interval = interval_at(streamlet, begun.position.group_id)
    start = _first(entry, interval, begun.position)
    gap = entry.loss_before_start()
    if gap is not None and begun.position in {EARLIEST, entry.start}:
        begun = begun._replace(lost_from=min(begun.position, gap.start))
    if start is None:
        return Step(_moved(interval, index, begun), begun, 0)
    if start == EARLIEST:
        return Step(FoundPlace(EARLIEST, entry.start_record, 0), begun, 0)
    key, offset = resolve(streamlet, entry, start)
    if query.records_max is not None and begun.start_record is None:
        record = _record_at(streamlet, entry, key, offset)
        if record is None:
            return Step(None, begun, 0, missing=key)
        begun = begun._replace(start_record=record)
    return _walk(streamlet, entry, interval, query, begun._replace(position=Position(*key, offset)), segments_max)


def _walk(
    streamlet: Streamlet, entry: Entry, interval: Interval, query: Query, begun: Progress, segments_max: int
) -> Step:
    """Continue a search from a place that is in the interval."""
    key, offset, passed = begun.position[:2], begun.position.offset, begun.bytes
    lost_from = begun.lost_from
    walked = 0
    for piece in _pieces(entry, interval, key, offset, query.end):
        key, offset = piece.key, piece.offset
        here = Progress(Position(*key, offset), passed, begun.start_record, lost_from)
        if walked == segments_max:
            place = FoundPlace(here.position, piece.found.first_record, passed, moved=True, lost_from=lost_from)
            return Step(place, here, walked, cut=True)
        walked += 1
        _check_end(streamlet, piece, query.end)
        stop = _stop(piece, query, passed, begun.start_record or 0) if piece.limit > offset else offset
        if stop is None:
            return Step(None, here, walked, missing=key)
        lost_from = _lost_before(piece, stop, lost_from)
        passed, offset = passed + stop - offset, stop
        if stop < piece.limit:
            if piece.segment is not None and _begins_before(piece.segment, stop, query.timestamp_us):
                lost_from = None
            break
        if entry.gap_at(Position(*key, stop)) is not None:
            lost_from = lost_from or Position(*key, stop)
    else:
        here = Progress(Position(*key, offset), passed, begun.start_record, lost_from)
        if _goes_on_elsewhere(entry, interval, key, here.position, query.end):
            return Step(_moved(interval, entry.index, here), begun, walked)
    here = Progress(Position(*key, offset), passed, begun.start_record, lost_from)
    if lost_from == here.position:
        lost_from = None  # a reader from there gets the error itself
    record = _record_at(streamlet, entry, key, offset)
    if record is None:
        return Step(None, here, walked, missing=key)
    return Step(FoundPlace(here.position, record, passed, lost_from=lost_from), here, walked)


def list_segments(
    streamlet: Streamlet, index: int, start: Position, end: Position | None, segments_max: int
) -> Listing:
    """Return the first parts of a range, at most `segments_max`. Raises the errors of `plan_read` for its start."""
    entry = entry_of(streamlet, index)
    interval = interval_at(streamlet, start.group_id)
    first = _first(entry, interval, start)
    if first is None:
        return Listing([], interval.following, complete=True)
    if first == EARLIEST:
        return Listing([], EARLIEST, complete=True)
    key, offset = resolve(streamlet, entry, first)
    found: list[Bounds] = []
    for piece in _pieces(entry, interval, key, offset, end):
        key, offset = piece.key, piece.offset
        here = Position(*key, offset)
        if len(found) == segments_max:
            return Listing(found, here, complete=False)
        _check_end(streamlet, piece, end)
        if piece.limit > offset:
            first_record = _record_at(streamlet, entry, key, offset)
            next_record = _record_at(streamlet, entry, key, piece.limit)
            if first_record is None or next_record is None:
                return Listing(found, here, complete=False, missing=key)
            stop = Position(*key, piece.limit)
            found.append(Bounds(here, stop, first_record, next_record, piece.segment is not None))
        offset = piece.limit
    here = Position(*key, offset)
    moved = _goes_on_elsewhere(entry, interval, key, here, end)
    return Listing(found, interval.following if moved else here, complete=True)


# -- the walk --------------------------------------------------------------------------------------------------


def _first(entry: Entry, interval: Interval, start: Position) -> Position | None:
    """Return the position that a start stands for, which may be `EARLIEST`.

    Returns `EARLIEST` itself if the entry never had data, and None if the position is at another broker.
    """
    if start.group_id:
        return start
    if interval.closed and (entry.start == EARLIEST or entry.start.group_id >= interval.end_group_id):
        return None
    return entry.start


def _pieces(entry: Entry, interval: Interval, key: Key, offset: int, end: Position | None) -> Iterator[_Piece]:
    """Iterate over an interval's segments from a place up to `end` or the durable head; some pieces may be empty."""
    if entry.unsure is not None:
        end = entry.end if end is None else min(end, entry.end)
    found = entry.find(key)
    while found is not None:
        limit = max(offset, _readable(found, key, end))
        yield _Piece(key, found, offset, limit)
        closed = not isinstance(found, Segment) or found.closed
        if not closed or limit < length_of(found):
            return
        following = following_in(entry, key, interval)
        if following is None or is_to_come(following[1]):
            return
        (key, found), offset = following, 0
        if end is not None and (*key, offset) > end:
            return


def _readable(found: Segment | SegmentRecord, key: Key, end: Position | None) -> int:
    durable = found.durable_head if isinstance(found, Segment) else found.length
    if end is None or key < end[:2]:
        return durable
    return min(durable, end.offset) if key == end[:2] else 0


def _check_end(streamlet: Streamlet, piece: _Piece, end: Position | None) -> None:
    """Raise `InvalidCursor` for an end that is not a chunk boundary, if its segment is in memory."""
    if end is None or piece.segment is None or piece.key != end[:2] or piece.limit != end.offset:
        return
    if not piece.segment.is_boundary(end.offset):
        raise no_boundary(streamlet, end)


def _goes_on_elsewhere(entry: Entry, interval: Interval, key: Key, here: Position, end: Position | None) -> bool:
    """Whether a walk that has ended `here` has reached the end of a closed interval."""
    return interval.closed and (end is None or here < end) and following_in(entry, key, interval) is None


def _moved(interval: Interval, index: int, here: Progress) -> FoundPlace:
    return FoundPlace(interval.following, interval.end_record(index), here.bytes, moved=True, lost_from=here.lost_from)


# -- within a segment ------------------------------------------------------------------------------------------


def _stop(piece: _Piece, query: Query, passed: int, start_record: int) -> int | None:
    """Return how far a search gets in a segment; None: that depends on its chunks, which are only on disk.

    A search skips the rest of a segment without looking at chunks only if it cannot end there.
    """
    if query.records_max is not None:
        return _stop_by_records(piece, start_record + query.records_max, passed)
    if query.bytes_max is not None:
        return _stop_by_bytes(piece, query.bytes_max - passed, passed)
    return _stop_by_time(piece, query.timestamp_us or 0)


def _stop_by_records(piece: _Piece, until_record: int, passed: int) -> int | None:
    found, offset, limit = piece.found, piece.offset, piece.limit
    if limit == length_of(found) and found.first_record + found.record_count <= until_record:
        return limit
    if passed and not offset and found.first_record >= until_record:
        return offset
    segment = piece.segment
    if segment is None:
        return None
    ends = segment.chunk_ends
    first = bisect_right(ends, offset)
    behind = range(first, bisect_right(ends, limit))
    fitting = bisect_right(behind, until_record, key=lambda at: _record_in(segment, ends[at]))
    if not fitting and not passed:
        fitting = 1
    return ends[first + fitting - 1] if fitting else offset


def _stop_by_bytes(piece: _Piece, bytes_left: int, passed: int) -> int | None:
    if piece.limit - piece.offset <= bytes_left:
        return piece.limit
    if passed and bytes_left <= 0:
        return piece.offset
    segment = piece.segment
    if segment is None:
        return None
    stop = segment.boundary_within(piece.offset, max(0, bytes_left), piece.limit)
    return segment.chunk_end_after(piece.offset) if stop == piece.offset and not passed else stop


def _stop_by_time(piece: _Piece, timestamp_us: int) -> int | None:
    if piece.found.max_timestamp_us < timestamp_us:
        return piece.limit
    segment = piece.segment
    if segment is None:
        return None
    ends = np.frombuffer(segment.chunk_ends, dtype=np.uint32)
    starts = np.concatenate((np.zeros(1, ends.dtype), ends[:-1]))
    starts = starts[np.searchsorted(starts, piece.offset) : np.searchsorted(starts, piece.limit)].astype(np.int64)
    words = np.frombuffer(segment.slot.view[: segment.head], dtype="<i8")
    late = starts[words[(starts + MAX_TIMESTAMP_AT) // words.itemsize] >= timestamp_us]
    damaged = {hole.start for hole in segment.holes}
    return next((start for start in map(int, late) if start not in damaged), piece.limit)


def _lost_before(piece: _Piece, stop: int, before: Position | None) -> Position | None:
    """Return the start of damage that ends at `stop`; `before`: the start of a loss that ends at the piece's start."""
    if stop == piece.offset:
        return before
    holes = piece.segment.holes if piece.segment is not None else ()
    start = next((max(hole.start, piece.offset) for hole in holes if hole.end == stop), None)
    if start is None:
        return None
    return before if start == piece.offset and before is not None else Position(*piece.key, start)


def _begins_before(segment: Segment, offset: int, timestamp_us: int | None) -> bool:
    """Whether a chunk has records before the wanted time: then earlier records were older, too."""
    return timestamp_us is not None and segment.header_at(offset).min_timestamp_us < timestamp_us


def _record_at(streamlet: Streamlet, entry: Entry, key: Key, offset: int) -> int | None:
    """Return the ordinal of the first record at or after a boundary; None if it is inside a segment on disk."""
    here = Position(*key, offset)
    if here == entry.start:
        return entry.start_record
    found = entry.find(key)
    if found is None:
        return ordinal_at(streamlet, entry, here)
    if offset >= length_of(found):
        return found.first_record + found.record_count
    if not offset:
        return found.first_record
    return _record_in(found, offset) if isinstance(found, Segment) and not found.loading else None


def _record_in(segment: Segment, offset: int) -> int:
    """Return the ordinal of the first record at or after a boundary; at damage, of its first lost record."""
    if offset >= segment.head:
        return segment.first_record + segment.record_count
    hole = segment.hole_at(offset)
    if hole is None or offset < hole.start:
        return segment.header_at(offset).first_record
    begins = {each.end: each.start for each in segment.holes}
    while offset in begins:  # back over damage, to the end of an intact chunk
        offset = begins[offset]
    if not offset:
        return segment.first_record
    before = bisect_left(segment.chunk_ends, offset)
    header = segment.header_at(segment.chunk_ends[before - 1] if before else 0)
    return header.first_record + header.record_count
