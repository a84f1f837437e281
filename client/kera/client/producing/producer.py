"""The producer: records → chunks → requests (thesis 7.1.2), idempotent, in order, within a bounded buffer.

Follow a record: `send` appends it to the open chunk of its streamlet (`accumulator.Accumulator`); the chunk closes when
it is full or due, is encoded and queued in its `lane.Lane`; the `Sender` of the streamlet's broker (`routes.Routes`
knows which) gathers queued chunks of all lanes into requests, several in flight; each chunk's answer resolves the
deliveries of its records.

Everything runs on the event loop, and nothing is done per record beyond appending to lists.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Self

import pyarrow as pa

from kera.client import arguments
from kera.client.arrow_input import Columns, record_batches
from kera.client.cluster.cluster import Cluster
from kera.client.producing.accumulator import Accumulator, Pending
from kera.client.producing.encoding import Payload, check_rows, conform, payloads, record_payloads, timestamps
from kera.client.producing.lane import LAST_EPOCH, Lane, PendingChunk
from kera.client.producing.outcome import Outcome, Stored
from kera.client.producing.partitioner import streamlet_of
from kera.client.producing.routes import Routes
from kera.client.producing.sender import Sender
from kera.client.producing.stream_writer import ProducerIdentity, StreamWriter
from kera.client.settings import ProducerSettings
from kera.client.types import Delivery, StreamDescription, durability_value
from kera.client.unclosed import Guard, Loss
from kera.core.clock import Clock, SystemClock
from kera.core.errors import (
    BufferFull,
    ClosedError,
    InvalidArgument,
    KeraError,
    ProducerFenced,
    SchemaMismatch,
    Uncertain,
    UnknownStream,
)
from kera.core.ids import PRODUCER_EPOCHS
from kera.core.rpc import api
from kera.core.telemetry import get_logger
from kera.v1 import coordinator_pb2

log = get_logger("kera.producer")

RECORD_OVERHEAD_BYTES = 32
"""Of a record in a chunk, besides its value and keys: timestamp and offsets; estimated from above."""
_TIMESTAMP_US_MAX = (1 << 63) - 1
_CHUNK_COST_BYTES = 16 << 10
"""What a chunk costs besides its bytes, in bytes: so many small ones are not queued for long before any is sent."""
_NO_KEYS = ()


class BatchDelivery(Awaitable[list[Delivery]]):
    """The deliveries of the chunks that a batch became; await it for the list, in the order of the chunks.

    Raises the error of the first one that has failed.
    """

    __slots__ = ("_outcomes",)

    def __init__(self, outcomes: list[Outcome]) -> None:
        self._outcomes = outcomes

    def __await__(self) -> Generator[Any, None, list[Delivery]]:
        deliveries = []
        for outcome in self._outcomes:
            yield from outcome.wait()
            deliveries.append(outcome.result())
        return deliveries

    def done(self) -> bool:
        """Whether it is known what became of all chunks."""
        return all(outcome.done() for outcome in self._outcomes)

    def result(self) -> list[Delivery]:
        """What awaiting it gives, without waiting. Raises the first error, or `asyncio.InvalidStateError`."""
        return [outcome.result() for outcome in self._outcomes]

    def exception(self) -> KeraError | None:
        """The first error, if there is one. Raises `asyncio.InvalidStateError`."""
        return next((error for outcome in self._outcomes if (error := outcome.exception()) is not None), None)

    def add_done_callback(self, callback: Callable[[BatchDelivery], object]) -> None:
        """Have the event loop call `callback` with this when it is known what became of all chunks."""

        def known() -> None:
            waiting = next((outcome for outcome in self._outcomes if not outcome.done()), None)
            if waiting is None:
                callback(self)
            else:
                waiting.when_done(known)

        if self._outcomes:
            self._outcomes[-1].when_done(known)
        else:
            asyncio.get_running_loop().call_soon(known)


class Producer:
    """Writes records and batches to streams. Made by `Client.producer`; use it as an async context manager.

    Deliveries that nobody awaits are not lost from sight: `flush`, and leaving the context, raise the first error
    since the last `flush`.

    One that nobody closes delivers what it has when its loop ends, or the interpreter; see `kera.client.unclosed`.

    With a name (the setting ``name``) it is the successor of all producers that had this name before. Once `prepare`
    (or the first `send_batch`) has returned, no broker that lives takes anything of them, in any streamlet; one that
    tries is told (`ProducerFenced`), and fails as a whole.
    """

    def __init__(self, cluster: Cluster, settings: ProducerSettings, clock: Clock | None = None) -> None:
        self.cluster = cluster
        self.settings = settings
        self.clock = clock or SystemClock()
        self._now_s = time.time if clock is None else lambda: clock.now_us() / 1e6
        self.durability = durability_value(settings.durability)
        """What each request asks for."""
        self._buffer_bytes_max = int(settings.buffer_bytes_max)
        self._chunk_bytes_max = int(settings.chunk_bytes_max)
        self._request_bytes_max = int(settings.request_bytes_max)
        self._delivery_timeout_s = settings.delivery_timeout_ms / 1000
        self._linger_s = settings.linger_ms / 1000
        self.loop = asyncio.get_running_loop()
        self._writers: dict[str, StreamWriter] = {}
        self.filling: dict[str, Accumulator] = {}
        """By stream: the open chunk that takes its next record, if that is a value and nothing else."""
        self.routes = Routes(self)
        self._identity: ProducerIdentity | None = None
        self._preparing = asyncio.Lock()
        self._buffered_bytes = 0
        self._room = asyncio.Event()
        self._room_wanted_bytes = 0
        """What the last `send` asked for that found the buffer full."""
        self._first_error: KeraError | None = None
        """Since the last `flush`."""
        self.failure: KeraError | None = None
        """Why it takes nothing more, though nobody has closed it."""
        self._unfinished: set[PendingChunk] = set()
        self._queued_bytes = 0
        """Queued since the event loop last had a chance to send, and what the chunks cost besides."""
        self.closed = False
        self.ended = False
        """It takes nothing more: it is closed, or has failed."""
        self._guard = Guard(self)

    def __del__(self) -> None:
        guard = getattr(self, "_guard", None)
        if guard is not None and not self.closed:
            guard.dropped(self.loss())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close(flush=kind is None)

    # -- what users call ---------------------------------------------------------------------------------------

    async def prepare(self, stream: str) -> StreamDescription:
        """Look up a stream, so that `send` knows it. Raises `UnknownStream`.

        Of a stream that turned out to be deleted, the one that has its name now is looked up.
        """
        return (await self._writer(stream)).stream

    def send(
        self,
        stream: str,
        value: bytes | None,
        *,
        keys: bytes | Sequence[bytes] = (),
        timestamp_us: int | None = None,
        headers: Mapping[str, bytes] | None = None,
        streamlet: int | None = None,
    ) -> Pending:
        """Accept one record now; await the result for its `Delivery`.

        The first key decides the streamlet (records of one key stay in order); without keys, chunks are spread evenly.
        `timestamp_us` is microseconds since the Unix epoch, now by default. The stream must have been prepared
        (`prepare`, or any `send_batch`).

        Raises `BufferFull` when ``buffer_bytes_max`` is reached (``await drain()`` in a loop of sends),
        `InvalidArgument` for what is not bytes, `RecordTooLarge`, `StreamletOutOfRange`, `SchemaMismatch` for a stream
        with a schema of its own, `ClosedError`, `ProducerFenced`. Then the record was not accepted, and the others are
        as they were.
        """
        plain = keys is _NO_KEYS and timestamp_us is None and headers is None and streamlet is None
        if plain and value.__class__ is bytes and stream in self.filling:
            # All that is done for most records, in one place: each call would add a tenth to what a record costs.
            accumulator = self.filling[stream]
            size = RECORD_OVERHEAD_BYTES + len(value)
            chunk_bytes = accumulator.size + size
            buffered_bytes = self._buffered_bytes + size
            if chunk_bytes < self._chunk_bytes_max and buffered_bytes <= self._buffer_bytes_max:
                accumulator.size = chunk_bytes
                self._buffered_bytes = buffered_bytes
                values = accumulator.values
                pending = Pending()
                pending._accumulator = accumulator  # noqa: SLF001 - it has no __init__
                pending._index = len(values)  # noqa: SLF001
                values.append(value)
                accumulator.times_s.append(self._now_s())
                return pending
        return self._send(stream, value, keys, timestamp_us, headers, streamlet, plain=plain)

    def _send(
        self,
        stream: str,
        value: bytes | None,
        keys: bytes | Sequence[bytes],
        timestamp_us: int | None,
        headers: Mapping[str, bytes] | None,
        streamlet: int | None,
        *,
        plain: bool,
    ) -> Pending:
        writer = self._writers.get(stream)
        if writer is None or self.ended:
            raise self._not_ready(stream)
        size = RECORD_OVERHEAD_BYTES + (0 if value is None else _bytes_of("value", value))
        # What is accepted is kept for a while: keys and headers must not change meanwhile.
        accepted_keys: Sequence[bytes] | None = None
        if not plain:
            timestamp_us = None if timestamp_us is None else _checked_time(timestamp_us)
            if keys is not _NO_KEYS:
                accepted_keys = (keys,) if isinstance(keys, bytes) else _listed_keys(keys)
                size += sum([_bytes_of("key", key) + 8 for key in accepted_keys])
            if headers:
                headers = _own_headers(headers)
                size += sum(_header_bytes(name, content) for name, content in headers.items())
        if streamlet is None:
            streamlet = (
                streamlet_of(accepted_keys[0], writer.streamlet_count) if accepted_keys else writer.sticky_streamlet
            )
        elif streamlet.__class__ is not int:
            streamlet = writer.checked_streamlet(streamlet)
        if self._is_full(size):
            self._room_wanted_bytes = size
            raise BufferFull(
                f"{self._buffer_bytes_max} bytes wait to be acknowledged; await drain() before sending more",
                limit=self._buffer_bytes_max,
            )
        accumulator = writer.open_chunks.get(streamlet)
        if accumulator is None or size > self._chunk_bytes_max:
            accumulator = writer.open_chunk(streamlet, size)
        pending = accumulator.append(value, self._now_s(), size)
        if not plain:
            accumulator.describe_last(accepted_keys or None, timestamp_us, headers or None)
            self.filling.pop(stream, None)
        self._buffered_bytes += size
        if accumulator.size >= self._chunk_bytes_max:
            self.close_chunk(writer, accumulator)
        elif plain and accumulator.keys is None and accumulator.headers is None:
            self.filling[stream] = accumulator
        return pending

    async def drain(self) -> None:
        """Wait until there is room in the buffer; costs next to nothing when there is.

        Room is half of the buffer, or what the last `send` lacked. Also lets the event loop run when chunks have been
        filled since the last call, so that they are sent.
        """
        wanted = max(self._room_wanted_bytes, self._buffer_bytes_max // 2)
        self._room_wanted_bytes = 0
        if self._is_full(wanted):
            await self._wait_for_room(wanted)
        elif self._queued_bytes:
            await self._let_loop_run()

    async def send_batch(self, stream: str, batch: Columns, *, streamlet: int | None = None) -> BatchDelivery:
        """Accept all rows of `batch`, waiting for room in the buffer; await the result for the deliveries.

        `batch` is a RecordBatch, Table or RecordBatchReader of pyarrow (which is read to its end), a DataFrame of
        pandas or polars, or anything else with Arrow's PyCapsule interface. The columns are those of the stream's
        schema, in any form that has the same values (`kera.client.arrow_input`); ones that may be null, and the default
        schema's timestamp, can be left out. Rows are partitioned by the stream's key column (default schema: the first
        of ``keys``), in order. Raises `SchemaMismatch`, `RecordTooLarge`, `StreamletOutOfRange`, `UnknownStream`,
        `InvalidArgument`; then no row was accepted.
        """
        writer = await self._writer(stream)
        if self.ended:
            raise self._not_ready(stream)
        streamlet = None if streamlet is None else writer.checked_streamlet(streamlet)
        outcomes: list[Outcome] = []
        described, parts = await self._conforming(writer, batch, streamlet)
        for part, chunk_bytes in parts:
            now_us = self.clock.now_us()
            for place, rows in writer.partition(part, streamlet):
                writer.close_open_chunk(place)  # records that were sent before stay before
                size = chunk_bytes if rows is part else None
                for payload in payloads(rows, described, self._chunk_bytes_max, now_us, size):
                    payload_bytes = payload.payload.size
                    if self._is_full(payload_bytes):
                        await self._wait_for_room(payload_bytes)
                        writer.close_open_chunk(place)
                    if self.ended:  # while we waited, or while the loop ran
                        raise self._not_ready(stream)
                    self._buffered_bytes += payload_bytes
                    outcomes.append(outcome := Outcome())
                    self._enqueue(writer, place, payload, now_us, outcome, self.loop.time())
                    if self._queued_bytes >= self._request_bytes_max:
                        # Without it nothing is sent before the buffer is full: what has room does not wait.
                        await self._let_loop_run()
        return BatchDelivery(outcomes)

    async def _conforming(
        self, writer: StreamWriter, batch: pa.RecordBatch | pa.Table, streamlet: int | None
    ) -> tuple[StreamDescription, list[tuple[pa.RecordBatch, int]]]:
        """The parts of a batch (`_checked_parts`), and the stream as it was described when they were made."""
        try:
            return writer.stream, self._checked_parts(writer, batch, streamlet)
        except SchemaMismatch:
            known = writer.stream
            if not known.typed:
                raise
            self.cluster.forget(known.name)  # columns may have been added since it was looked up
            await self.routes.refresh(writer)
            if writer.deleted is not None or writer.stream.schema_id == known.schema_id:
                raise
        return writer.stream, self._checked_parts(writer, batch, streamlet)

    def _checked_parts(
        self, writer: StreamWriter, batch: Columns, streamlet: int | None
    ) -> list[tuple[pa.RecordBatch, int]]:
        """The parts of a batch, with the length of the chunk that each would be.

        All that can be wrong with a batch is found here, before any of its rows is accepted.
        """
        now_us, stream = self.clock.now_us(), writer.stream
        parts = record_batches(batch)
        if streamlet is not None:
            writer.checked_streamlet(streamlet)
        conforming = [conform(part, stream, now_us) for part in parts if part.num_rows]
        return [(part, check_rows(part, stream)) for part in conforming]

    async def _let_loop_run(self) -> None:
        self._queued_bytes = 0
        await asyncio.sleep(0)

    async def flush(self) -> None:
        """Wait until everything accepted so far is delivered or failed.

        Raises the first error since the last `flush`; of a producer that has failed as a whole, why it has.
        """
        self._close_open_chunks()
        for chunk in list(self._unfinished):
            await chunk.delivered.settled()
        error, self._first_error = self._first_error, None
        error = error or self.failure
        if error is not None:
            raise error

    async def close(self, *, flush: bool = True) -> None:
        """Deliver what was accepted, and take no more.

        Without `flush`, records that were not sent fail with `ClosedError`, those that were sent and not acknowledged
        with `Uncertain`.
        """
        if self.closed:
            return
        try:
            if flush:
                await self.flush()
        finally:
            loss = self.loss()
            if loss is not None:
                log.warning("producer closed before all was delivered", **loss.attributes)
            self.closed = self.ended = True
            self.routes.stop()
            for chunk in list(self._unfinished):
                self.finish(chunk, _given_up(chunk))
            for writer in self._writers.values():
                writer.abandon(ClosedError("the producer was closed before the record was sent"))
            await self._guard.disarm()

    def loss(self) -> Loss | None:
        """What was accepted and is not delivered, as those are told who drop a producer without `close`."""
        records: Counter[str] = Counter()
        for chunk in self._unfinished:
            records[chunk.lane.identity.stream] += chunk.payload.record_count
        for name, writer in self._writers.items():
            records[name] += sum(len(accumulator.values) for accumulator in writer.open_chunks.values())
        names = sorted(+records)
        if not names:
            return None
        count = records.total()
        streams = f"stream{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"
        return Loss(
            "producer was not closed; records are lost",
            {"records": count, "streams": names},
            f"a producer was dropped with {count} records of {streams} undelivered;"
            " close it, or use it as an async context manager",
        )

    # -- streams -----------------------------------------------------------------------------------------------

    def _not_ready(self, stream: str) -> KeraError:
        if self.closed:
            return ClosedError("the producer is closed")
        if self.failure is not None:
            return self.failure
        return UnknownStream(f"stream {stream!r} is not prepared; await producer.prepare({stream!r})", stream=stream)

    async def _writer(self, name: str) -> StreamWriter:
        arguments.text("stream", name, "the name of a stream")
        writer = self._writers.get(name)
        if writer is not None and writer.deleted is None:
            return writer
        if self.failure is not None:
            raise self.failure
        async with self._preparing:
            writer = self._writers.get(name)
            if writer is None or writer.deleted is not None:
                stream = await self.cluster.stream(name)
                if self._identity is None:
                    self._identity = await self._init()
                if writer is not None:
                    writer.close_open_chunks()  # they fail like those before them
                writer = self._writers[name] = StreamWriter(self, stream, self._identity)
            return writer

    async def _init(self) -> ProducerIdentity:
        request = coordinator_pb2.InitProducerRequest(name=self.settings.name)
        answer = await self.cluster.ask(api.INIT_PRODUCER, request)
        last_epoch = answer.producer_epoch + PRODUCER_EPOCHS - 1 if self.settings.name else LAST_EPOCH
        return ProducerIdentity(answer.producer_id, answer.producer_epoch, last_epoch)

    # -- chunks ------------------------------------------------------------------------------------------------

    def close_chunk(self, writer: StreamWriter, accumulator: Accumulator) -> None:
        """Encode the records of `accumulator` and queue them."""
        writer.forget(accumulator)
        self._buffered_bytes -= accumulator.size
        # An accumulator is about a chunk's size, but a single record may be as large as a segment.
        chunk_bytes_max = max(accumulator.size * 2, self._chunk_bytes_max)
        try:
            times_us = timestamps(accumulator.times_s, accumulator.timestamps_us)
            made = list(
                record_payloads(
                    accumulator.values, times_us, accumulator.keys, accumulator.headers, writer.stream, chunk_bytes_max
                )
            )
        except (KeraError, pa.ArrowException, ValueError, TypeError) as error:
            self._cannot_encode(accumulator, error)
            return
        outcomes = [accumulator.delivered] + [Outcome() for _ in made[1:]]
        accumulator.split([payload.record_count for payload in made], outcomes)
        streamlet, created_us, opened_s = accumulator.streamlet, accumulator.created_us, accumulator.opened_s
        for payload, outcome in zip(made, outcomes, strict=True):
            self._buffered_bytes += payload.payload.size
            self._enqueue(writer, streamlet, payload, created_us, outcome, opened_s)

    def _cannot_encode(self, accumulator: Accumulator, error: Exception) -> None:
        """`send` checks what it takes, so this is rare. We may have been called by a timer: nobody could catch it."""
        if not isinstance(error, KeraError):
            error = InvalidArgument(
                f"records cannot be encoded: {error}", stream=accumulator.stream, streamlet_id=accumulator.streamlet
            )
        self._first_error = self._first_error or error
        accumulator.fail(error)
        self._room.set()

    def _enqueue(
        self,
        writer: StreamWriter,
        streamlet: int,
        payload: Payload,
        created_us: int,
        outcome: Outcome,
        accepted_s: float,
    ) -> None:
        lane = writer.lanes[streamlet]
        chunk = PendingChunk(lane, payload, created_us, accepted_s + self._delivery_timeout_s, outcome)
        lane.add(chunk)
        self._unfinished.add(chunk)
        self._queued_bytes += payload.payload.size + _CHUNK_COST_BYTES
        self.routes.ready(lane)

    def _is_full(self, wanted_bytes: int) -> bool:
        """Whether there is no room for so much. What is larger than the buffer goes when the buffer is empty."""
        return bool(self._buffered_bytes) and self._buffered_bytes + wanted_bytes > self._buffer_bytes_max

    async def _wait_for_room(self, wanted_bytes: int) -> None:
        while self._is_full(wanted_bytes) and not self.ended:
            self._close_open_chunks()  # room comes from what is sent: nothing lingers now
            self._room.clear()
            await self._room.wait()

    def _close_open_chunks(self) -> None:
        for writer in self._writers.values():
            writer.close_open_chunks()

    def finish(self, chunk: PendingChunk, outcome: Stored | KeraError) -> None:
        """`chunk` is delivered, or has failed for good."""
        if chunk not in self._unfinished:
            return  # the producer was closed before the answer came
        self._unfinished.remove(chunk)
        self._buffered_bytes -= chunk.payload.payload.size
        self._room.set()
        if isinstance(outcome, KeraError):
            self._first_error = self._first_error or outcome
        chunk.delivered.settle(outcome)

    def shut_out(self, error: ProducerFenced) -> ProducerFenced:
        """What a broker's refusal means: a later instance has written, and nothing more can be sent."""
        name = self.settings.name
        whose = f"a newer producer with the name {name!r}" if name else "a newer instance of this producer"
        return ProducerFenced(f"{whose} has taken over ({error.message}); this one takes no more", **error.attributes)

    def used_up(self, lane: Lane) -> None:
        """A lane has no epoch left: its chunks could not be told from those of a later instance of the name."""
        identity = lane.identity
        text = (
            f"the producer has failed so often in streamlet {identity.streamlet_id} of stream {identity.stream!r} that"
            f" its {PRODUCER_EPOCHS} epochs are used up; make a new one with the same name"
        )
        self.fail(ClosedError(text, stream=identity.stream, streamlet_id=identity.streamlet_id))

    def fail(self, error: KeraError) -> None:
        """Give up all that is not in flight, and take nothing more."""
        if self.failure is not None:
            return
        self.failure, self.ended = error, True
        log.warning("producer has failed", error=error.message)
        for writer in self._writers.values():
            writer.abandon(error)
            self.routes.fail(writer, error)
        self._first_error = self._first_error or error
        self._room.set()

    # -- used by senders ---------------------------------------------------------------------------------------

    def close_due_chunks(self, sender: Sender) -> bool:
        """Close the open chunks of a sender's lanes that have lingered long enough; whether there were any."""
        due_s = self.loop.time() - self._linger_s
        closed = False
        for writer in self._writers.values():
            for accumulator in list(writer.open_chunks.values()):
                served = writer.lanes[accumulator.streamlet].route.sender is sender
                if self._linger_s and accumulator.opened_s > due_s:
                    break  # those behind it were opened later
                if served:
                    self.close_chunk(writer, accumulator)
                    closed = True
        return closed


