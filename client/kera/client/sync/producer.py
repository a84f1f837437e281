"""A producer for those who write no asyncio: it takes records and batches, and a thread sends them.

    send, send_batch ──► waiting (bounded) ──► the client's thread: `kera.client.Producer` ──► brokers

`send` costs an object and a place in a list. Who sends faster than brokers take waits in `send`, when so much waits
already. Order is that of the calls. What is wrong with a record is told where its delivery is: by `Sent.result`,
`on_delivery`, or the next `flush`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import pyarrow as pa

from kera.client.arrow_input import Columns
from kera.client.producing.producer import Producer as AsyncProducer
from kera.client.producing.punctuating import Punctuated
from kera.client.producing.rows import batch_of_rows, columns_of_frame
from kera.client.sync.loop_thread import LoopThread
from kera.client.types import Delivery, StreamDescription
from kera.core.errors import BufferFull, ClosedError, KeraError

WAITING_MAX = 10_000
WAITING_BYTES_MAX = 16 << 20
"""Of values; more has to wait in `send`."""
BUSY = 16
PAUSE_S = 0.001
"""After so many at once: who sends in a loop is let do so for a while, as taking turns for each costs more."""
_UNKNOWN_BYTES = 1 << 20
"""As what a batch counts that does not say how large it is."""

ResultT = TypeVar("ResultT")


class Sent(Generic[ResultT]):
    """A record or a batch that was sent: what becomes of it, a `Delivery` or a sequence of them."""

    __slots__ = (
        "_accepted",
        "_error",
        "_on_delivery",
        "_producer",
        "arguments",
        "content",
        "is_batch",
        "size",
        "stream",
    )

    def __init__(
        self,
        producer: Producer,
        stream: str,
        content: Any,
        arguments: dict[str, Any] | None,
        size: int,
        on_delivery: Callable[[ResultT | None, Exception | None], object] | None,
        *,
        is_batch: bool = False,
    ) -> None:
        self._producer = producer
        self.stream = stream
        self.content = content
        self.arguments = arguments
        self.size = size
        self.is_batch = is_batch
        self._on_delivery = on_delivery
        self._accepted: Any = None
        self._error: Exception | None = None

    def done(self) -> bool:
        """Whether it is known."""
        return self._error is not None or (self._accepted is not None and self._accepted.done())

    def result(self) -> ResultT:
        """Wait for it. Raises why there is none."""
        if not self.done():
            self._producer.wait_for(self)
        if self._error is not None:
            raise self._error.with_traceback(None)
        result: ResultT = self._accepted.result()
        return result

    async def settled(self) -> None:
        """On the client's thread, when it was given to the producer: wait until it is known."""
        if self._accepted is not None:
            with contextlib.suppress(KeraError):
                await self._accepted

    def accept(self, accepted: Any) -> None:
        """On the client's thread: the producer has it."""
        self._accepted, self.content, self.arguments = accepted, None, None
        if self._on_delivery is not None:
            accepted.add_done_callback(self._tell)

    def refuse(self, error: Exception) -> None:
        """The producer has not taken it."""
        self._error, self.content, self.arguments = error, None, None
        if self._on_delivery is not None:
            self._on_delivery(None, error)

    def _tell(self, accepted: Any) -> None:
        on_delivery, error = self._on_delivery, accepted.exception()
        if on_delivery is not None:
            on_delivery(None if error is not None else accepted.result(), error)


OnDelivery = Callable[[Delivery | None, Exception | None], object]
"""Is told what became of a record: its delivery, or why there is none. Called on the client's thread, so it must not
wait for anything."""
OnDeliveries = Callable[[Sequence[Delivery] | None, Exception | None], object]
"""The same of a batch: the deliveries of the chunks that it became."""


