"""Fetching chunks: one request to a broker, and its answer as batches in place.

The bytes of an answer are in memory of its own (sockets) or in the broker's arena, mapped read-only (shared memory).
Either way they become one Arrow buffer per answer and range, and each chunk's batch refers to a slice of it. When the
last batch that refers to a place in the arena is gone, its slot is handed back with the next request.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from kera.client.types import ChunkBatch, position_of
from kera.core.chunk import HEADER_BYTES, decode_payload, read_header, verify_chunk
from kera.core.errors import InvalidArgument, KeraError, SchemaMismatch
from kera.core.ids import EntryId, Position
from kera.core.rpc import Channel, api
from kera.core.rpc.wire import error_from_message
from kera.v1 import broker_pb2, common_pb2


class Wanted(NamedTuple):
    """A range to read."""

    entry: EntryId
    start: Position
    end: Position | None
    """Read no further; None: up to the durable head."""


class Fetched(NamedTuple):
    """What a range had to give."""

    entry: EntryId
    start: Position
    next: Position
    buffers: list[pa.Buffer]
    """Whole chunks each, following each other."""
    lag_records: int
    error: KeraError | None


class Fetcher:
    """Fetches from one broker over one connection."""

    def __init__(self, channel: Channel, *, application_id: str, by_reference: bool) -> None:
        self.channel = channel
        self._application_id = application_id
        self.by_reference = by_reference and channel.transport == "unix"
        self._arena: _ArenaMap | None = None
        self._released: deque[int] = deque()  # appended to from whatever thread drops a batch

    async def fetch(self, wanted: Sequence[Wanted], *, bytes_max: int, wait_ms: int, timeout_s: float) -> list[Fetched]:
        """One request. Errors of single ranges are in their `Fetched`."""
        request = broker_pb2.MultiReadChunksRequest(
            bytes_max=bytes_max,
            wait_ms=wait_ms,
            application_id=self._application_id,
            by_reference=self.by_reference,
        )
        for item in wanted:
            row = request.ranges.add()
            _fill(row.start, item.entry, item.start)
            if item.end is not None:
                _fill(row.end, item.entry, item.end)
        while self._released:
            request.released_slots.append(self._released.popleft())
        reply = await self.channel.submit(api.MULTI_READ_CHUNKS, request, timeout_s=timeout_s + wait_ms / 1000)
        bulk = pa.py_buffer(reply.bulk[0]) if reply.bulk else pa.py_buffer(b"")
        at = 0
        fetched = []
        for item, result in zip(wanted, reply.message.results, strict=True):
            if self.by_reference:
                buffers = [self._refer(reply.message.arena_path, reference) for reference in result.references]
            else:
                buffers = [bulk.slice(at, result.length_bytes)] if result.length_bytes else []
                at += result.length_bytes
            error = error_from_message(result.error) if result.HasField("error") else None
            fetched.append(
                Fetched(item.entry, item.start, position_of(result.next), buffers, result.lag_records, error)
            )
        return fetched

    def _refer(self, arena_path: str, reference: broker_pb2.ArenaReference) -> pa.Buffer:
        if self._arena is None or self._arena.path != arena_path:
            self._arena = _ArenaMap(arena_path)
        view = self._arena.view(reference.arena_offset, reference.length_bytes)
        weakref.finalize(view, self._released.append, reference.slot)
        return pa.py_buffer(view)


def can_map_arena(arena_path: str) -> bool:
    """Whether this process may read a broker's shared memory."""
    return os.access(arena_path, os.R_OK)


class _ArenaMap:
    """A broker's arena, mapped read-only."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            fd = os.open(Path(path), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidArgument(
                f"cannot map the broker's memory {path}: {error.strerror};"
                " run as the broker's user, or set shared_memory to never",
                path=path,
            ) from error
        try:
            self._memory = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
        finally:
            os.close(fd)

    def view(self, offset: int, length: int) -> memoryview:
        return self._memory[offset : offset + length]


def batches_of(fetched: Fetched, schema: pa.Schema, schema_id: int, *, verify: bool) -> Iterator[ChunkBatch]:
    """Each chunk of a fetched range as a batch in place. Raises `CorruptChunk`."""
    group_id, segment_id, offset = fetched.start
    for buffer in fetched.buffers:
        at = 0
        while at < buffer.size:
            header = verify_chunk(buffer, at) if verify else read_header(buffer, at)
            if header.schema_id != schema_id:
                raise SchemaMismatch(
                    f"chunk has schema {header.schema_id}, the stream was known with {schema_id}; open it again",
                    stream_id=header.stream_id,
                )
            if (header.group_id, header.segment_id) != (group_id, segment_id):
                group_id, segment_id, offset = header.group_id, header.segment_id, 0
            batch = decode_payload(buffer.slice(at + HEADER_BYTES, header.payload_bytes), schema)
            start = Position(group_id, segment_id, offset)
            offset += header.chunk_bytes
            yield ChunkBatch(batch, header, start, Position(group_id, segment_id, offset), fetched.entry)
            at += header.chunk_bytes


def _fill(cursor: common_pb2.Cursor, entry: EntryId, position: Position) -> None:
    cursor.stream_id, cursor.streamlet_id, cursor.entry = entry
    cursor.group_id, cursor.segment_id, cursor.position = position
