"""The records of a producer without asyncio, on their way to the client's thread.

    put ──► waiting (bounded) ──► the client's thread: `kera.client.Producer`

Promises: records keep the order of the calls. Each record is passed to the producer, or refused with an error, also
when the program ends without closing anything (`kera.client.unclosed`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from kera.client.producing.producer import Producer as AsyncProducer
from kera.client.producing.punctuating import Punctuated
from kera.client.sync.loop_thread import LoopThread
from kera.client.unclosed import Guard, Loss
from kera.core.base.telemetry import get_logger
from kera.core.errors import BufferFull, ClosedError, KeraError

log = get_logger("kera.producer")

WAITING_MAX = 10_000
WAITING_BYTES_MAX = 16 << 20
"""Maximum size of waiting values; beyond it, `send` waits."""
BUSY = 16
PAUSE_S = 0.001
"""Pause after `BUSY` or more records at once: it lets a thread send in a loop, as a switch for each one costs more."""

ResultT = TypeVar("ResultT")


class Sent(Generic[ResultT]):
    """The future result of a sent record or batch: a `Delivery` or a sequence of them."""

    __slots__ = (
        "_accepted",
        "_error",
        "_handover",
        "_on_delivery",
        "arguments",
        "content",
        "is_batch",
        "size",
        "stream",
    )

    def __init__(
        self,
        handover: Handover,
        stream: str,
        content: Any,
        arguments: dict[str, Any] | None,
        size: int,
        on_delivery: Callable[[ResultT | None, Exception | None], object] | None,
        *,
        is_batch: bool = False,
    ) -> None:
        self._handover = handover
        self.stream = stream
        self.content = content
        self.arguments = arguments
        self.size = size
        self.is_batch = is_batch
        self._on_delivery = on_delivery
        self._accepted: Any = None
        self._error: Exception | None = None

    def done(self) -> bool:
        """Return whether the result or the error is known."""
        return self._error is not None or (self._accepted is not None and self._accepted.done())

    def result(self) -> ResultT:
        """Wait for the result and return it. Raises the error if it has failed."""
        if not self.done():
            self._handover.wait_for(self)
        if self._error is not None:
            raise self._error.with_traceback(None)
        result: ResultT = self._accepted.result()
        return result

    async def settled(self) -> None:
        """Wait for the outcome, on the client's thread, after the producer has got the record."""
        if self._accepted is not None:
            with contextlib.suppress(KeraError):
                await self._accepted

    def accept(self, accepted: Any) -> None:
        """Note that the producer has accepted it; called on the client's thread."""
        self._accepted, self.content, self.arguments = accepted, None, None
        if self._on_delivery is not None:
            accepted.add_done_callback(self._tell)

    def refuse(self, error: Exception) -> None:
        """Note that the producer has not accepted it; called on the client's thread."""
        self._error, self.content, self.arguments = error, None, None
        if self._on_delivery is not None:
            # As for an accepted one, the loop makes the call: its handler of exceptions gets what the callback raises.
            asyncio.get_running_loop().call_soon(self._on_delivery, None, error)

    def _tell(self, accepted: Any) -> None:
        on_delivery, error = self._on_delivery, accepted.exception()
        if on_delivery is not None:
            on_delivery(None if error is not None else accepted.result(), error)


