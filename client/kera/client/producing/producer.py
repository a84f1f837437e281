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
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self

import pyarrow as pa

from kera.client import arguments
from kera.client.arrow_input import Columns, record_batches
from kera.client.cluster.cluster import Cluster
from kera.client.headers import Header, HeadersLike, pairs_of
from kera.client.producing.accumulator import Accumulator, Pending
from kera.client.producing.buffer import Buffer
from kera.client.producing.delays import Delays
from kera.client.producing.encoding import Payload
from kera.client.producing.lane import LAST_EPOCH
from kera.client.producing.limits import LIMITS, ProducerLimits
from kera.client.producing.outcome import BatchDelivery, BundleOutcome, Outcome
from kera.client.producing.partition_payloads import Payloads, partition_payloads
from kera.client.producing.partitioner import streamlet_of_keys
from kera.client.producing.punctuating import Punctuates
from kera.client.producing.record_arguments import (
    RECORD_OVERHEAD_BYTES,
    bytes_of,
    checked_time,
    headers_bytes,
    listed_keys,
)
from kera.client.producing.routes import Routes
from kera.client.producing.rows import SendsRows
from kera.client.producing.serializing import NO_KEYS as _NO_KEYS
from kera.client.producing.serializing import Serialization
from kera.client.producing.stream_lanes import ProducerIdentity
from kera.client.producing.stream_writer import StreamWriter, close_due_chunks
from kera.client.producing.traced import ProducerTraces
from kera.client.settings import ProducerSettings
from kera.client.types import StreamDescription
from kera.client.unclosed import Guard, Loss, ends_in_order
from kera.core.base.clock import Clock, SystemClock
from kera.core.base.freed_memory import keep_freed_memory
from kera.core.base.telemetry import get_logger
from kera.core.errors import BufferFull, ClosedError, KeraError, SchemaMismatch, Unavailable, UnknownStream
from kera.core.native import native
from kera.core.rpc import api
from kera.core.tracing import OFF, Tracing
from kera.v1 import coordinator_pb2

log = get_logger("kera.producer")


