"""The clients of `tests.chaos.latency`, each a process whose clock can be set: a writer, and a worker on the path.

``writer`` sends keyed records into the first stream, at a given rate; ``worker`` reads them as a consumer group and
passes each on into the second one. Commands are lines of JSON on standard input, such as ``{"rate": 400}``:

    rate       records a second; 0: pause, and flush all sent records (writer)
    step_s     seconds to set the clock ahead, or back if negative
    work_s     processing time per chunk of the application (worker)
    stop       deliver all accepted records, and end the process

Each `SLOT_S` it prints a line to standard output: the measurements of that time, by the monotonic clock, which all
processes of a host share. See `Slot`. Only `step_s` affects the clock that the SDK uses; it affects no measurement.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import sys
import time
from collections.abc import Callable
from contextvars import Context
from dataclasses import asdict, dataclass, field
from dataclasses import replace as replaced
from typing import Any, TypeVarTuple, Unpack

from kera.client import Client, Producer
from kera.core.base.alarm import Alarm
from kera.core.base.clock import SystemClock
from kera.core.base.process import die_with_parent
from kera.core.base.telemetry import configure_logging
from kera.core.errors import KeraError
from kera.core.runtime import MACHINE

Ts = TypeVarTuple("Ts")

FIRST, GROUP, SECOND = "a", "g", "b"
PATH = (FIRST, f"group:{GROUP}", SECOND)
KEYS = 64
SLOT_S = 0.25
TICK_S = 0.005
"""Time between two looks at the lag of the event loop."""
TIMER_S = 0.002
"""Precision of the loop's timers, and the time that a look takes."""
RECORD_BYTES = 100
DELIVERY_TIMEOUT_MS = 300_000
"""Records are late, but not lost, when a machine stands still."""
_HEAD = struct.Struct("<IIq")
"""The head of a value: number of the key, number of the record among those of the key, and time of sending."""


class SetClock(SystemClock):
    """The machine's clock, with a wall clock that can be set."""

    def __init__(self) -> None:
        self._ahead_us = 0

    def now_us(self) -> int:
        """See `Clock.now_us`."""
        return super().now_us() + self._ahead_us

    def step(self, seconds: float) -> None:
        """Set the wall clock ahead, or back."""
        self._ahead_us += round(seconds * 1e6)


class LateLoop(asyncio.SelectorEventLoop):
    """An event loop on which the timer of open chunks goes off too late: the check has to find that."""

    delay_s = 0.0

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See `asyncio.AbstractEventLoop.call_at`."""
        if isinstance(getattr(callback, "__self__", None), Alarm):
            when += self.delay_s
        return super().call_at(when, callback, *args, context=context)


@dataclass
class Slot:
    """The measurements of a time of `SLOT_S`. Times are microseconds."""

    number: int
    """The slot began `number` times `SLOT_S` after zero of the monotonic clock."""
    sent: int = 0
    acknowledged: int = 0
    failed: int = 0
    records: int = 0
    """Records that came to the end of the path."""
    records_us: int = 0
    """The sum of these records' times."""
    longest_us: int = 0
    """The longest of these times."""
    runs: int = 0
    """Chunks that the worker handled; chunks that came together count as one."""
    runs_us: int = 0
    """From sending the oldest record of each until the first record made from it was accepted."""
    chunks: int = 0
    """Chunks that became durable in the second stream."""
    chunks_us: int = 0
    """From sending the oldest record of each into the second stream."""
    lags_us: list[int] = field(default_factory=list)
    """The lag of the event loop at each look."""
    late: int = 0
    """Looks that found chunks left beyond their deadlines for longer than the event loop was busy."""
    late_us: int = 0
    """The longest such time."""
    errors: list[str] = field(default_factory=list)
    """Errors that were not handled, such as a broken invariant of the sender."""


def now_us() -> int:
    """The time on the monotonic clock."""
    return time.monotonic_ns() // 1000


def head_of(value: bytes) -> tuple[int, int, int]:
    """Number of the key, number of the record among those of the key, and time of sending."""
    key, number, sent_us = _HEAD.unpack_from(value)
    return key, number, sent_us


