"""Chunks in the form that consumers deliver: their records as an Arrow batch, with their places."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

from kera.core.base.ids import EntryId, Position
from kera.core.format.chunk import HEADER_BYTES, ChunkHeader, padded, read_header


class PushedSlot:
    """The slot in a broker's memory where pushed chunks lie, with its generation when they came."""

    __slots__ = ("_generation", "_generations", "_slot")

    def __init__(self, generations: Sequence[int], slot: int, generation: int) -> None:
        """`generations`: a live view of the present generations of all slots."""
        self._generations = generations
        self._slot = slot
        self._generation = generation

    @property
    def intact(self) -> bool:
        """Whether the slot still holds the same segment."""
        return self._generations[self._slot] == self._generation


_SIZES = struct.Struct(f"<8xII{HEADER_BYTES - 16}x")
"""Fields of a chunk header: length of the payload, records."""


class ChunkBatch(NamedTuple):
    """The records of one chunk, in place: the columns refer to the memory they were received in, or the broker's.

    Columns in the broker's memory stay valid while the client is open, the broker runs, and any part of them is in use;
    see `intact` and `Client.close`. Small consecutive chunks come together, as a copy (``joined_bytes_max``): then
    `header` is that of one chunk with all their records, and `headers` are their own.
    """

    batch: pa.RecordBatch
    header: ChunkHeader
    start: Position
    next: Position
    """Start of the next chunk."""
    entry: EntryId
    slot: PushedSlot | None = None
    """The slot of the columns in the broker's memory; None: they are in this process's memory."""
    joined: bytes = b""
    """The headers of the chunks, if there are several."""

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self.joined) // HEADER_BYTES or 1

    @property
    def headers(self) -> list[ChunkHeader]:
        """The header of each chunk."""
        return [read_header(self.joined, at) for at in range(0, len(self.joined), HEADER_BYTES)] or [self.header]

    def ends(self) -> Iterator[tuple[int, Position]]:
        """Yield the end of each chunk: the ordinal of its last record, and where the chunk after it starts."""
        behind, (group_id, segment_id, offset) = self.header.first_record, self.start
        for payload_bytes, records in _SIZES.iter_unpack(self.joined):
            behind += records
            offset += HEADER_BYTES + padded(payload_bytes)
            yield behind - 1, Position(group_id, segment_id, offset)
        if not self.joined:
            yield behind + self.batch.num_rows - 1, self.next

    def rest(self, position: Position) -> ChunkBatch:
        """Return the chunks from `position` on, which is the start of one of them, or before all of them."""
        if position <= self.start:
            return self
        passed, last = next((number, last) for number, (last, end) in enumerate(self.ends(), 1) if end == position)
        given = last + 1 - self.header.first_record
        batch = self.batch.slice(given)
        header = self.header._replace(
            first_record=last + 1,
            record_count=batch.num_rows,
            payload_bytes=self.next.offset - position.offset - HEADER_BYTES,
        )
        return self._replace(batch=batch, header=header, start=position, joined=self.joined[passed * HEADER_BYTES :])

    def since(self, record: int) -> Iterator[ChunkBatch]:
        """Yield the chunks without the records before ordinal `record`.

        If there are several chunks, the chunk with `record` comes separately, without its first records.
        If all records lie before `record`, yields one batch without records.
        """
        if record <= self.header.first_record:
            yield self
            return
        headers, start, first = iter(self.headers), self.start, self.header.first_record
        for last, behind in self.ends():
            header = next(headers)
            if last >= record:
                batch = self.batch.slice(record - self.header.first_record, last + 1 - record)
                header = header._replace(first_record=record, record_count=batch.num_rows)
                yield self._replace(batch=batch, header=header, start=start, next=behind, joined=b"")
                if behind != self.next:
                    yield self.rest(behind)
                return
            start, first = behind, last + 1
        header = self.header._replace(first_record=first, record_count=0)
        yield self._replace(batch=self.batch.slice(0, 0), header=header, joined=b"")

    def until(self, position: Position) -> ChunkBatch | None:
        """Return the chunks before `position`, which is the start of one of them; None: there are none."""
        if position <= self.start:
            return None
        if position >= self.next:
            return self
        count, last = next((number, last) for number, (last, end) in enumerate(self.ends(), 1) if end == position)
        batch = self.batch.slice(0, last + 1 - self.header.first_record)
        header = self.header._replace(
            record_count=batch.num_rows, payload_bytes=position.offset - self.start.offset - HEADER_BYTES
        )
        return self._replace(batch=batch, header=header, next=position, joined=self.joined[: count * HEADER_BYTES])

    @property
    def pushed(self) -> bool:
        """Whether the columns lie in the broker's memory."""
        return self.slot is not None

    @property
    def intact(self) -> bool:
        """Whether the columns are still valid.

        They become invalid only when the broker has died, or the connection to it is gone: then the broker reuses the
        memory at some time, and the columns refer to arbitrary bytes. A caller that keeps a batch should check this
        before it looks at the batch again, and once more when done; a batch that is not intact can be read again from
        `start`.
        """
        return self.slot is None or self.slot.intact
