"""Fetching chunks: one request to a broker, and its answer as batches in place.

The bytes of an answer are in memory of its own (sockets) or in the broker's arena, mapped read-only (shared memory).
Either way they become one Arrow buffer per answer and range, and each chunk's batch refers to a slice of it. A place in
the arena is leased to the connection. When the last batch that refers to it is gone, the lease is given back: with the
next request of this connection, or by itself when there is none for a while, as after the end of a consumer.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from kera.client.settings import ConsumerSettings
from kera.client.types import ChunkBatch, fill_cursor, position_of
from kera.core.chunk import HEADER_BYTES, decode_payload, read_header, verify_chunk
from kera.core.errors import InvalidArgument, KeraError, SchemaMismatch
from kera.core.ids import EntryId, Position
from kera.core.rpc import Channel, Reply, api
from kera.core.rpc.wire import error_from_message
from kera.v1 import broker_pb2


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


class _Leases:
    """What one connection may look at in the broker's arena, as far as it has to be given back."""

    RETURN_DELAY_S = 0.05
    """How long a lease that has ended waits for a request to go with."""
    RETURN_TIMEOUT_S = 10.0

    def __init__(self, channel: Channel) -> None:
        self._channel = weakref.ref(channel)
        self._loop = asyncio.get_running_loop()
        self._ended: deque[int] = deque()
        self._return_soon = False

    def end(self, slot: int) -> None:
        """Called from whatever thread drops a batch, and from the garbage collector."""
        self._ended.append(slot)
        if not self._return_soon:
            self._return_soon = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, and all connections with it
                self._loop.call_soon_threadsafe(self._loop.call_later, self.RETURN_DELAY_S, self._return)

    def end_all(self, reply: asyncio.Future[Reply[broker_pb2.MultiReadChunksResponse]]) -> None:
        """Nobody wants this reply any more."""
        if reply.cancelled() or reply.exception() is not None:
            return
        for result in reply.result().message.results:
            for reference in result.references:
                self.end(reference.slot)

    def take_ended(self) -> Iterator[int]:
        """Slots to give back, one per lease."""
        while self._ended:
            yield self._ended.popleft()

    def _return(self) -> None:
        self._return_soon = False
        channel = self._channel()
        if not self._ended or channel is None or channel.closed:
            return  # leases end with their connection
        request = broker_pb2.MultiReadChunksRequest(released_slots=self.take_ended())
        reply = channel.submit(api.MULTI_READ_CHUNKS, request, timeout_s=self.RETURN_TIMEOUT_S)
        reply.add_done_callback(lambda done: done.cancelled() or done.exception())


_leases: weakref.WeakKeyDictionary[Channel, _Leases] = weakref.WeakKeyDictionary()


class Fetcher:
    """Fetches from one broker over one connection."""

    def __init__(self, channel: Channel, settings: ConsumerSettings) -> None:
        """Raises `InvalidArgument` when the settings ask for shared memory that this connection cannot give."""
        self.channel = channel
        self._application_id = settings.application_id
        if settings.shared_memory == "always" and channel.transport != "unix":
            raise InvalidArgument(
                f"shared_memory is 'always', but the broker is reached by {channel.transport}",
                transport=channel.transport,
            )
        self.by_reference = settings.shared_memory != "never" and channel.transport == "unix"
        self._arena: _ArenaMap | None = None
        leases = _leases.get(channel)
        if leases is None:
            leases = _leases[channel] = _Leases(channel)
        self._leases = leases

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
            fill_cursor(row.start, item.entry, item.start)
            if item.end is not None:
                fill_cursor(row.end, item.entry, item.end)
        request.released_slots.extend(self._leases.take_ended())
        submitted = self.channel.submit(api.MULTI_READ_CHUNKS, request, timeout_s=timeout_s + wait_ms / 1000)
        try:
            reply = await asyncio.shield(submitted)
        except asyncio.CancelledError:
            submitted.add_done_callback(self._leases.end_all)  # what it brings is leased to us all the same
            raise
        bulk = pa.py_buffer(reply.bulk[0]) if reply.bulk else pa.py_buffer(b"")
        at = 0
        fetched = []
        for item, result in zip(wanted, reply.message.results, strict=True):
            if result.references:
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
        weakref.finalize(view, self._leases.end, reference.slot).atexit = False
        return pa.py_buffer(view)


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