class Ledger:
    """Fills slots, and prints completed ones."""

    def __init__(self) -> None:
        self._slot = Slot(self._number())

    @staticmethod
    def _number() -> int:
        return int(time.monotonic() / SLOT_S)

    @property
    def now(self) -> Slot:
        """The current slot."""
        number = self._number()
        if number != self._slot.number:
            self.tell()
            self._slot = Slot(number)
        return self._slot

    def tell(self) -> None:
        """Print the current slot."""
        sys.stdout.write(json.dumps({"slot": asdict(self._slot)}) + "\n")
        sys.stdout.flush()

    async def watch(self, producer: Producer) -> None:
        """Measure the lag of the event loop, and whether chunks are later than that, until cancelled."""
        loop, late_ms, lag_before_s = asyncio.get_running_loop(), producer.late_ms, 0.0
        while True:
            due_s = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)  # sleep: its lag is measured
            lag_s, slot = loop.time() - due_s, self.now
            slot.lags_us.append(round(lag_s * 1e6))
            late_s, late_ms = (producer.late_ms - late_ms) / 1000, producer.late_ms
            # Timers of one loop are late together; each sender has one.
            beyond_s = late_s - len(producer.routes.broker_ids) * (max(lag_s, lag_before_s) + TICK_S + TIMER_S)
            lag_before_s = lag_s
            if beyond_s > 0:
                slot.late += 1
                slot.late_us = max(slot.late_us, round(beyond_s * 1e6))

    def failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Record an unhandled error."""
        self.now.errors.append(repr(context.get("exception") or context["message"]))


class Writer:
    """Sends records at a rate."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.rate = 0.0
        self._numbers = [0] * KEYS
        self._next = 0

    async def run(self, producer: Producer) -> None:
        """Send until cancelled."""
        due_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if not self.rate:
                due_s = now_s
            while self.rate and due_s <= now_s:
                self._send(producer)
                due_s += 1 / self.rate
            await producer.drain()
            await asyncio.sleep(TICK_S)  # sleep: the load

    def _send(self, producer: Producer) -> None:
        key = self._next % KEYS
        value = _HEAD.pack(key, self._numbers[key], now_us()).ljust(RECORD_BYTES, b".")
        pending = producer.send(FIRST, value, keys=b"%d" % key)
        self._numbers[key] += 1
        self._next += 1
        self._ledger.now.sent += 1
        pending.add_done_callback(self._done)

    def _done(self, pending: Any) -> None:
        if pending.exception() is None:
            self._ledger.now.acknowledged += 1
        else:
            self._ledger.now.failed += 1


class Worker:
    """Passes records on."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.work_s = 0.0
        self._at: dict[Any, Any] = {}
        """The place of the last chunk of each entry."""

    async def run(self, client: Client, producer: Producer) -> None:
        """Pass records on until cancelled."""
        async with client.group_consumer(GROUP, [FIRST]) as consumer:
            async for chunk in consumer.batches():
                values = chunk.batch.column("value").to_pylist()
                oldest_us = min(head_of(value)[2] for value in values)
                del chunk
                if self.work_s:
                    await asyncio.sleep(self.work_s)  # sleep: the work
                for number, value in enumerate(values):
                    self._pass_on(producer, value)
                    if not number:
                        slot = self._ledger.now
                        slot.runs += 1
                        slot.runs_us += now_us() - oldest_us
                await producer.drain()

    def _pass_on(self, producer: Producer, value: bytes) -> None:
        key, _, sent_us = head_of(value)
        accepted_us = now_us()
        pending = producer.send(SECOND, value, keys=b"%d" % key)
        self._ledger.now.sent += 1

        def done(pending: Any) -> None:
            slot = self._ledger.now
            if pending.exception() is not None:
                slot.failed += 1
                return
            delivery, at_us = pending.result(), now_us()
            slot.acknowledged += 1
            slot.records += 1
            slot.records_us += at_us - sent_us
            slot.longest_us = max(slot.longest_us, at_us - sent_us)
            if self._at.get(delivery.entry) != delivery.position:  # the first record of a chunk is its oldest
                self._at[delivery.entry] = delivery.position
                slot.chunks += 1
                slot.chunks_us += at_us - accepted_us

        pending.add_done_callback(done)


def made(client: Client, chunk_bytes: int) -> Producer:
    """A producer that never gives up a record, however long delivery takes."""
    return client.producer(chunk_bytes_max=chunk_bytes, delivery_timeout_ms=DELIVERY_TIMEOUT_MS)


async def obey(role: str, bootstrap: str, chunk_bytes: int, ledger: Ledger) -> None:
    """Work until the command to stop."""
    loop, commands = asyncio.get_running_loop(), asyncio.StreamReader()
    loop.set_exception_handler(ledger.failed)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    clock, writer, worker = SetClock(), Writer(ledger), Worker(ledger)
    runtime = replaced(MACHINE, clock=clock)
    async with (
        await Client.connect(bootstrap, runtime=runtime) as client,
        made(client, chunk_bytes) as producer,
    ):
        await producer.prepare(FIRST if role == "writer" else SECOND)
        running = [
            loop.create_task(writer.run(producer) if role == "writer" else worker.run(client, producer)),
            loop.create_task(ledger.watch(producer)),
        ]
        try:
            while line := await commands.readline():
                told = json.loads(line)
                if "stop" in told:
                    break
                clock.step(told.get("step_s", 0.0))
                writer.rate = told.get("rate", writer.rate)
                worker.work_s = told.get("work_s", worker.work_s)
                for task in running:
                    if task.done():
                        task.result()
        finally:
            for task in running:
                task.cancel()
            for task in running:
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await producer.flush()
            await asyncio.sleep(SLOT_S)  # sleep: until all delivered records are counted
            ledger.tell()


def main() -> None:
    """Run as a writer or a worker."""
    die_with_parent()
    configure_logging("error", daemon="latency")  # not to standard output
    task = json.loads(sys.argv[1])
    LateLoop.delay_s = task.get("timer_delay_s", 0.0)
    try:
        with asyncio.Runner(loop_factory=LateLoop) as runner:
            runner.run(obey(task["role"], task["bootstrap"], task["chunk_bytes"], Ledger()))
    except KeraError as error:
        sys.stdout.write(json.dumps({"wrong": repr(error)}) + "\n")
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
