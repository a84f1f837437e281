"""The producer: records → chunks → requests (thesis 7.1.2), idempotent, in order, within a bounded buffer.

Follow a record: `send` appends it to the open chunk of its streamlet (`accumulator.Accumulator`); the chunk closes when
it is full or due, is encoded and queued in its `lane.Lane`; the `Sender` of the streamlet's broker (`routes.Routes`
knows which) gathers queued chunks of all lanes into requests, several in flight; each chunk's answer resolves the
deliveries of its records.

Everything runs on the event loop, and nothing is done per record beyond appending to lists. A `Producer` puts the parts
together: `Records` and `Batches` accept records, `StreamWriters` keep open chunks, `Routes` and their senders send
closed ones, and `Buffer` keeps all that is not delivered. `_send_path` chooses which function `send` is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

import pyarrow as pa

from kera.client import arguments
from kera.client.arrow_input import Columns
from kera.client.cluster.cluster import Cluster
from kera.client.headers import HeadersLike
from kera.client.producing.latency.hooks import ProducerLatency
from kera.client.producing.open_chunks.accumulator import Pending
from kera.client.producing.open_chunks.batches import Batches
from kera.client.producing.open_chunks.records import Records
from kera.client.producing.open_chunks.stream_writers import StreamWriters
from kera.client.producing.outcomes.outcome import BatchDelivery
from kera.client.producing.punctuating import TIMESTAMP_US_MAX, Punctuated, punctuate
from kera.client.producing.quotas import QuotaPace, Quotas
from kera.client.producing.rows import batch_of_rows, columns_of_frame
from kera.client.producing.sending.buffer import Buffer
from kera.client.producing.sending.hooks import Plugged, Plugins, SenderPort
from kera.client.producing.sending.routes import LIMITS, ProducerLimits
from kera.client.producing.serializing import Serialization
from kera.client.producing.traced import ProducerTraces, RequestSpans
from kera.client.settings import ProducerSettings
from kera.client.stream_config import durability_value
from kera.client.types import StreamDescription
from kera.client.unclosed import Guard, Loss, ends_in_order
from kera.core.base.clock import Clock, SystemClock
from kera.core.base.freed_memory import keep_freed_memory
from kera.core.base.telemetry import get_logger
from kera.core.errors import ClosedError, KeraError, UnknownStream
from kera.core.native import native
from kera.core.tracing import OFF, Tracing

log = get_logger("kera.producer")


class SendPath(NamedTuple):
    """The functions that take a record; both take the arguments of `Producer.send`."""

    send: Callable[..., Pending]
    """The function that users call."""
    send_bytes: Callable[..., Pending]
    """The function that takes values and keys that are serialized already."""


class _PlugIns:
    """The plug-ins of a producer. It could send without them."""

    def __init__(self, settings: ProducerSettings, cluster: Cluster, traces: ProducerTraces | None) -> None:
        self.latency = ProducerLatency(settings, cluster.at_work, cluster.runtime.clock.now_us)
        self.quotas = Quotas()
        self.of_senders = Plugins(self._at_sender, self.latency.times.created_us)
        self._traces = traces

    def _at_sender(self, port: SenderPort) -> Plugged:
        latency, pace = self.latency.at_broker(port), QuotaPace(self.quotas, port)
        spans = [] if self._traces is None else [RequestSpans(self._traces, port.broker_id)]
        return Plugged(latency.pace, pace, [latency, pace, *spans])


class Producer:
    """Writes records and batches to streams. Made by `Client.producer`; use it as an async context manager.

    Callers need not await every delivery: `flush`, and leaving the context, raise the first error since the last
    `flush`.

    An unclosed producer delivers its records when its loop or the interpreter ends; see `kera.client.unclosed`.

    A producer with a name (the setting ``name``) replaces all earlier producers of this name. Once `prepare` (or the
    first `send_batch`) has returned, no live broker accepts chunks of them, in any streamlet; an earlier producer that
    still sends gets `ProducerFenced`, and fails as a whole.
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
        self.serialization = serialization
        """Serializers of values and keys; None: they are bytes."""
        traces = ProducerTraces(tracing) if tracing.is_on else None
        self._buffer = Buffer(int(settings.buffer_bytes_max))
        self._plug_ins = _PlugIns(settings, cluster, traces)
        self._writers = StreamWriters(
            cluster,
            settings,
            self._buffer,
            fail=self._fail,
            limits=limits,
            plugins=self._plug_ins.of_senders,
            hooks=self._plug_ins.latency,
        )
        self.routes = self._writers.routes
        self._records = Records(
            settings, self._buffer, self._writers, time.time if clock is None else lambda: clock.now_us() / 1e6
        )
        batches = Batches(
            cluster, settings, self._buffer, self._writers, clock or SystemClock(), limits.request_chunks_max
        )
        self._send_batch = batches.send if traces is None else traces.sending_batches(batches.send, self._described)
        self._send_path = _send_path(
            self._records, self._writers, self._buffer, settings, traces, serialization, is_native=clock is None
        )
        # Every record goes through `send`. An attribute of the instance is called directly, mostly the function in C;
        # the method of the class would add a call that costs nearly as much as the record.
        self.send = self._send_path.send  # type: ignore[method-assign]
        self._closed = False
        self._guard = Guard(self)

    def __del__(self) -> None:
        guard = getattr(self, "_guard", None)
        if guard is not None and not self._closed:
            guard.dropped(self.loss())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close(flush=ends_in_order(kind))

    async def prepare(self, stream: str) -> StreamDescription:
        """Look up a stream, so that `send` knows it. Raises `UnknownStream`.

        If the known stream was deleted, looks up the new stream of that name. Also gets the ids of serializers'
        schemas: raises `IncompatibleSchema`, `InvalidSchema`, `UnknownSchema` (``register_schemas``), and the other
        errors of `SchemaRegistry.register`.
        """
        described = await self._described(stream)
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

        The value is bytes or None, and `keys` are bytes or a list of bytes. With a serializer, they are objects that it
        takes; None means no value, and only a list means several keys. `headers` are a mapping of names to bytes or
        None, or pairs, whose names may repeat.

        The first key decides the streamlet, by the setting ``partitioner`` (records of one key stay in order); without
        keys, chunks are spread evenly. `timestamp_us` is microseconds since the Unix epoch, now by default. The stream
        must have been prepared (`prepare`; without serializers any `send_batch` will do).

        Raises `BufferFull` when ``buffer_bytes_max`` is reached (``await drain()`` in a loop of sends),
        `InvalidArgument` for a value that is not bytes, `CannotEncode` for a value that a serializer does not take,
        `RecordTooLarge`, `StreamletOutOfRange`, `SchemaMismatch` for a stream with its own schema, `ClosedError`,
        `ProducerFenced`. Then this record was not accepted, and other records are not affected.
        """
        return self._send_path.send(
            stream, value, keys=keys, timestamp_us=timestamp_us, headers=headers, streamlet=streamlet
        )

    @property
    def send_bytes(self) -> Callable[..., Pending]:
        """The function `send` for values and keys that are serialized already."""
        return self._send_path.send_bytes

    async def drain(self) -> None:
        """Wait until there is room in the buffer; costs next to nothing when there is.

        Enough room is half of the buffer, or the bytes that the last refused `send` needed if that is more. Also lets
        the event loop run when chunks have been filled since the last call, so that they are sent.
        """
        buffer = self._buffer
        if buffer.queued_bytes or buffer.refused_bytes or buffer.left_bytes < buffer.room_bytes:
            await buffer.drain(self._writers.close_open_chunks)

    async def send_batch(self, stream: str, batch: Columns, *, streamlet: int | None = None) -> BatchDelivery:
        """Accept all rows of `batch`, waiting for room in the buffer; await the result for the deliveries.

        `batch` is a RecordBatch, Table or RecordBatchReader of pyarrow (which is read to its end), a DataFrame of
        pandas or polars, or any other object with Arrow's PyCapsule interface. It has the columns of the stream's
        schema, in any type that keeps the values (`kera.client.arrow_input`); columns that may be null, and the default
        schema's timestamp, can be left out. Rows are partitioned by the stream's key column (default schema: the first
        of ``keys``), in order. Raises `SchemaMismatch`, `RecordTooLarge`, `StreamletOutOfRange`, `UnknownStream`,
        `InvalidArgument`; then no row was accepted.
        """
        if self.serialization is not None:
            await self._described(stream)
        return await self._send_batch(stream, batch, streamlet=streamlet)

    async def send_rows(self, stream: str, rows: Iterable[Any], *, streamlet: int | None = None) -> BatchDelivery:
        """Accept instances of a dataclass or a pydantic model as rows of a stream with columns; see `send_batch`.

        Converts all rows to columns at once. All rows are of one model, whose fields are columns of the stream
        (``create_stream(schema=Model)``). Raises `CannotEncode` with the row and the field if a value does not fit into
        its column, and the errors of `send_batch`; then no row was accepted.
        """
        return await self.send_batch(stream, batch_of_rows(rows, await self.prepare(stream)), streamlet=streamlet)

    async def send_frame(
        self,
        stream: str,
        frame: Columns,
        *,
        value_column: str | None = None,
        key_column: str | None = None,
        timestamp_column: str | None = None,
        streamlet: int | None = None,
    ) -> BatchDelivery:
        """Accept a data frame of pandas or polars, or another input of `send_batch`, for a stream of either kind.

        If the stream has columns, those of the frame go to the ones of the same name. For the default schema,
        `key_column` names the column with the keys, `timestamp_column` the one with the times, and `value_column` the
        one with the values, text or bytes; without `value_column`, the values are JSON objects of all other columns.
        Raises `InvalidArgument` for columns that are missing or would be left over, `CannotEncode`, and the errors of
        `send_batch`; then no row was accepted.
        """
        batches = columns_of_frame(
            frame,
            await self.prepare(stream),
            value_column=value_column,
            key_column=key_column,
            timestamp_column=timestamp_column,
        )
        return await self.send_batch(stream, pa.Table.from_batches(batches), streamlet=streamlet)

    async def punctuate(self, stream: str, timestamp_us: int) -> Punctuated:
        """Declare that no record older than a time will follow in a stream, so that its epochs up to then close.

        First delivers the records accepted before, like `flush`. Then brokers write a punctuation into all entries that
        were ever written to and have not reached this time. Repeating a punctuation, or giving an earlier time, does no
        harm. Brokers still accept older records, and count them as late (docs/epochs.md).

        Returns when the punctuation has the durability at which records are acknowledged. Raises the errors of `flush`,
        `InvalidArgument` for a stream without epochs, `TimestampAhead`, `NotAllowed`, `UnknownStream`.
        """
        unit = " (whole microseconds since the Unix epoch)"
        timestamp_us = arguments.whole("timestamp_us", timestamp_us, 0, TIMESTAMP_US_MAX, what=unit)
        known = await self._described(stream)
        await self.flush()
        if self._buffer.ended:
            raise self._writers.not_ready(stream)
        try:
            return await punctuate(self._cluster, known, timestamp_us, durability_value(self.settings.durability))
        except UnknownStream:
            await self._writers.look_again(stream)  # so that `prepare` finds a new stream of that name
            raise

    async def flush(self) -> None:
        """Wait until all records accepted so far are delivered or have failed.

        Raises the first error since the last `flush`; if the producer has failed as a whole, the reason.
        """
        self._writers.close_open_chunks()
        await self._buffer.flush()

    async def close(self, *, flush: bool = True) -> None:
        """Deliver all accepted records, and accept no more.

        Without `flush`, records that were not sent fail with `ClosedError`; records that were sent and not acknowledged
        fail with `Uncertain`.
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
            self._writers.close(ClosedError("the producer was closed before the record was sent"))
            await self._guard.disarm()

    def loss(self) -> Loss | None:
        """Return the records that are lost if the producer is dropped now: accepted, and not delivered."""
        return _loss_of(self._buffer.record_counts() + self._writers.open_records())

    @property
    def throttled_ms(self) -> int:
        """Total time that brokers have held answers back because a quota was used up (docs/quotas.md)."""
        return self._plug_ins.quotas.throttled_ms

    @property
    def late_ms(self) -> float:
        """Total time that chunks stayed open beyond their deadlines although nothing blocked them.

        The cause is a busy event loop when a chunk was due by ``linger_ms``, a latency target or a constraint.
        """
        return self._plug_ins.latency.late_s * 1000

    async def _described(self, name: str) -> StreamDescription:
        stream = (await self._writers.writer(name)).stream
        if self.serialization is not None:
            await self.serialization.prepare_again(stream)
        return stream

    def _fail(self, error: KeraError) -> None:
        """Give up all chunks that are not in flight, and accept no more records."""
        if self._buffer.failure is None:
            self._buffer.fail(error)
            log.warning("producer has failed", error=error.message)
            self._writers.fail(error)


def _send_path(
    records: Records,
    writers: StreamWriters,
    buffer: Buffer,
    settings: ProducerSettings,
    traces: ProducerTraces | None,
    serialization: Serialization | None,
    *,
    is_native: bool,
) -> SendPath:
    """Choose the function that `Producer.send` is. Each of these wraps the previous one that is in use:

    * `Records.send`, in Python: takes any record;
    * `native.sender`, in C: handles a plain record for an open chunk itself. Not used if the producer got a clock;
    * `ProducerTraces.sending`, if tracing is on: makes spans;
    * `Serialization.sending`, if there are serializers: makes bytes of values and keys. `send_bytes` leaves it out.
    """
    send: Callable[..., Pending] = records.send
    if native is not None and is_native:
        send = native.sender(
            records.send,
            Pending,
            writers.filling,
            writers.open_chunks,
            buffer,
            int(settings.chunk_bytes_max),
            settings.partitioner,
        )
    if traces is not None:
        send = traces.sending(send)
    return SendPath(send if serialization is None else serialization.sending(send), send_bytes=send)


def _loss_of(records: Counter[str]) -> Loss | None:
    """Return the loss of these records, counted by stream; None: there are none."""
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
