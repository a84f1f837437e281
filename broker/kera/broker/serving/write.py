"""multiWriteChunks: appends verified chunks to their streamlets, and acknowledges them when they reach their level.

The broker appends the chunks of one connection in the order of their arrival. The handler decides a request before it
returns. Only the answer may come later: it waits for backups (level `replicated`, and `persisted` in a replicated
stream) or for the disk (`persisted` in a stream without replicas).

Back-pressure: when the memory is full, or backups are too far behind, a request waits for room. It keeps a copy of its
remaining chunks, and all later requests wait behind it. The number of waiting bytes and the wait are bounded; beyond
these bounds writers get `ArenaFull` or `DiskFull`.

A streamlet takes chunks while this broker owns it and it is not about to move; in a replicated stream, the broker must
also hold its lease. When the broker learns that it was replaced (`fence`), it acknowledges nothing any more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

from kera.broker.counters import Counters, Latencies
from kera.broker.log.entry import Entry
from kera.broker.log.streamlet import Streamlet
from kera.broker.ownership.lease import Lease
from kera.broker.ownership.stream import Stream
from kera.broker.ownership.streams import Streams
from kera.broker.replication.manager import Replication
from kera.broker.serving.carrying import Carrying, written_last
from kera.broker.serving.hooks import RequestHooks, WriteCall
from kera.broker.serving.levels import check_level
from kera.broker.serving.limits import ServingLimits
from kera.broker.serving.pending_write import PendingWrite, WriteReply
from kera.broker.serving.taking import NativeWrites
from kera.broker.serving.write_access import WriteAccess
from kera.broker.storage.persistence import PersistenceManager
from kera.core.base.telemetry import get_logger
from kera.core.errors import (
    ArenaFull,
    CorruptChunk,
    InvalidArgument,
    KeraError,
    NotOwner,
    NotReplicated,
    SchemaMismatch,
    Unavailable,
)
from kera.core.format.chunk import HEADER_BYTES, ChunkHeader, check_sent, padded, verify_header, verify_payload
from kera.core.format.payload import check_payload
from kera.core.native import native
from kera.core.rpc import Answer, Peer, Reply
from kera.core.rpc.limits import REQUEST_CHUNKS_MAX
from kera.core.rpc.wire import error_to_message

_logger = get_logger("kera.broker")

RUN_BYTES_MAX = 256 << 10
"""Maximum size of consecutive chunks of a segment that go to backups as one; it is small enough for batches to become
full."""

_REPLACED = "a newer launch of this broker has taken over; ask the coordinator"


def _too_many() -> InvalidArgument:
    return InvalidArgument(
        f"at most {REQUEST_CHUNKS_MAX} chunks in a request; send the others in the next", limit=REQUEST_CHUNKS_MAX
    )


class Writer:
    """Handles writes for the service."""

    def __init__(  # noqa: PLR0913 - what a writer needs
        self,
        streams: Streams,
        memory: PersistenceManager,
        replication: Replication,
        counters: Counters,
        latencies: Latencies,
        pump: Callable[[], None],
        lease: Lease,
        *,
        check_payloads: bool = True,
        limits: ServingLimits,
        access: WriteAccess | None = None,
        hooks: Sequence[RequestHooks] = (),
    ) -> None:
        """`pump`: starts the requests to backups that are due; `check_payloads`: whether payloads must hold records.

        `access`: the rights to write; None: everybody may write to all streams. `hooks`: the plugged-in hooks.
        """
        self._streams = streams
        self._memory = memory
        self._logs = replication.logs
        self._carrying = Carrying(replication, memory, counters, lease)
        self._backlog = replication.backlog
        self._counters = counters
        self._latencies = latencies
        self._pump_replication = pump
        self._lease = lease
        self._check_payloads = check_payloads
        self._limits = limits
        self._access = access
        self._hooks = hooks
        self.native: NativeWrites | None = None
        """Appends usual chunks, and takes usual requests from frame connections; None: all chunks are appended here."""
        if native is not None:
            bounds = replication.limits
            self.native = NativeWrites(
                native.take_writes,
                streams.by_id,
                self._carrying,
                memory,
                counters,
                latencies,
                pump,
                run_bytes_max=min(RUN_BYTES_MAX, bounds.request_bytes_max, bounds.segment_bytes),
                check_payloads=check_payloads,
                as_usual=lambda: not (self._queue or self._fenced),
                access=access,
            )
        self._fenced = False
        """Whether this launch was replaced, so nothing may be acknowledged any more."""
        self._loop = asyncio.get_running_loop()
        self._queue: deque[PendingWrite] = deque()
        """Requests that wait for room, in the order of their arrival."""
        self._queued_bytes = 0
        self._pump: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        memory.events.room.listen(self._room.set)

    def write(self, call: WriteCall) -> WriteReply | asyncio.Future[WriteReply]:
        """Append the chunks of a request; the reply has a status for each."""
        self._counters.write_requests += 1
        request = call.message
        check_level(request.durability)
        if request.chunk_count > REQUEST_CHUNKS_MAX:
            raise _too_many()
        for hooks in self._hooks:
            hooks.on_write(call)
        write = PendingWrite(request, call.bulk, call.peer, self.go_on)
        if (not self._queue and self._decide(write)) or not self._wait_for_room(write):
            self.go_on(write)
        if write.done:
            self._latencies.appends.observe(perf_counter() - write.begun_s)
            return Reply(write.response)
        write.future = Answer(loop=self._loop)
        return write.future

    def _wait_for_room(self, write: PendingWrite) -> bool:
        """Queue a write for which there is no room; False if too many bytes wait already and it was refused."""
        rest = len(write.bulk) - write.at
        if self._queued_bytes + rest > self._limits.room_bytes_max:
            self._refuse_rest(write, ArenaFull("the broker's memory is full, and enough requests wait for it already"))
            return False
        write.bulk, write.at = memoryview(bytes(write.bulk[write.at :])), 0  # the transport's buffer is used again
        write.deadline_s = self._loop.time() + self._limits.room_wait_ms / 1000
        self._queue.append(write)
        self._queued_bytes += rest
        if self._pump is None:
            self._pump = self._loop.create_task(self._decide_queue())
        return True

    async def _decide_queue(self) -> None:
        """Decide the waiting requests, in order."""
        while self._queue:
            write = self._queue[0]
            if write.future is None or not write.future.cancelled():  # otherwise its connection is gone
                try:
                    await self._decide_when_there_is_room(write)
                    self.go_on(write)
                except Exception as error:  # noqa: BLE001 - a defect: its writer gets it, and later requests go on
                    if write.future is not None and not write.future.done():
                        write.future.set_exception(error)
            self._queue.popleft()
            self._queued_bytes -= len(write.bulk)
        self._pump = None

    async def _decide_when_there_is_room(self, write: PendingWrite) -> None:
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

    def fence(self) -> None:
        """Refuse all requests from now on, and acknowledge no waiting one: this launch was replaced."""
        self._fenced = True
        self._room.set()  # requests that wait for room are refused
        self._logs.fail(_replaced())

    def _decide(self, write: PendingWrite) -> bool:
        """Append chunks; False when there is no room for the next one, True when all are decided."""
        if self._fenced:
            self._refuse_rest(write, NotOwner(_REPLACED))
            return True
        try:
            write.decided = self._decide_chunks(write)
        finally:
            if write.pump:
                self._pump_replication()
        return write.decided

    def _decide_chunks(self, write: PendingWrite) -> bool:
        bulk = write.bulk
        end = len(bulk)
        while True:
            if self.native is not None:
                self.native.append(write)
            at = write.at
            if at >= end:
                return True
            if len(write.statuses) >= REQUEST_CHUNKS_MAX:
                self._refuse_rest(write, _too_many())
                return True
            try:
                header = verify_header(bulk, at)
                chunk_end = at + HEADER_BYTES + padded(header.payload_bytes)
                if chunk_end > end:
                    text = f"chunk at offset {at} is cut short: {end - at} of {header.chunk_bytes} bytes"
                    raise CorruptChunk(text, offset=at)
            except CorruptChunk as error:
                # The start of the next chunk is unknown, so this chunk and all that follow it are refused.
                self._refuse_rest(write, error)
                return True
            try:
                verify_payload(bulk, at, header)
                check_sent(header)
                stream, streamlet = self._owner(header, write.peer)
                if self._check_payloads:
                    check_payload(bulk, at, header, stream.schemas[header.schema_id])
                self._append(write, stream, streamlet, bulk[at:chunk_end], header)
            except KeraError as error:
                if isinstance(error, ArenaFull) and "domain" not in error.attributes:  # else waiting does not help
                    write.pump = True
                    if self._backlog.make_room():
                        continue
                    return False
                self._counters.chunks_refused += 1
                self._counters.not_owner += isinstance(error, NotOwner)
                write.statuses.add(error=error_to_message(error))
                write.refused = True
            write.at = chunk_end

    def check_access(self, peer: Peer, stream: Stream) -> None:
        """Check that a peer may write to a stream. Raises as `WriteAccess.check`."""
        if self._access is not None:
            self._access.check(peer, stream)

    def _owner(self, header: ChunkHeader, peer: Peer) -> tuple[Stream, Streamlet]:
        stream = self._streams.get(header.stream_id)
        self.check_access(peer, stream)
        if self._access is not None:
            self._access.check_producer(peer, stream, header.producer_id)
        streamlet = stream.streamlet(header.streamlet_id)
        if not streamlet.takes_chunks:
            raise stream.not_owner(header.streamlet_id)
        if header.schema_id not in stream.schemas:
            if header.schema_id > max(stream.schemas, default=0):
                # The coordinator could not notify this broker when columns were added.
                raise Unavailable(
                    f"this broker does not know schema {header.schema_id} of stream {stream.name!r} yet",
                    stream=stream.name,
                    schema_id=header.schema_id,
                )
            raise SchemaMismatch(
                f"stream {stream.name!r} has no schema {header.schema_id}",
                stream=stream.name,
                schema_id=header.schema_id,
            )
        return stream, streamlet

    def _append(
        self, write: PendingWrite, stream: Stream, streamlet: Streamlet, chunk: memoryview, header: ChunkHeader
    ) -> None:
        level, log = self._carrying.way(write, stream, header.streamlet_id, header.producer_id % len(streamlet.entries))
        punctuation = streamlet.keep_promise(header, len(chunk))
        if punctuation is not None:
            self._counters.punctuations += 1
            self._carrying.punctuated(write, stream, streamlet, log, punctuation, level)
        appended = streamlet.append(chunk, header)
        counters = self._counters
        if appended.duplicate:
            counters.chunks_duplicate += 1
        else:
            size, records = len(chunk), header.record_count
            counters.chunks_appended += 1
            counters.records_appended += records
            counters.bytes_appended += size
            streamlet.records_appended += records
            streamlet.bytes_appended += size
        self._carrying.carry_on(write, stream, streamlet, log, appended, level)

    def punctuate(
        self, write: PendingWrite, stream: Stream, streamlet: Streamlet, entry: Entry, timestamp_us: int
    ) -> bool:
        """Append a punctuation, unless the entry's watermark is as late already; return whether one was appended.

        `write` also waits for the punctuation, or else for the entry's last chunk. Raises as an append of a chunk.
        """
        if self._fenced:
            raise NotOwner(_REPLACED)
        level, log = self._carrying.way(write, stream, streamlet.streamlet_id, entry.index)
        appended = streamlet.punctuate(entry, timestamp_us)
        if appended is not None:
            self._counters.punctuations += 1
        last = appended or written_last(entry)
        if last is None:
            write.statuses.add(entry=entry.index, durability=level, duplicate=True)
        else:
            self._carrying.carry_on(write, stream, streamlet, log, last, level)
        return appended is not None

    def made_room(self, write: PendingWrite) -> bool:
        """Try to make room for `write`, for which there was none; return whether there is room now."""
        write.pump = True
        made = self._backlog.make_room()
        self._pump_replication()
        return made

    async def settle(self, write: PendingWrite) -> None:
        """Wait until all that was appended for `write` has reached its level, or has failed; the statuses say which."""
        write.decided = True
        if write.pump:
            self._pump_replication()
        self.go_on(write)
        if not write.done:
            write.future = Answer(loop=self._loop)
            await write.future

    def _refuse_rest(self, write: PendingWrite, error: KeraError | None) -> None:
        """Refuse all chunks from `write.at` on; without `error`, the reason is a lack of room."""
        if error is None:
            error = ArenaFull(
                f"the broker's memory was full for {self._limits.room_wait_ms} ms: its disk, backups or readers are"
                " slower than its writers",
                slot_bytes=self._memory.slots.slot_bytes,
            )
        # The client only claims the number of chunks: answer no more than the bytes have room for.
        claimed = min(write.request.chunk_count, len(write.statuses) + len(write.bulk) // HEADER_BYTES)
        missing = max(1, claimed - len(write.statuses))
        self._counters.chunks_refused += missing
        message = error_to_message(error)
        for _ in range(missing):
            write.statuses.add(error=message)
        write.at, write.decided, write.refused = len(write.bulk), True, True

    def go_on(self, write: PendingWrite) -> None:
        """Answer a decided write, once it waits neither for backups nor for the disk."""
        if write.batches:
            return
        if write.placed:
            write.fill_places()
        if write.wanted:
            wanted, write.wanted = write.wanted, []
            self._memory.commits.persist(wanted, partial(self._persisted, write))
        else:
            self._answer(write)

    def _answer(self, write: PendingWrite) -> None:
        if self._fenced:
            acknowledged = [index for index, each in enumerate(write.statuses) if not each.HasField("error")]
            write.set_errors(acknowledged, _replaced())
        if not write.refused and len(write.statuses) > 1:
            write.response.all_stored = True
        for hooks in self._hooks:
            try:
                hooks.on_written(write)
            except Exception:  # it must not affect other requests that wait for the batch
                _logger.exception("a hook has failed", hook=type(hooks).__name__)
        write.done = True
        future = write.future
        if future is not None and not future.done():
            self._latencies.appends_waited.observe(perf_counter() - write.begun_s)
            future.set_result(Reply(write.response))

    def _persisted(self, write: PendingWrite, error: KeraError | None) -> None:
        write.set_errors(write.waiting, error)
        self._answer(write)


def _replaced() -> NotReplicated:
    return NotReplicated(_REPLACED)
