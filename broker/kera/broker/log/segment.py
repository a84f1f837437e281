"""A segment in memory: a slot of the arena that fills from its start.

    0              durable_head       head                  capacity
    ├── readable ──┼── being made ────┼── free ─────────────┤
                       durable

Invariants: durable_head ≤ head ≤ capacity; neither head moves back; both are ends of chunks (or 0). The bytes before
the head never change. A closed segment takes no more appends.

A segment on disk has a record in the index, and a `Segment` object only while it is also in memory. Its states, with
the thesis's names (7.2.1):

    HEAD ──closed──► GROUP ──read by all readers──► PROCESSED
                       └──────────┬────────────────────┘
                       on disk, slot given to another segment
                                  ▼
                               CLOSED ──a reader wants it──► LOADING ──► GROUP
"""

from __future__ import annotations

import enum
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kera.broker.log.arena import Slot, SlotContent
from kera.broker.log.progress import SegmentProgress
from kera.broker.log.scan import SegmentScan
from kera.broker.records import Hole, ProducerRecord, SegmentAddress, SegmentRecord
from kera.core.errors import invariant
from kera.core.format.chunk import ChunkHeader, place_chunk, read_header
from kera.core.format.punctuation import FLAG as PUNCTUATION

if TYPE_CHECKING:
    from kera.broker.log.entry import Entry

_as_record = tuple.__new__
"""Makes a `NamedTuple` in a third of the time that its constructor takes, because each chunk needs one."""
_NO_MIN = (1 << 63) - 1
_NO_MAX = -(1 << 63)


class SegmentState(enum.Enum):
    """The state of a segment."""

    HEAD = "head"
    """Open, in memory."""
    GROUP = "group"
    """Closed, in memory; a reader still has to read it, or there are no readers."""
    PROCESSED = "processed"
    """Closed, in memory, and read by all readers."""
    CLOSED = "closed"
    """On disk only."""
    LOADING = "loading"
    """On its way back into memory."""


