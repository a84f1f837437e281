"""The greatest times in an entry: of all written data, and of the data that is removed when its start moves. Pure.

The index has the times of stored segments; the chunks of a segment are looked at only if a part of it is removed.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np

from kera.broker.log.segment import Segment
from kera.core.base.ids import Position
from kera.core.format.chunk import MAX_TIMESTAMP_AT
from kera.core.format.punctuation import NO_TIME, is_punctuation_at

if TYPE_CHECKING:
    from kera.broker.log.entry import Entry

SEGMENTS_MAX = 1024
"""Segments that are looked at when they are removed at once; with more, the entry's watermark is used as a bound."""


def watermark_of(entry: Entry) -> int:
    """Return the greatest time of all written data, durable or not; `NO_TIME` if there is none."""
    return max(entry.stored_watermark_us, *(segment.max_timestamp_us for segment in entry.tail), NO_TIME)


def end_of_written(entry: Entry) -> Position:
    """Return the position behind all written data, durable or not."""
    if entry.tail and entry.tail[-1].head:
        return Position(*entry.tail[-1].key, entry.tail[-1].head)
    return max(entry.start, entry.stored_end)


def watermark_before(entry: Entry, position: Position) -> int:
    """Return the greatest time before a position, or a later one."""
    found = NO_TIME
    for number, (key, segment) in enumerate(entry.segments()):
        if Position(*key, 0) >= position:
            break
        if number == SEGMENTS_MAX:
            return max(found, watermark_of(entry))
        here = segment.max_timestamp_us
        if key == position[:2] and isinstance(segment, Segment) and not segment.loading:
            here = watermark_within(segment, position.offset)
        found = max(found, here)
    return found


def watermark_within(segment: Segment, offset: int) -> int:
    """Return the greatest time of a segment's undamaged chunks before a boundary."""
    ends = np.frombuffer(segment.chunk_ends, dtype=np.uint32)
    starts = np.concatenate((np.zeros(1, ends.dtype), ends[:-1]))
    starts = starts[: int(np.searchsorted(ends, offset, side="right"))].astype(np.int64)
    starts = starts[~np.isin(starts, [hole.start for hole in segment.holes])]
    words = np.frombuffer(segment.slot.view[: segment.head], dtype="<i8")
    return int(words[(starts + MAX_TIMESTAMP_AT) // words.itemsize].max(initial=NO_TIME))


def with_its_punctuation(entry: Entry, position: Position) -> Position:
    """Return the position of the punctuation right before a chunk in its segment, if it is in memory.

    Otherwise returns `position`, where the chunk begins. A punctuation marks the start of an epoch: no data of that
    epoch is before it. If it were removed with the data that it closes, readers could not find the start of the epoch
    among late data, and no reader would get any of the epoch.
    """
    segment = entry.resident.get(position[:2])
    if segment is None or segment.loading or not position.offset:
        return position
    number = bisect_left(segment.chunk_ends, position.offset)
    start = segment.chunk_ends[number - 1] if number else 0
    hole = any(each.start == start for each in segment.holes)
    return position if hole or not is_punctuation_at(segment.slot.view, start) else position._replace(offset=start)
