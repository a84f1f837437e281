"""Finds a chunk of a copy in its stream by the sequence that the copy gave it.

Sequences of a copy ascend within an entry. So this is a binary search over the ordinals of records, which reads one own
chunk per step. It skips the chunks of other writers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple, cast

from kera.client import ChunkBatch, ChunkQuery, Client, ConsumerSettings, EntryBounds, Position, StreamDescription


class CopyEntry(NamedTuple):
    """An entry that a copy writes to."""

    stream: StreamDescription
    streamlet: int
    producer_id: int
    """Producer id of the copy."""

    @property
    def entry(self) -> int:
        """The entry of the streamlet to which all chunks of the copy go."""
        return self.producer_id % self.stream.config.entries


class Sought(NamedTuple):
    """The result of a search for a chunk."""

    chunk: ChunkBatch | None
    """The first chunk of the copy with this sequence or a later one; None: there is no such chunk yet."""
    is_it: bool
    """Whether `chunk` has exactly this sequence; if not, earlier chunks have been removed."""


async def find_chunk(client: Client, where: CopyEntry, sequence: int) -> Sought:
    """Find the chunk of a copy that has `sequence`."""
    bounds = (await client.bounds(where.stream.name))[where.streamlet][where.entry]
    low, high = bounds.first_record, bounds.next_record
    best: ChunkBatch | None = None
    while low < high:
        middle = (low + high) // 2
        chunk = await _own_chunk(client, where, bounds, middle)
        if chunk is not None and chunk.header.sequence < sequence:
            low = chunk.header.first_record + chunk.header.record_count
            continue
        best, high = chunk or best, middle
        if chunk is not None and chunk.header.sequence == sequence:
            break
    return Sought(best, best is not None and best.header.sequence == sequence)


async def _own_chunk(client: Client, where: CopyEntry, bounds: EntryBounds, record: int) -> ChunkBatch | None:
    """Return the first chunk of the copy that ends after a record; None: there is no such chunk."""
    start = await _boundary(client, where, bounds, record)
    settings = ConsumerSettings.load(shared_memory="never", joined_bytes_max=0, corrupt_chunks="skip")
    chunks = client.read_range(
        where.stream.name, where.streamlet, where.entry, start, bounds.end, bytes_max=1, settings=settings
    )
    async with aclosing(cast(AsyncGenerator[ChunkBatch, None], chunks)):
        async for chunk in chunks:
            if chunk.header.producer_id == where.producer_id:
                return chunk
    return None


async def _boundary(client: Client, where: CopyEntry, bounds: EntryBounds, record: int) -> Position:
    """Return the start of the chunk that has a record."""
    before = record - bounds.first_record
    query = ChunkQuery(where.streamlet, where.entry, bounds.start, bounds.end, records_max=before)
    (place,) = await client.locate(where.stream.name, [query])
    return place.position if place.record <= record else bounds.start  # `locate` always passes the first chunk
