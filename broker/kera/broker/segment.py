"""Segments and groups: where a streamlet's chunks lie.

A segment is a slot of the arena that fills from its start:

    0              durable_head       head                  capacity
    ├── readable ──┼── being made ────┼── free ─────────────┤
                       durable

Invariants: durable_head ≤ head ≤ capacity, neither goes back, both are ends of chunks (or 0). Behind the head nothing
ever changes. A closed segment or group takes no more appends; segment ids grow by one within their group.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right

from kera.broker.arena import Slot
from kera.core.chunk import ChunkHeader, Placement, place_chunk, read_header
from kera.core.errors import invariant

_NO_MIN = (1 << 63) - 1
_NO_MAX = -(1 << 63)


class Segment:
    """One logical segment of a group, in a slot of the arena."""

    __slots__ = (
        "chunk_ends",
        "closed",
        "durable_head",
        "head",
        "max_timestamp_us",
        "min_timestamp_us",
        "record_count",
        "segment_id",
        "slot",
    )

    def __init__(self, segment_id: int, slot: Slot) -> None:
        self.segment_id = segment_id
        self.slot = slot
        self.head = 0
        """Where the next chunk goes: bytes from the start of the slot."""
        self.durable_head = 0
        """Up to where readers may read."""
        self.closed = False
        self.record_count = 0
        self.min_timestamp_us = _NO_MIN
        self.max_timestamp_us = _NO_MAX
        self.chunk_ends = array("I")
        """Where each chunk ends, ascending: 4 bytes per chunk, and a read need not walk headers."""

    @property
    def free_bytes(self) -> int:
        """Room that is left."""
        return len(self.slot.view) - self.head

    def append(self, chunk: memoryview, header: ChunkHeader, placement: Placement) -> int:
        """Copy `chunk` to the head and place it; returns its position. The caller has made sure that it fits."""
        position = self.head
        end = position + len(chunk)
        invariant(not self.closed and end <= len(self.slot.view), "append to a closed or full segment")
        view = self.slot.view
        view[position:end] = chunk
        place_chunk(view, position, placement)
        self.chunk_ends.append(end)
        self.head = end
        self.record_count += header.record_count
        self.min_timestamp_us = min(self.min_timestamp_us, header.min_timestamp_us)
        self.max_timestamp_us = max(self.max_timestamp_us, header.max_timestamp_us)
        return position

    def advance_durable_head(self, to: int) -> None:
        """Let readers read up to `to`."""
        invariant(self.durable_head <= to <= self.head, "the durable head stays behind the head and never goes back")
        self.durable_head = to

    def is_boundary(self, offset: int) -> bool:
        """Whether `offset` is the start of a chunk, or the end of the last one."""
        if offset == 0:
            return True
        at = bisect_left(self.chunk_ends, offset)
        return at < len(self.chunk_ends) and self.chunk_ends[at] == offset

    def boundary_within(self, start: int, bytes_max: int, end: int) -> int:
        """End of the last whole chunk of `start`..`end` that keeps within `bytes_max`; `start` when none does."""
        limit = min(end, start + bytes_max)
        at = bisect_right(self.chunk_ends, limit)
        return max(start, self.chunk_ends[at - 1]) if at else start

    def chunk_end_after(self, start: int) -> int:
        """End of the chunk that starts at `start`."""
        return self.chunk_ends[bisect_right(self.chunk_ends, start)]

    def header_at(self, offset: int) -> ChunkHeader:
        """Header of the chunk that starts at `offset`."""
        return read_header(self.slot.view, offset)


class Group:
    """A fixed number of segments of one entry; the unit that one consumer gets at a time."""

    __slots__ = ("closed", "entry", "group_id", "segments")

    def __init__(self, group_id: int, entry: int) -> None:
        self.group_id = group_id
        self.entry = entry
        self.segments: list[Segment] = []
        """Segment ids are their places in the list, from 1."""
        self.closed = False

    def add_segment(self, slot: Slot) -> Segment:
        """Close the last segment and open the next in `slot`."""
        invariant(not self.closed, "a closed group never changes", group_id=self.group_id)
        if self.segments:
            self.segments[-1].closed = True
        segment = Segment(len(self.segments) + 1, slot)
        self.segments.append(segment)
        return segment

    def close(self) -> None:
        """Take no more appends."""
        if self.segments:
            self.segments[-1].closed = True
        self.closed = True

    def retire(self) -> None:
        """Free the slots of all segments."""
        for segment in self.segments:
            segment.slot.retire()