class Handover:
    """Sent records that wait for the client's thread, which passes them to the producer."""

    def __init__(self, thread: LoopThread, producer: AsyncProducer) -> None:
        """Make a handover to `producer`; call this on the client's thread."""
        self.producer = producer
        self._thread = thread
        self._send = producer.send_bytes
        self._lock = threading.Lock()
        """Lock for the following attributes."""
        self._changed = threading.Condition(self._lock)
        self._waiting: list[Sent[Any] | asyncio.Future[None]] = []
        """Sent records, and futures that complete once the producer has all records before them."""
        self._waiting_bytes = 0
        self._working = False
        """Whether the client's thread is passing records on, or about to begin."""
        self._closed = False
        self._first_error: Exception | None = None
        """The first error of a refused record since the last `flush`."""
        self._guard = Guard(self, feeds=True)

    def __del__(self) -> None:
        guard = getattr(self, "_guard", None)
        if guard is not None and not self._closed:
            guard.dropped(self.loss())

    def wait_for(self, sent: Sent[Any]) -> None:
        """Wait for the outcome of a sent record or batch."""
        self._thread.run(self._settled(sent))

    def put(self, sent: Sent[Any]) -> None:
        """Queue a record or batch for the producer. Waits while the queue is full; raises `ClosedError`."""
        self._thread.check_process()
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
        """Pass the waiting records to the producer, until none are left."""
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
                    if each.arguments is None:  # the usual case: this saves a call for each record
                        try:
                            each.accept(self._send(each.stream, each.content))
                            continue
                        except BufferFull:
                            pass
                    await self._give(each)
                except Exception as error:  # noqa: BLE001 - after any error, the next records must not wait for ever
                    self._first_error = self._first_error or error
                    each.refuse(error)
            await self.producer.drain()
            if len(taken) >= BUSY:
                await asyncio.sleep(PAUSE_S)

    async def _give(self, sent: Sent[Any]) -> None:
        arguments = sent.arguments or {}
        if sent.is_batch:
            sent.accept(await self.producer.send_batch(sent.stream, sent.content, **arguments))
            return
        while True:
            try:
                sent.accept(self._send(sent.stream, sent.content, **arguments))
            except BufferFull:
                await self.producer.drain()
            else:
                return

    async def _all_given(self) -> None:
        """Wait until the producer has all records sent so far."""
        with self._lock:
            if not self._working:
                return
            given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(given)
        await given

    async def _settled(self, sent: Sent[Any]) -> None:
        await self._all_given()
        await sent.settled()

    async def flush(self) -> None:
        """See `Producer.flush`."""
        await self._all_given()
        try:
            await self.producer.flush()
        finally:
            error, self._first_error = self._first_error, None
        if error is not None:
            raise error

    async def punctuate(self, stream: str, timestamp_us: int) -> Punctuated:
        """See `Producer.punctuate`."""
        await self.flush()
        return await self.producer.punctuate(stream, timestamp_us)

    async def close(self, *, flush: bool = True) -> None:
        """Deliver the sent records, and accept no more; see `Producer.close`. Does nothing the second time."""
        with self._lock:
            closed, self._closed = self._closed, True
            self._changed.notify_all()
        if closed:
            return
        try:
            if flush:
                await self.flush()
        finally:
            with self._lock:
                dropped, self._waiting = self._waiting, []
            self._refuse(dropped)
            await self.producer.close(flush=flush)
            await self._guard.disarm()

    def _refuse(self, dropped: list[Sent[Any] | asyncio.Future[None]]) -> None:
        """Fail the records that the producer did not get."""
        lost: Counter[str] = Counter()
        for each in dropped:
            if isinstance(each, asyncio.Future):
                each.cancel()
            else:
                each.refuse(ClosedError("the producer was closed before the record was sent"))
                lost[each.stream] += 1
        if lost:
            log.warning("producer closed before all was sent", sent=lost.total(), streams=sorted(lost))

    def loss(self) -> Loss | None:
        """Return the loss of the records that the producer did not get; None: no loss."""
        with self._lock:
            streams = Counter(each.stream for each in self._waiting if not isinstance(each, asyncio.Future))
        if not streams:
            return None
        names = sorted(streams)
        return Loss(
            "producer was not closed; what waits to be sent is lost",
            {"sent": streams.total(), "streams": names},
            f"a producer was dropped with {streams.total()} records or batches of {', '.join(map(repr, names))} that"
            " were not sent; close it, or use it as a context manager",
        )