def _listed_keys(keys: Any) -> Sequence[bytes]:
    if isinstance(keys, str | bytearray | memoryview | Mapping) or not isinstance(keys, Iterable):
        raise arguments.wrong("keys", keys, "bytes, or a list of bytes; encode them first")
    return tuple(keys)


def _own_headers(headers: Any) -> dict[str, bytes]:
    """A copy: what is accepted is kept for a while, and must not change meanwhile. Raises `InvalidArgument`."""
    try:
        return dict(headers)
    except (TypeError, ValueError):
        raise arguments.wrong("headers", headers, "a mapping of names to bytes") from None


def _bytes_of(what: str, value: bytes) -> int:
    """Length of what has to be bytes. Raises `InvalidArgument`."""
    if not isinstance(value, bytes):
        raise InvalidArgument(f"{what} is {type(value).__name__}, not bytes; encode it first")
    return len(value)


def _header_bytes(name: str, content: bytes) -> int:
    """Bytes of a header, estimated from above. Raises `InvalidArgument`."""
    try:
        return len(name.encode()) + _bytes_of(f"header {name!r}", content) + 16
    except (AttributeError, UnicodeEncodeError):
        raise InvalidArgument(f"a header's name is text, not {name!r}") from None


def _checked_time(timestamp_us: int) -> int:
    unit = " (whole microseconds since the Unix epoch)"
    return arguments.whole("timestamp_us", timestamp_us, -_TIMESTAMP_US_MAX, _TIMESTAMP_US_MAX, what=unit)


def _given_up(chunk: PendingChunk) -> KeraError:
    if chunk.in_flight or chunk.uncertain:
        return Uncertain("the producer was closed before the chunk was acknowledged", stream=chunk.lane.identity.stream)
    return ClosedError("the producer was closed before the chunk was sent", stream=chunk.lane.identity.stream)