class Segment(SegmentProgress):
    """One logical segment of a group, in a slot of the arena."""

    __slots__ = (
        "abandoned",
        "address",
        "busy",
        "crc32c",
        "entry",
        "first_record",
        "holes",
        "in_index",
        "loading",
        "opened_ms",
        "physical_id",
        "slot",
        "stored",
    )

    def __init__(self, entry: Entry, address: SegmentAddress, slot: Slot, first_record: int) -> None:
        self.entry = entry
        self.address = address
        self.slot = slot
        self.first_record = first_record
        """Ordinal of its first record within the entry."""
        self.head = self.durable_head = 0
        self.closed = False
        self.record_count = 0
        self.min_timestamp_us = _NO_MIN
        self.max_timestamp_us = _NO_MAX
        self.newest_us = 0
        self.chunk_ends = array("I")
        self.holes: list[Hole] = []
        """Damage found when the segment was loaded, or taken over from the last launch."""
        self.producers = {}
        self.physical_id = 0
        """Physical id of its file; 0: none yet."""
        self.stored = 0
        """Offset up to which its file is durable."""
        self.crc32c = 0
        """Checksum of the stored bytes."""
        self.abandoned: list[int] = []
        """Physical ids of files with failed writes, which are removed when another file has their data."""
        self.in_index = False
        """Whether it is closed, on disk and in the index, so its slot can be given away."""
        self.busy = False
        """Whether it is being written to disk."""
        self.loading = False
        self.dropped = False
        self.opened_ms = 0
        """When it was opened, on the monotonic clock."""
        self.touched_ms = 0

    @classmethod
    def open(cls, entry: Entry, address: SegmentAddress, slot: Slot, first_record: int) -> Segment:
        """Create a new segment in `slot`."""
        slot.assign(SlotContent(*address, first_record, 0, 0, closed=False))
        return cls(entry, address, slot, first_record)

    @classmethod
    def found(cls, entry: Entry, slot: Slot, content: SlotContent, scan: SegmentScan) -> Segment:
        """Create the segment that the last launch left in `slot`."""
        segment = cls(entry, SegmentAddress(*content[:5]), slot, content.first_record)
        for header in scan.headers:
            segment._count(header)
        if scan.headers:  # the count includes the records of damaged chunks
            last = scan.headers[-1]
            segment.record_count = last.first_record + last.record_count - segment.first_record
        segment.chunk_ends, segment.holes = scan.chunk_ends, scan.holes
        segment.head = scan.end
        segment.durable_head = min(content.durable_head, scan.end)
        segment.closed = content.closed
        slot.assign(SlotContent(*segment.address, segment.first_record, scan.end, segment.durable_head, content.closed))
        return segment

    @classmethod
    def stub(cls, entry: Entry, address: SegmentAddress, slot: Slot, record: SegmentRecord) -> Segment:
        """Create a segment that is about to be loaded into `slot`."""
        segment = cls(entry, address, slot, record.first_record)
        segment.head = segment.durable_head = segment.stored = record.length
        segment.closed = segment.in_index = segment.loading = True
        segment.record_count = record.record_count
        segment.min_timestamp_us, segment.max_timestamp_us = record.min_timestamp_us, record.max_timestamp_us
        segment.newest_us, segment.physical_id, segment.crc32c = record.newest_us, record.physical_id, record.crc32c
        return segment

    def loaded(self, chunk_ends: array[int], holes: list[Hole]) -> None:
        """Finish loading: the bytes are in the slot now."""
        self.loading = False
        self.chunk_ends, self.holes = chunk_ends, holes
        self.slot.assign(SlotContent(*self.address, self.first_record, self.head, self.head, closed=True))

    @property
    def key(self) -> tuple[int, int]:
        """The group and segment id: the place in the entry."""
        return self.address.group_id, self.address.segment_id

    def takes(self, chunk_bytes: int) -> bool:
        """Whether a chunk of this size can be appended."""
        return not self.closed and self.head + chunk_bytes <= len(self.slot.view)

    def append(self, chunk: memoryview, header: ChunkHeader, broker_epoch: int, first_record: int) -> int:
        """Copy `chunk` to the head and place it; return its position. The caller has made sure that it fits."""
        position = self.head
        end = position + len(chunk)
        slot = self.slot
        view = slot.view
        invariant(not self.closed and end <= len(view), "append to a closed or full segment")
        view[position:end] = chunk
        _, _, entry, group_id, segment_id = self.address
        place_chunk(view, position, (group_id, segment_id, entry, first_record, broker_epoch, self.durable_head))
        self.chunk_ends.append(end)
        self.head = end
        self._count(header)
        slot.write_head(end)  # last: a reader that sees the new head also sees the chunk
        return position

    def _count(self, header: ChunkHeader) -> None:
        self.record_count += header.record_count
        # This runs for each chunk; calls of `min` and `max` would take most of its time.
        if header.min_timestamp_us < self.min_timestamp_us:  # noqa: PLR1730
            self.min_timestamp_us = header.min_timestamp_us
        if header.max_timestamp_us > self.max_timestamp_us:  # noqa: PLR1730
            self.max_timestamp_us = header.max_timestamp_us
        if not header.flags & PUNCTUATION:
            self.producers[header.producer_id] = _as_record(
                ProducerRecord, (header.producer_epoch, header.sequence + 1)
            )

    def close(self) -> None:
        """Take no more appends."""
        self.closed = True
        self.slot.write_closed()

    def advance_durable_head(self, to: int) -> None:
        """Let readers read up to `to`."""
        invariant(self.durable_head <= to <= self.head, "the durable head stays behind the head and never goes back")
        self.durable_head = to
        self.slot.write_durable_head(to)

    def replicated(self, to: int) -> None:
        """Note that all backups have the chunks up to `to`; readers may read them if the entry goes by replicas."""
        for hole in self.holes:
            if hole.start == to:
                to = hole.end  # damage is never replicated
        if self.entry.by_replicas and to > self.durable_head and not self.dropped:
            self.advance_durable_head(to)
            self.entry.wake()

    def stored_up_to(self, end: int, crc32c: int) -> list[int]:
        """Note that the file is durable up to `end`; return the files that are no longer needed."""
        self.stored, self.crc32c = end, crc32c
        abandoned, self.abandoned = self.abandoned, []
        return abandoned

    def abandon_file(self) -> None:
        """Begin anew in another file after a failed write, because the content of the present file is unknown.

        The old file, with the data that was durable in it, stays until the new one is durable.
        """
        self.abandoned.append(self.physical_id)
        self.physical_id = self.stored = self.crc32c = 0

    @property
    def files(self) -> list[int]:
        """The physical ids of all its files, including files with failed writes."""
        return [physical_id for physical_id in (self.physical_id, *self.abandoned) if physical_id]

    @property
    def waits_for_replicas(self) -> bool:
        """Whether it must not go to disk yet: data on disk counts as durable, and readers see it."""
        return self.entry.by_replicas and self.durable_head < self.head

    def intact(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the undamaged parts of `start`..`end`."""
        for hole in self.holes:
            if start <= hole.start < end:
                if start < hole.start:
                    yield start, hole.start
                start = hole.end
        if start < end:
            yield start, end

    def is_boundary(self, offset: int) -> bool:
        """Whether `offset` is the start of a chunk, or the end of the last one."""
        if offset == 0:
            return True
        at = bisect_left(self.chunk_ends, offset)
        return at < len(self.chunk_ends) and self.chunk_ends[at] == offset

    def boundary_within(self, start: int, bytes_max: int, end: int) -> int:
        """Return the end of the last whole chunk of `start`..`end` within `bytes_max`; `start` if none fits."""
        limit = min(end, start + bytes_max)
        at = bisect_right(self.chunk_ends, limit)
        return max(start, self.chunk_ends[at - 1]) if at else start

    def pieces(self, start: int, end: int, bytes_max: int) -> Iterator[tuple[int, int]]:
        """Split `start`..`end` into parts of whole chunks with at most `bytes_max` bytes, or of one larger chunk."""
        while start < end:
            stop = self.boundary_within(start, bytes_max, end)
            if stop == start:
                stop = self.chunk_end_after(start)
            yield start, stop
            start = stop

    def chunk_end_after(self, start: int) -> int:
        """Return the end of the chunk that starts at `start`."""
        return self.chunk_ends[bisect_right(self.chunk_ends, start)]

    def hole_at(self, offset: int) -> Hole | None:
        """Return the hole that contains `offset`, or the next one behind it; None if there is none."""
        return next((hole for hole in self.holes if hole.end > offset), None)

    def chunk_of(self, producer_id: int, wanted: tuple[int, int]) -> int | None:
        """Return the index of the chunk with this epoch and sequence of a producer; None if it is not here.

        A producer's chunks are in order, with chunks of other producers in between.
        """
        low, high = 0, len(self.chunk_ends)
        while low < high:
            middle = at = (low + high) // 2
            found = None
            while at < high and found is None:
                header = self.header_at(self.chunk_ends[at - 1] if at else 0)
                if header.producer_id == producer_id and not header.flags & PUNCTUATION:
                    found = (header.producer_epoch, header.sequence)
                else:
                    at += 1
            if found == wanted:
                return at
            if found is None or found > wanted:
                high = middle
            else:
                low = at + 1
        return None

    def header_at(self, offset: int) -> ChunkHeader:
        """Return the header of the chunk that starts at `offset`."""
        return read_header(self.slot.view, offset)

    def record(self) -> SegmentRecord:
        """Return the segment's record for the index."""
        return SegmentRecord(
            physical_id=self.physical_id,
            length=self.head if self.closed else 0,
            open=not self.closed,
            chunk_count=len(self.chunk_ends),
            crc32c=self.crc32c,
            first_record=self.first_record,
            record_count=self.record_count,
            min_timestamp_us=self.min_timestamp_us,
            max_timestamp_us=self.max_timestamp_us,
            newest_us=self.newest_us,
        )