class Producer(SendsRows, Punctuates, Delays):
    """Writes records and batches to streams. Made by `Client.producer`; use it as an async context manager.

    Deliveries that nobody awaits are not lost from sight: `flush`, and leaving the context, raise the first error
    since the last `flush`.

    One that nobody closes delivers what it has when its loop ends, or the interpreter; see `kera.client.unclosed`.

    With a name (the setting ``name``) it is the successor of all producers that had this name before. Once `prepare`
    (or the first `send_batch`) has returned, no broker that lives takes anything of them, in any streamlet; one that
    tries is told (`ProducerFenced`), and fails as a whole.
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: ProducerSettings,
        clock: Clock | None = None,
        *,
        limits: ProducerLimits = LIMITS,
        serialization: Serialization | None = None,
        tracing: Tracing = OFF,
    ) -> None:
        keep_freed_memory()
        self._cluster = cluster
        self.settings = settings
        self._clock = clock or SystemClock()
        self._now_s = time.time if clock is None else lambda: clock.now_us() / 1e6
        self._chunk_bytes_max = int(settings.chunk_bytes_max)
        self._lean = settings.lean
        self._request_bytes_max = int(settings.request_bytes_max)
        self._bundle_bytes_max = min(
            self._request_bytes_max, cluster.settings.message_bytes_max, int(settings.buffer_bytes_max) // 4
        )
        self._loop = asyncio.get_running_loop()
        self._writers: dict[str, StreamWriter] = {}
        self._filling: dict[str, Accumulator] = {}
        """By stream: the open chunk that takes its next record, if that is a value and nothing else."""
        self._buffer = Buffer(int(settings.buffer_bytes_max))
        self._limits = limits
        traces = ProducerTraces(tracing) if tracing.is_on else None
        close_due = partial(close_due_chunks, self._writers)
        self.routes = Routes(
            cluster, settings, self._buffer, close_due_chunks=close_due, fail=self._fail, limits=limits, traces=traces
        )
        self._identity: ProducerIdentity | None = None
        self._preparing = asyncio.Lock()
        self._room_wanted_bytes = 0
        """The size that the last `send` asked for when the buffer was full."""
        self._closed = False
        self._guard = Guard(self)
        self._open_chunks: dict[str, tuple[int, dict[int, Accumulator]]] = {}
        """By stream: how many streamlets it has, and the open chunks of its writer."""
        if native is not None and clock is None:
            self.__dict__["send"] = native.sender(
                self.send,
                Pending,
                self._filling,
                self._open_chunks,
                self._buffer,
                self._chunk_bytes_max,
                settings.partitioner,
            )
        if traces is not None:
            self.__dict__["send"] = traces.sending(self.send)
            self.__dict__["send_batch"] = traces.sending_batches(self.send_batch, self._described)
        self.serialization = serialization
        """Serializers of values and keys; None: they are bytes, and `send` is used unwrapped."""
        self._send_bytes: Callable[..., Pending] | None = None
        if serialization is not None:  # behind the traces: who serializes elsewhere sends bytes, and is traced as well
            self._send_bytes = self.send
            self.__dict__["send"] = serialization.sending(self.send)

    def __del__(self) -> None:
        guard = getattr(self, "_guard", None)
        if guard is not None and not self._closed:
            guard.dropped(self.loss())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close(flush=ends_in_order(kind))

    # -- what users call ---------------------------------------------------------------------------------------

    async def prepare(self, stream: str) -> StreamDescription:
        """Look up a stream, so that `send` knows it. Raises `UnknownStream`.

        Of a stream that turned out to be deleted, the one that has its name now is looked up. Serializers get the ids
        of their schemas: raises `IncompatibleSchema`, `InvalidSchema`, `UnknownSchema` (``register_schemas``), and what
        else `SchemaRegistry.register` does.
        """
        described = (await self._writer(stream)).stream
        if self.serialization is not None:
            await self.serialization.prepare(described)
        return described

    def send(
        self,
        stream: str,
        value: Any,
        *,
        keys: Any = (),
        timestamp_us: int | None = None,
        headers: HeadersLike | None = None,
        streamlet: int | None = None,
    ) -> Pending:
        """Accept one record now; await the result for its `Delivery`.

        The value is bytes or None, and `keys` are bytes or a list of them; with a serializer, they are what that takes,
        None is no value, and only a list is several keys. `headers` are a mapping of names to bytes or None, or pairs,
        whose names may repeat.

        The first key decides the streamlet, as the setting ``partitioner`` says (records of one key stay in order);
        without keys, chunks are spread evenly.
        `timestamp_us` is microseconds since the Unix epoch, now by default. The stream must have been prepared
        (`prepare`, or any `send_batch`).

        Raises `BufferFull` when ``buffer_bytes_max`` is reached (``await drain()`` in a loop of sends),
        `InvalidArgument` for what is not bytes, `CannotEncode` for what a serializer does not take, `RecordTooLarge`,
        `StreamletOutOfRange`, `SchemaMismatch` for a stream with a schema of its own, `ClosedError`, `ProducerFenced`.
        Then the record was not accepted, and the others are as they were.
        """
        plain = keys is _NO_KEYS and timestamp_us is None and headers is None and streamlet is None
        if plain and value.__class__ is bytes and stream in self._filling:
            # All that is done for most records, in one place: each call would add a tenth to what a record costs.
            accumulator = self._filling[stream]
            buffer = self._buffer
            size = RECORD_OVERHEAD_BYTES + len(value)
            chunk_bytes = accumulator.size + size
            left_bytes = buffer.left_bytes - size
            if (
                left_bytes >= 0
                and chunk_bytes < self._chunk_bytes_max
                and (time_s := self._now_s()) < accumulator.epoch_end_s
            ):
                accumulator.size = chunk_bytes
                buffer.left_bytes = left_bytes
                values = accumulator.values
                pending = Pending()
                pending._accumulator = accumulator  # noqa: SLF001 - it has no __init__
                pending._index = len(values)  # noqa: SLF001
                values.append(value)
                accumulator.times_s.append(time_s)
                return pending
        return self._send(stream, value, keys, timestamp_us, headers, streamlet, plain=plain)

    def _send(
        self,
        stream: str,
        value: bytes | None,
        keys: bytes | Sequence[bytes],
        timestamp_us: int | None,
        headers: HeadersLike | None,
        streamlet: int | None,
        *,
        plain: bool,
    ) -> Pending:
        writer = self._writers.get(stream)
        if writer is None or self._buffer.ended:
            raise self._not_ready(stream)
        size = RECORD_OVERHEAD_BYTES + (0 if value is None else bytes_of("value", value))
        accepted_keys: Sequence[bytes] = ()  # copies, as is accepted_headers: what is accepted must not change
        accepted_headers: Sequence[Header] = ()
        if not plain:
            timestamp_us = None if timestamp_us is None else checked_time(timestamp_us)
            if keys is not _NO_KEYS:
                accepted_keys = (keys,) if isinstance(keys, bytes) else listed_keys(keys)
                size += sum([bytes_of("key", key) + 8 for key in accepted_keys])
            if headers is not None:
                accepted_headers = pairs_of(headers)
                size += headers_bytes(accepted_headers)
        spread = False
        if streamlet is None:
            decided = streamlet_of_keys(accepted_keys, writer.streamlet_count, writer.partitioner)
            spread = decided is None
            streamlet = writer.sticky_streamlet if decided is None else decided
        elif streamlet.__class__ is not int:
            streamlet = writer.checked_streamlet(streamlet)
        if self._buffer.is_full(size):
            self._room_wanted_bytes, limit = size, self._buffer.bytes_max
            raise BufferFull(f"{limit} bytes wait to be acknowledged; await drain() before sending more", limit=limit)
        time_s = self._now_s()
        accumulator = writer.open_chunks.get(streamlet)
        if (
            accumulator is None
            or size > self._chunk_bytes_max
            or (time_s >= accumulator.epoch_end_s if timestamp_us is None else timestamp_us >= accumulator.epoch_end_us)
        ):
            time_us = round(time_s * 1e6) if timestamp_us is None else timestamp_us
            accumulator = writer.open_chunk(streamlet, size, time_us, spread=spread)
        pending = accumulator.append(value, time_s, size)
        if not plain:
            accumulator.describe_last(accepted_keys or None, timestamp_us, accepted_headers or None)
            self._filling.pop(stream, None)
        self._buffer.take(size)
        if accumulator.size >= self._chunk_bytes_max:
            writer.close_chunk(accumulator)
        elif plain and accumulator.keys is None and accumulator.headers is None:
            self._filling[stream] = accumulator
        return pending

    @property
    def send_bytes(self) -> Callable[..., Pending]:
        """`send`, of what is serialized already."""
        return self._send_bytes or self.send

    async def drain(self) -> None:
        """Wait until there is room in the buffer; costs next to nothing when there is.

        Room is half of the buffer, or what the last `send` lacked. Also lets the event loop run when chunks have been
        filled since the last call, so that they are sent.
        """
        buffer = self._buffer
        wanted = max(self._room_wanted_bytes, buffer.bytes_max // 2)
        self._room_wanted_bytes = 0
        if buffer.is_full(wanted):
            await buffer.wait_for_room(wanted, self._close_open_chunks)
        elif buffer.queued_bytes:
            await buffer.let_loop_run()

    async def send_batch(self, stream: str, batch: Columns, *, streamlet: int | None = None) -> BatchDelivery:
        """Accept all rows of `batch`, waiting for room in the buffer; await the result for the deliveries.

        `batch` is a RecordBatch, Table or RecordBatchReader of pyarrow (which is read to its end), a DataFrame of
        pandas or polars, or anything else with Arrow's PyCapsule interface. The columns are those of the stream's
        schema, in any form that has the same values (`kera.client.arrow_input`); ones that may be null, and the default
        schema's timestamp, can be left out. Rows are partitioned by the stream's key column (default schema: the first
        of ``keys``), in order. Raises `SchemaMismatch`, `RecordTooLarge`, `StreamletOutOfRange`, `UnknownStream`,
        `InvalidArgument`; then no row was accepted.
        """
        writer, buffer = await self._writer(stream), self._buffer
        if buffer.ended:
            raise self._not_ready(stream)
        streamlet = None if streamlet is None else writer.checked_streamlet(streamlet)
        given = [batch] if isinstance(batch, pa.RecordBatch) else record_batches(batch)
        if len(given) == 1:
            gathered = writer.gather(given[0], streamlet, self._clock.now_us())
            if gathered is not None:
                if buffer.queued_bytes >= self._request_bytes_max:
                    await buffer.let_loop_run()
                return gathered
            now_us = self._clock.now_us()
            chunk = writer.whole_chunk(given[0], streamlet, now_us)
            if chunk is not None:
                return BatchDelivery([await self._accept(writer, *chunk, now_us)])
        outcomes: list[Outcome | BundleOutcome] = []
        described, parts = await self._conforming(writer, given)
        writer.close_gatherings()
        for part, chunk_bytes in parts:
            now_us = self._clock.now_us()
            partition = writer.partition(part, chunk_bytes, streamlet)
            for made in partition_payloads(
                partition, described, self._chunk_bytes_max, now_us, chunk_bytes, lean=self._lean
            ):
                if isinstance(made, Payloads):
                    for payloads in made.cut(self._bundle_bytes_max, self._limits.request_chunks_max):
                        await self._room_for(int(payloads.payload_bytes.sum()), stream)
                        outcomes += writer.enqueue_together(payloads, now_us, self._loop.time())
                        await self._let_send()
                    continue
                place, of_place = made
                for payload in of_place:
                    outcomes.append(await self._accept(writer, place, payload, now_us))
        return BatchDelivery(outcomes)

    async def _accept(self, writer: StreamWriter, streamlet: int, payload: Payload, now_us: int) -> Outcome:
        """Have a chunk of a batch sent, when there is room for it."""
        outcome = Outcome()
        await self._room_for(len(payload.payload), writer.stream.name)
        writer.close_open_chunk(streamlet)  # records that were sent before stay before
        writer.enqueue(streamlet, payload, now_us, outcome, self._loop.time())
        await self._let_send()
        return outcome

    async def _room_for(self, payload_bytes: int, stream: str) -> None:
        """Until so much of a batch may be queued."""
        if self._buffer.is_full(payload_bytes):
            await self._buffer.wait_for_room(payload_bytes, self._close_open_chunks)
        if self._buffer.ended:  # while we waited, or while the loop ran
            raise self._not_ready(stream)

    async def _let_send(self) -> None:
        """Without it nothing of a batch is sent before the buffer is full: what has room does not wait."""
        if self._buffer.queued_bytes >= self._request_bytes_max:
            await self._buffer.let_loop_run()

    async def _conforming(
        self, writer: StreamWriter, batch: Sequence[pa.RecordBatch]
    ) -> tuple[StreamDescription, list[tuple[pa.RecordBatch, int]]]:
        """The parts of a batch, and the stream as it was described when they were made."""
        known = writer.stream
        try:
            return known, writer.checked_parts(batch, self._clock.now_us())
        except SchemaMismatch:
            if not known.typed:
                raise
            self._cluster.forget(known.name)  # columns may have been added since it was looked up
            await self.routes.refresh(writer.lanes)
            if writer.deleted is not None or writer.stream.schema_id == known.schema_id:
                raise
        return writer.stream, writer.checked_parts(batch, self._clock.now_us())

    async def flush(self) -> None:
        """Wait until everything accepted so far is delivered or failed.

        Raises the first error since the last `flush`; of a producer that has failed as a whole, why it has.
        """
        self._close_open_chunks()
        await self._buffer.flush()

    async def close(self, *, flush: bool = True) -> None:
        """Deliver what was accepted, and take no more.

        Without `flush`, records that were not sent fail with `ClosedError`, those that were sent and not acknowledged
        with `Uncertain`.
        """
        if self._closed or self._buffer.is_inherited:
            return
        try:
            if flush:
                await self.flush()
        finally:
            loss = self.loss()
            if loss is not None:
                log.warning("producer closed before all was delivered", **loss.attributes)
            self._closed = True
            self.routes.stop()
            self._buffer.close()
            for writer in self._writers.values():
                writer.abandon(ClosedError("the producer was closed before the record was sent"))
            await self._guard.disarm()

    def loss(self) -> Loss | None:
        """The records that are lost if the producer is dropped now: accepted, and not delivered."""
        records = self._buffer.record_counts()
        for name, writer in self._writers.items():
            records[name] += writer.open_records()
        return _loss_of(records)

    # -- streams -----------------------------------------------------------------------------------------------

    def _not_ready(self, stream: str) -> KeraError:
        if self._closed:
            return ClosedError("the producer is closed")
        if self._buffer.failure is not None:
            return self._buffer.failure
        return UnknownStream(f"stream {stream!r} is not prepared; await producer.prepare({stream!r})", stream=stream)

    async def _described(self, name: str) -> StreamDescription:
        return (await self._writer(name)).stream

    async def _look_again(self, name: str) -> None:
        if (writer := self._writers.get(name)) is not None:
            with suppress(Unavailable):
                await self.routes.refresh(writer.lanes)

    async def _writer(self, name: str) -> StreamWriter:
        arguments.text("stream", name, "the name of a stream")
        writer = self._writers.get(name)
        if writer is not None and writer.deleted is None and not self._buffer.is_inherited:
            return writer
        if self._buffer.failure is not None:
            raise self._buffer.failure
        async with self._preparing:
            writer = self._writers.get(name)
            if writer is None or writer.deleted is not None:
                stream = await self._cluster.stream(name)
                if self._identity is None:
                    self._identity = await self._init()
                if writer is not None:
                    writer.close_open_chunks()  # they fail like those before them
                writer = self._writers[name] = StreamWriter(
                    stream, self._identity, self.settings, self._buffer, self.routes, self._filling
                )
                self._open_chunks[name] = writer.streamlet_count, writer.open_chunks
            return writer

    async def _init(self) -> ProducerIdentity:
        request = coordinator_pb2.InitProducerRequest(name=self.settings.name)
        answer = await self._cluster.ask(api.INIT_PRODUCER, request)
        last_epoch = answer.producer_epoch + self._limits.epochs - 1 if self.settings.name else LAST_EPOCH
        return ProducerIdentity(answer.producer_id, answer.producer_epoch, last_epoch)

    # -- chunks ------------------------------------------------------------------------------------------------

    def _close_open_chunks(self) -> None:
        for writer in self._writers.values():
            writer.close_open_chunks()

    def _fail(self, error: KeraError) -> None:
        """Give up all that is not in flight, and take nothing more."""
        if self._buffer.failure is not None:
            return
        self._buffer.fail(error)
        log.warning("producer has failed", error=error.message)
        for writer in self._writers.values():
            writer.abandon(error)
            self.routes.abandon(writer.lanes, error)


def _loss_of(records: Counter[str]) -> Loss | None:
    """So many records of streams, by their names; None: of none there are any."""
    names, count = sorted(+records), records.total()
    if not names:
        return None
    streams = f"stream{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"
    return Loss(
        "producer was not closed; records are lost",
        {"records": count, "streams": names},
        f"a producer was dropped with {count} records of {streams} undelivered;"
        " close it, or use it as an async context manager",
    )