class Producer:
    """Writes records and batches to streams. Made by `Client.producer`; use it as a context manager.

    May be used by several threads. `flush`, and leaving the context, raise the first error since the last `flush`.
    """

    def __init__(self, thread: LoopThread, producer: AsyncProducer) -> None:
        self._thread = thread
        self._producer = producer
        self._serialization = producer.serialization
        self._send = producer.send_bytes
        self._known: set[str] = set()
        """Streams that were prepared."""
        self._lock = threading.Lock()
        """Of what follows."""
        self._changed = threading.Condition(self._lock)
        self._waiting: list[Sent[Any] | asyncio.Future[None]] = []
        """What was sent; and those who want to know when all before them was given to the producer."""
        self._waiting_bytes = 0
        self._working = False
        """The client's thread is at it, or about to be."""
        self._closed = False
        self._first_error: Exception | None = None
        """Of what the producer has not taken, since the last `flush`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(flush=kind is None)

    def prepare(self, stream: str) -> StreamDescription:
        """Look up a stream; `send` does so by itself, the first time. Raises `UnknownStream`."""
        found = self._thread.run(self._producer.prepare(stream))
        self._known.add(stream)
        return found

    def send(
        self,
        stream: str,
        value: Any,
        *,
        keys: Any = (),
        timestamp_us: int | None = None,
        headers: Mapping[str, bytes] | None = None,
        streamlet: int | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> Sent[Delivery]:
        """Have a record sent; see `kera.client.Producer.send` for what it is made of.

        Waits while too much waits to be sent. Raises `UnknownStream` the first time that something is sent to a stream
        that is not there, `ClosedError`, and `CannotEncode` for what a serializer does not take; all else is told by
        what it returns, by `on_delivery`, and by `flush`.
        """
        if stream not in self._known:
            self.prepare(stream)
        if self._serialization is not None:
            value, keys = self._serialization.encoded(stream, value, keys)
        arguments: dict[str, Any] | None = None
        if keys != () or timestamp_us is not None or headers is not None or streamlet is not None:
            arguments = {"keys": keys, "timestamp_us": timestamp_us, "headers": headers, "streamlet": streamlet}
        size = len(value) if isinstance(value, bytes) else 0
        sent: Sent[Delivery] = Sent(self, stream, value, arguments, size, on_delivery)
        self._put(sent)
        return sent

    def send_batch(
        self, stream: str, batch: Columns, *, streamlet: int | None = None, on_delivery: OnDeliveries | None = None
    ) -> Sent[Sequence[Delivery]]:
        """Have all rows of `batch` sent; see `kera.client.Producer.send_batch`, and `send`."""
        size = getattr(batch, "nbytes", None)
        size = size if isinstance(size, int) else _UNKNOWN_BYTES
        sent: Sent[Sequence[Delivery]] = Sent(
            self, stream, batch, {"streamlet": streamlet}, size, on_delivery, is_batch=True
        )
        self._put(sent)
        return sent

    def send_rows(
        self,
        stream: str,
        rows: Iterable[Any],
        *,
        streamlet: int | None = None,
        on_delivery: OnDeliveries | None = None,
    ) -> Sent[Sequence[Delivery]]:
        """Have instances of a model sent as rows; see `kera.client.Producer.send_rows`, and `send`.

        Raises `CannotEncode` and `SchemaMismatch`.
        """
        batch = batch_of_rows(rows, self.prepare(stream))
        return self.send_batch(stream, batch, streamlet=streamlet, on_delivery=on_delivery)

    def send_frame(
        self,
        stream: str,
        frame: Columns,
        *,
        value_column: str | None = None,
        key_column: str | None = None,
        timestamp_column: str | None = None,
        streamlet: int | None = None,
        on_delivery: OnDeliveries | None = None,
    ) -> Sent[Sequence[Delivery]]:
        """Have a data frame sent; see `kera.client.Producer.send_frame`, and `send`.

        Raises `InvalidArgument` and `CannotEncode`.
        """
        batches = columns_of_frame(
            frame,
            self.prepare(stream),
            value_column=value_column,
            key_column=key_column,
            timestamp_column=timestamp_column,
        )
        table = pa.Table.from_batches(batches)
        return self.send_batch(stream, table, streamlet=streamlet, on_delivery=on_delivery)

    def flush(self) -> None:
        """Wait until everything sent so far is delivered or has failed. Raises the first error since the last one."""
        self._thread.run(self._flush())

    def punctuate(self, stream: str, timestamp_us: int) -> Punctuated:
        """Say that nothing older comes behind what is in a stream; see `kera.client.Producer.punctuate`."""
        return self._thread.run(self._punctuate(stream, timestamp_us))

    def close(self, *, flush: bool = True) -> None:
        """Deliver what was sent, and take no more; without `flush`, what was not sent fails with `ClosedError`."""
        self._thread.check_caller()
        with self._lock:
            closed, self._closed = self._closed, True
            self._changed.notify_all()
        if not closed:
            self._thread.run(self._close(flush=flush))

    @property
    def throttled_ms(self) -> int:
        """See `kera.client.Producer.throttled_ms`."""
        return self._producer.throttled_ms

    @property
    def late_ms(self) -> float:
        """See `kera.client.Producer.late_ms`."""
        return self._producer.late_ms

    def wait_for(self, sent: Sent[Any]) -> None:
        """Wait until it is known what became of something that was sent."""
        self._thread.run(self._settled(sent))

    def _put(self, sent: Sent[Any]) -> None:
        with self._lock:
            while self._waiting_bytes and (
                len(self._waiting) >= WAITING_MAX or self._waiting_bytes + sent.size > WAITING_BYTES_MAX
            ):
                self._thread.check_caller()
                self._changed.wait()
            if self._closed:
                raise ClosedError("the producer is closed")
            self._waiting.append(sent)
            self._waiting_bytes += sent.size + 1
            if not self._working:
                self._working = True
                self._thread.call_soon(self._start)

    # -- on the client's thread --------------------------------------------------------------------------------

    def _start(self) -> None:
        self._thread.start(self._work())

    async def _work(self) -> None:
        """Give the producer what waits, until nothing does."""
        while True:
            with self._lock:
                taken, self._waiting, self._waiting_bytes = self._waiting, [], 0
                self._working = bool(taken)
                self._changed.notify_all()
            if not taken:
                return
            for each in taken:
                if isinstance(each, asyncio.Future):
                    if not each.done():
                        each.set_result(None)
                    continue
                try:
                    if each.arguments is None:  # most of them: a call less for each
                        try:
                            each.accept(self._send(each.stream, each.content))
                            continue
                        except BufferFull:
                            pass
                    await self._give(each)
                except Exception as error:  # noqa: BLE001 - whatever it is, what comes behind it is not to wait for ever
                    self._first_error = self._first_error or error
                    each.refuse(error)
            await self._producer.drain()
            if len(taken) >= BUSY:
                await asyncio.sleep(PAUSE_S)

    async def _give(self, sent: Sent[Any]) -> None:
        arguments = sent.arguments or {}
        if sent.is_batch:
            sent.accept(await self._producer.send_batch(sent.stream, sent.content, **arguments))
            return
        while True:
            try:
                sent.accept(self._send(sent.stream, sent.content, **arguments))
            except BufferFull:
                await self._producer.drain()
            else:
                return

    async def _all_given(self) -> None:
        """Wait until the producer has all that was sent so far."""
        with self._lock:
            if not self._working:
                return
            given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(given)
        await given

    async def _settled(self, sent: Sent[Any]) -> None:
        await self._all_given()
        await sent.settled()

    async def _flush(self) -> None:
        await self._all_given()
        try:
            await self._producer.flush()
        finally:
            error, self._first_error = self._first_error, None
        if error is not None:
            raise error

    async def _punctuate(self, stream: str, timestamp_us: int) -> Punctuated:
        await self._flush()
        return await self._producer.punctuate(stream, timestamp_us)

    async def _close(self, *, flush: bool) -> None:
        try:
            if flush:
                await self._flush()
        finally:
            with self._lock:
                dropped, self._waiting = self._waiting, []
            for each in dropped:
                if isinstance(each, asyncio.Future):
                    each.cancel()
                else:
                    each.refuse(ClosedError("the producer was closed before the record was sent"))
            await self._producer.close(flush=flush)
