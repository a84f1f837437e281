"""multiWriteChunks: verified chunks go to their streamlets, and are acknowledged when they reach their level.

Chunks of one connection are appended in the order in which they arrive. A request is decided within the call of its
handler; only its answer may come later, when it waits for the disk (level `persisted`).

Back-pressure: when the memory is full, a request waits for room, with a copy of what is left of it, and all later ones
wait behind it. How much waits, and for how long, is bounded; beyond that writers are told (`ArenaFull`, `DiskFull`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable

from kera.broker.jobs import nothing
from kera.broker.metrics import Counters
from kera.broker.persistence import PersistenceManager
from kera.broker.segment import Segment
from kera.broker.stream import Stream, Streams
from kera.broker.streamlet import Streamlet
from kera.core.chunk import HEADER_BYTES, ChunkHeader, verify_header, verify_payload
from kera.core.errors import (
    ArenaFull,
    CorruptChunk,
    InvalidArgument,
    KeraError,
    SchemaMismatch,
)
from kera.core.rpc import Call, Reply
from kera.core.rpc.wire import error_to_message
from kera.v1 import broker_pb2, common_pb2

WAITING_BYTES_MAX = 64 << 20
"""Of requests that wait for room in memory, all together."""
WAIT_MS_MAX = 5_000
"""How long one of them waits."""

_LEADER, _PERSISTED = common_pb2.DURABILITY_LEADER, common_pb2.DURABILITY_PERSISTED

WriteCall = Call[broker_pb2.MultiWriteChunksRequest]
WriteReply = Reply[broker_pb2.MultiWriteChunksResponse]


class _Write:
    """A request that is being decided, chunk by chunk."""

    __slots__ = ("at", "bulk", "deadline_s", "decided", "request", "response", "waiting", "wanted")

    def __init__(self, request: broker_pb2.MultiWriteChunksRequest, bulk: memoryview) -> None:
        self.request = request
        self.bulk = bulk
        self.at = 0
        """Where the next chunk to decide starts."""
        self.response = broker_pb2.MultiWriteChunksResponse()
        self.wanted: list[tuple[Segment, int]] = []
        """What has to be on disk before the answer."""
        self.waiting: list[int] = []
        """The statuses that it concerns."""
        self.decided: asyncio.Future[None] | None = None
        """If it has to wait for room."""
        self.deadline_s = 0.0


class Writer:
    """Handles writes for the service."""

    def __init__(self, streams: Streams, memory: PersistenceManager, counters: Counters) -> None:
        self._streams = streams
        self._memory = memory
        self._counters = counters
        self._queue: deque[_Write] = deque()
        """Requests that wait for room, in the order in which they came."""
        self._queued_bytes = 0
        self._pump: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        memory.on_room = self._room.set

    def write(self, call: WriteCall) -> WriteReply | Awaitable[WriteReply]:
        """Append the chunks of a request; each has a status of its own."""
        self._counters.write_requests += 1
        request = call.message
        if request.durability not in (common_pb2.DURABILITY_UNSPECIFIED, _LEADER, _PERSISTED):
            raise InvalidArgument(
                "this version acknowledges at level leader or persisted: there are no backups yet",
                durability=level_name(request.durability),
            )
        write = _Write(request, call.bulk)
        if not self._queue and self._decide(write):
            return self._answer(write)
        rest = len(write.bulk) - write.at
        if self._queued_bytes + rest > WAITING_BYTES_MAX:
            self._refuse_rest(write, ArenaFull("the broker's memory is full, and enough requests wait for it already"))
            return self._answer(write)
        loop = asyncio.get_running_loop()
        write.bulk, write.at = memoryview(bytes(write.bulk[write.at :])), 0  # the transport's buffer is used again
        write.decided = loop.create_future()
        write.deadline_s = loop.time() + WAIT_MS_MAX / 1000
        self._queue.append(write)
        self._queued_bytes += rest
        if self._pump is None:
            self._pump = loop.create_task(self._decide_queue())
        return self._answer_later(write, write.decided)

    async def _answer_later(self, write: _Write, decided: asyncio.Future[None]) -> WriteReply:
        await decided
        answer = self._answer(write)
        return answer if isinstance(answer, Reply) else await answer

    async def _decide_queue(self) -> None:
        """Decide the requests that wait, one after the other: nobody overtakes."""
        while self._queue:
            write = self._queue[0]
            if write.decided is not None and not write.decided.done():  # cancelled: its connection is gone
                await self._decide_when_there_is_room(write)
                if not write.decided.done():
                    write.decided.set_result(None)
            self._queue.popleft()
            self._queued_bytes -= len(write.bulk)
        self._pump = None

    async def _decide_when_there_is_room(self, write: _Write) -> None:
        while True:
            self._room.clear()
            if self._decide(write):
                return
            try:
                async with asyncio.timeout_at(write.deadline_s):
                    await self._room.wait()
            except TimeoutError:
                if not self._decide(write):
                    self._refuse_rest(write, None)
                return

    def _decide(self, write: _Write) -> bool:
        """Append what can be; False when there is no room for the next chunk, True when all are decided."""
        bulk, statuses = write.bulk, write.response.statuses
        end = len(bulk)
        while write.at < end:
            try:
                header = whole_header(bulk, write.at)
            except CorruptChunk as error:
                # Where the next chunk starts is not known: this one and all that follow it are refused.
                self._refuse_rest(write, error)
                return True
            at = write.at
            try:
                verify_payload(bulk, at, header)
                stream, streamlet = self._owner(header)
                self._append(write, stream, streamlet, bulk[at : at + header.chunk_bytes], header)
            except ArenaFull:
                return False
            except KeraError as error:
                self._counters.chunks_refused += 1
                statuses.add(error=error_to_message(error))
            write.at = at + header.chunk_bytes
        return True

    def _owner(self, header: ChunkHeader) -> tuple[Stream, Streamlet]:
        stream = self._streams.get(header.stream_id)
        streamlet = stream.streamlet(header.streamlet_id)
        if header.schema_id not in stream.schema_ids:
            raise SchemaMismatch(
                f"stream {stream.name!r} has no schema {header.schema_id}",
                stream=stream.name,
                schema_id=header.schema_id,
            )
        if header.placed:
            raise InvalidArgument("chunk has been placed by a broker before", stream=stream.name)
        return stream, streamlet

    def _append(
        self, write: _Write, stream: Stream, streamlet: Streamlet, chunk: memoryview, header: ChunkHeader
    ) -> None:
        level = write.request.durability or stream.durability
        to_disk = _PERSISTED in (level, stream.durability)
        if to_disk:
            self._memory.check_disk()
        appended = streamlet.append(chunk, header)
        counters = self._counters
        if appended.duplicate:
            counters.chunks_duplicate += 1
        else:
            counters.chunks_appended += 1
            counters.records_appended += header.record_count
            counters.bytes_appended += len(chunk)
        if stream.durability == _LEADER:
            streamlet.publish(appended)
        if to_disk and appended.segment is not None:
            if level == _PERSISTED:
                write.wanted.append((appended.segment, appended.end))
                write.waiting.append(len(write.response.statuses))
            else:
                self._memory.persist([(appended.segment, appended.end)], nothing)
        write.response.statuses.add(
            entry=appended.entry,
            group_id=appended.group_id,
            segment_id=appended.segment_id,
            position=appended.position,
            first_record=appended.first_record,
            durability=level,
            duplicate=appended.duplicate,
        )

    def _refuse_rest(self, write: _Write, error: KeraError | None) -> None:
        """Refuse all chunks from `write.at` on; without `error`, for want of room."""
        if error is None:
            error = ArenaFull(
                f"the broker's memory was full for {WAIT_MS_MAX} ms: its disk or readers are slower than its writers",
                slot_bytes=self._memory.slot_bytes,
            )
        # How many there are is only claimed, so no more are answered than the bytes have room for.
        claimed = min(write.request.chunk_count, len(write.response.statuses) + len(write.bulk) // HEADER_BYTES)
        missing = max(1, claimed - len(write.response.statuses))
        self._counters.chunks_refused += missing
        for _ in range(missing):
            write.response.statuses.add(error=error_to_message(error))
        write.at = len(write.bulk)

    def _answer(self, write: _Write) -> WriteReply | Awaitable[WriteReply]:
        """The reply, now or when what it promises is on disk."""
        if not write.wanted:
            return Reply(write.response)
        outcome: list[KeraError | None] = []
        future: asyncio.Future[None] | None = None

        def done(error: KeraError | None) -> None:
            outcome.append(error)
            if future is not None and not future.done():
                future.set_result(None)

        self._memory.persist(write.wanted, done)
        if not outcome:
            future = asyncio.get_running_loop().create_future()
            return self._persisted(write, future, outcome)
        self._tell(write, outcome[0])
        return Reply(write.response)

    async def _persisted(
        self, write: _Write, future: asyncio.Future[None], outcome: list[KeraError | None]
    ) -> WriteReply:
        await future
        self._tell(write, outcome[0])
        return Reply(write.response)

    def _tell(self, write: _Write, error: KeraError | None) -> None:
        if error is None:
            return
        for index in write.waiting:
            status = write.response.statuses[index]
            status.Clear()
            status.error.CopyFrom(error_to_message(error))


def whole_header(bulk: memoryview, at: int) -> ChunkHeader:
    """The verified header of the chunk at `at`, which is all there. Raises `CorruptChunk`."""
    header = verify_header(bulk, at)
    if at + header.chunk_bytes > len(bulk):
        raise CorruptChunk(
            f"chunk at offset {at} is cut short: {len(bulk) - at} of {header.chunk_bytes} bytes", offset=at
        )
    return header


def level_name(durability: int) -> str:
    """The name of a level, or the number of one that only newer clients know."""
    known = common_pb2.Durability.DESCRIPTOR.values_by_number.get(durability)
    return str(known.name) if known is not None else str(durability)
