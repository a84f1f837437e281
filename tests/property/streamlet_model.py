"""A simple model of a streamlet, and helpers to compare both."""

from dataclasses import dataclass, field

import pyarrow as pa

from kera.broker.log.arena import Slot
from kera.broker.log.entry import Entry
from kera.broker.log.segment import Segment
from kera.broker.log.streamlet import Appended
from kera.core.base.ids import Position
from kera.core.errors import OutOfSequence, ProducerFenced
from kera.core.format.chunk import HEADER_BYTES, ChunkHeader, encode_chunk, iterate_chunks, verify_chunk


@dataclass
class Stored:
    """A chunk, as the model remembers it."""

    producer: tuple[int, int]
    """Id and epoch."""
    sequence: int
    payload: bytes
    record_count: int
    appended: Appended
    published: bool = False

    @property
    def start(self) -> Position:
        return Position(self.appended.group_id, self.appended.segment_id, self.appended.position)

    @property
    def size(self) -> int:
        return HEADER_BYTES + len(self.payload)


@dataclass
class Lease:
    """Bytes that a reader looks at, which must not change."""

    slot: Slot
    generation: int
    content: bytes
    start: int


@dataclass
class Seen:
    """A segment as it was at the last look; closed segments are compared byte by byte."""

    head: int
    durable_head: int
    content: bytes


@dataclass
class Model:
    """A streamlet of `entries` lists."""

    entries: list[list[Stored]]
    epochs: dict[int, int] = field(default_factory=dict)
    next_sequences: dict[tuple[int, int], int] = field(default_factory=dict)

    def expected(self, producer: int, epoch: int, sequence: int) -> type[Exception] | int | None:
        """The error of an append, the number of the chunk it repeats, or None for a new one."""
        newest = self.epochs.get(producer, epoch)
        if epoch < newest:
            return ProducerFenced
        following = self.next_sequences.get((producer, epoch), 0)
        if sequence > following:
            return OutOfSequence
        return sequence if sequence < following else None

    def find(self, producer: int, epoch: int, sequence: int) -> Stored:
        (stored,) = (
            chunk
            for entry in self.entries
            for chunk in entry
            if (chunk.producer, chunk.sequence) == ((producer, epoch), sequence)
        )
        return stored

    def readable(self, entry: int) -> list[Stored]:
        return [chunk for chunk in self.entries[entry] if chunk.published]


def encoded(producer: int, epoch: int, sequence: int, payload: bytes, record_count: int) -> bytes:
    """A chunk as a producer sends it."""
    return encode_chunk(
        pa.py_buffer(payload),
        record_count=record_count,
        stream_id=1,
        streamlet_id=0,
        schema_id=1,
        producer_id=producer,
        producer_epoch=epoch,
        sequence=sequence,
        created_us=0,
        min_timestamp_us=0,
        max_timestamp_us=0,
    ).to_bytes()


def chunks_of(segment: Segment, start: int, end: int) -> list[tuple[ChunkHeader, bytes]]:
    """Headers and payloads of a range."""
    view = segment.slot.view
    return [
        (header, bytes(view[offset + HEADER_BYTES : offset + header.chunk_bytes]))
        for header, offset in iterate_chunks(view, start, end)
    ]


def placed_chunks(entry: Entry, segment: Segment, broker_epoch: int) -> list[tuple[int, ChunkHeader, bytes]]:
    """All chunks of a segment with their offsets; checks that each is whole, and has its own place."""
    found = []
    for header, offset in iterate_chunks(segment.slot.view, 0, segment.head):
        verify_chunk(segment.slot.view, offset)
        assert (header.group_id, header.segment_id, header.entry) == (*segment.key, entry.index)
        assert header.durable_head <= offset
        assert header.broker_epoch == broker_epoch
        payload = bytes(segment.slot.view[offset + HEADER_BYTES : offset + header.chunk_bytes])
        found.append((offset, header, payload))
    return found
