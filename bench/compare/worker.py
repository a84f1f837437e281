"""A producer or consumer of a comparison: a process of its own, for any contestant.

It is told what to do on standard input and answers on standard output, a JSON object or a word per line:

    ← {"role": "produce", …}   its `Task`
    → {"ready": true}          it is connected
    ← go START_NS              it begins now; what happens from START_NS (CLOCK_MONOTONIC) on counts, for `seconds`
    → {"seen": 4711}           a consumer, ten times a second: what it has seen since it began
    ← stop                     a consumer: nothing more is to come, or has taken too long
    → {"records": …}           its `Result`
    → {"error": "…"}           in place of any answer

The process stays until it is ended, so that it can be looked at from outside.

The clock is CLOCK_MONOTONIC, which all processes of a machine share. A contestant's worker is two functions::

    async def produce(worker: Worker) -> None: ...
    async def consume(worker: Worker) -> None: ...


    if __name__ == "__main__":
        run_async(produce, consume)  # or `run`, for functions that are not async

`produce` connects, awaits `Worker.begin`, then sends either as long as `Worker.more` says, or at a rate what
`Worker.due` yields; it says `sent` and, when it is, `acknowledged`, and returns when all is. `consume` connects,
subscribes to the streams' start, awaits `Worker.begin`, and says `seen` until it is stopped.

No coordinated omission: at a rate each record has a time when it is due, which is the head of its value and which all
its latencies count from, however late it was sent. The worker's own delay is another histogram.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import uvloop
from pydantic import BaseModel, ConfigDict, Field

from bench.compare.workload import Workload
from kera.cli.bench._latency import Latencies
from kera.core.base.process import DIE_WITH_PARENT_VARIABLE, die_with_parent

PROGRESS_S = 0.1
BURST_MAX = 100
"""This many late records are sent before other tasks have their turn: a late worker must not starve its own client."""
EARLY_NS_MAX = 100_000
_DUE = struct.Struct(">Q")
_OUTPUT = threading.Lock()
"""Held by the thread that writes a line."""


class Task(BaseModel):
    """The task of a worker."""

    model_config = ConfigDict(frozen=True)

    role: Literal["produce", "consume"]
    index: int
    """The index among the workers of its role."""
    workload: Workload
    settings: dict[str, Any] = Field(default_factory=dict)
    """The contestant's settings, see `bench.compare.contestant.Command`."""

    @property
    def rate(self) -> float:
        """Records per second of this producer; 0: as fast as possible."""
        return self.workload.rate / self.workload.producers

    @property
    def records_max(self) -> int | None:
        """The number of records of a backlog; None: only the time is a bound."""
        whole, producers = self.workload.backlog_records, self.workload.producers
        return whole // producers + (self.index < whole % producers) if whole else None

    @property
    def partitions(self) -> list[tuple[int, int]]:
        """(stream, streamlet) of the partitions that a consumer reads, or that a producer writes to."""
        workload = self.workload
        every = [(stream, each) for stream in range(workload.streams) for each in range(workload.streamlets)]
        if self.role == "consume":
            return every[self.index :: workload.consumers]
        return [(stream, each) for stream, each in every if stream in self.streams]

    @property
    def streams(self) -> list[int]:
        """The streams of this worker. Producers share them; if there are more producers, streams have several."""
        workload = self.workload
        if self.role == "consume":
            return sorted({stream for stream, _ in self.partitions})
        if workload.producers >= workload.streams:
            return [self.index % workload.streams]
        return list(range(self.index, workload.streams, workload.producers))


@dataclass
class Result:
    """The result of a worker."""

    records: int
    """Records acknowledged, or seen, during the counted time."""
    bytes: int
    """Size of their values."""
    start_ns: int
    end_ns: int
    sent: int = 0
    """From beginning to end."""
    acknowledged: int = 0
    """Records that were acknowledged. Less than `sent`: something was lost, and the round has failed."""
    seen: int = 0
    """A consumer's, from beginning to end."""
    peak_rss_bytes: int = 0
    cpu_s: float | None = None
    """Processor time of the counted time. None: the parent measures the process and its descendants itself."""
    latencies: dict[str, str] = field(default_factory=dict)
    """`Latencies.encode` of ack, end_to_end, and late (the worker's own delay)."""
    errors: list[str] = field(default_factory=list)


# -- records ---------------------------------------------------------------------------------------------------


def make_values(record_bytes: int, count: int) -> list[bytes]:
    """Random hexadecimal digits: zeros would favour compression, and pure noise would penalise it."""
    text = os.urandom(record_bytes * count // 2 + 1).hex().encode()
    return [text[at : at + record_bytes] for at in range(0, record_bytes * count, record_bytes)]


def make_keys(workload: Workload, count: int, seed: int = 0) -> list[bytes] | None:
    """Keys of `count` records, by the workload's distribution; None: it has no keys.

    zipf: the k-th key has a probability in proportion to 1/k^0.99, as in YCSB.
    """
    if workload.keys == "none":
        return None
    random = np.random.default_rng(seed)
    weights = np.ones(workload.key_count)
    if workload.keys == "zipf":
        weights = 1 / np.arange(1, workload.key_count + 1) ** 0.99
    chosen = random.choice(workload.key_count, size=count, p=weights / weights.sum())
    return [b"key-%08d" % number for number in chosen]


def stamped(due_ns: int, rest: bytes) -> bytes:
    """The value of a record with this due time."""
    return _DUE.pack(due_ns) + rest


def due_of(value: bytes | memoryview) -> int:
    """The due time of a `stamped` value's record."""
    return int(_DUE.unpack_from(value)[0])


# -- pace ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """When records are due: one every 1/rate seconds from `start_ns` until `end_ns`."""

    start_ns: int
    end_ns: int
    rate: float

    def __iter__(self) -> Iterator[int]:
        number = 0
        while (due_ns := self.start_ns + int(number * 1e9 / self.rate)) < self.end_ns:
            yield due_ns
            number += 1


async def paced(
    schedule: Schedule,
    sleep_until: Callable[[int], Awaitable[None]],
    late: Callable[[int], None],
    now: Callable[[], int] = time.monotonic_ns,
) -> AsyncIterator[int]:
    """Yield each due time, not before it. `late` gets the delay of each; nothing is skipped."""
    burst = 0
    for due_ns in schedule:
        now_ns = now()
        if now_ns < due_ns or burst == BURST_MAX:
            await sleep_until(due_ns)
            now_ns, burst = now(), 0
        burst += 1
        late(max(0, now_ns - due_ns))
        yield due_ns


def early_ns(rate: float) -> int:
    """How long before its time a pacer at this rate wakes up, to spend the rest looking at the clock.

    Waking up takes a virtual machine 50 to 100 µs, which would count as latency of all contestants. At most a tenth of
    a core is spent on it.
    """
    return min(EARLY_NS_MAX, int(1e8 / rate))


class Timer:
    """Sleeps to the microsecond in an event loop, whose own timers are of milliseconds: a timerfd."""

    _CLOCK_MONOTONIC, _ABSOLUTE = 1, 1
    _FLAGS = os.O_NONBLOCK | os.O_CLOEXEC

    def __init__(self, early_ns: int) -> None:
        self._early_ns = early_ns
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._loop = asyncio.get_running_loop()
        self._fd = self._libc.timerfd_create(self._CLOCK_MONOTONIC, self._FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._waiter: asyncio.Future[None] | None = None
        self._loop.add_reader(self._fd, self._fired)

    def _fired(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def sleep_until(self, due_ns: int) -> None:
        """Return when it is `due_ns` of the monotonic clock; even if that is over, lets others run."""
        wake_ns = due_ns - self._early_ns
        if wake_ns <= time.monotonic_ns():
            await asyncio.sleep(0)
        else:
            await self._fires(wake_ns)
        while time.monotonic_ns() < due_ns:
            pass

    async def _fires(self, wake_ns: int) -> None:
        self._waiter = self._loop.create_future()
        interval = (ctypes.c_long * 4)(0, 0, *divmod(wake_ns, 10**9))  # struct itimerspec: no repetition, then the time
        if self._libc.timerfd_settime(self._fd, self._ABSOLUTE, interval, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        await self._waiter

    def close(self) -> None:
        """Give the descriptor back."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


# -- the worker ------------------------------------------------------------------------------------------------


class Worker:
    """A producer's or consumer's side of the dialogue, and its figures. Several threads may use it where it says so."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.workload = task.workload
        self.start_ns = self.end_ns = 0
        """Records between these times count."""
        self.stopped = threading.Event()
        """Set when a consumer should return."""
        self.errors: list[str] = []
        """Errors that did not end the worker."""
        self.own: Result | None = None
        """The result of a program that has counted itself, in place of the counts here."""
        self._latencies: dict[str, Latencies] = {}
        self._began_ns = self._last_ns = 0
        self._sent = self._acknowledged = self._seen = self._counted = 0
        self._on_stop: Callable[[], None] = lambda: None

    # -- the talk

    async def begin(self) -> None:
        """Report that it is ready, and wait until it should begin."""
        await asyncio.to_thread(self.begin_blocking)

    def begin_blocking(self) -> None:
        """The same without an event loop."""
        answer({"ready": True})
        word, start_ns = sys.stdin.readline().split()
        if word != "go":
            raise RuntimeError(f"told {word} instead of go")
        self._began_ns = self._last_ns = time.monotonic_ns()
        self.start_ns = int(start_ns)
        self.end_ns = self.start_ns + int(self.workload.seconds * 1e9)
        if self.task.role == "consume":
            threading.Thread(target=self._listen, daemon=True).start()
            threading.Thread(target=self._tell, daemon=True).start()

    def _listen(self) -> None:
        sys.stdin.readline()
        self.stopped.set()
        self._on_stop()

    def _tell(self) -> None:
        while not self.stopped.wait(PROGRESS_S):
            answer({"seen": self._seen})

    async def until_stopped(self, reading: Awaitable[None]) -> None:
        """Let `reading` run until nothing more is expected; then cancel it."""
        task, loop = asyncio.ensure_future(reading), asyncio.get_running_loop()

        def stop() -> None:
            loop.call_soon_threadsafe(task.cancel)

        self._on_stop = stop
        if self.stopped.is_set():
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    # -- producers

    @property
    def more(self) -> int:
        """Without a rate: how many records may still be sent; 0: it is time to end."""
        if self.task.records_max is not None:
            return self.task.records_max - self._sent
        return sys.maxsize if time.monotonic_ns() < self.end_ns else 0

    async def due(self, records: int = 1) -> AsyncIterator[int]:
        """With a rate: the times when this many records are due at once, each at its time."""
        timer = Timer(early_ns(self.task.rate))
        try:
            async for due_ns in paced(self._schedule(records), timer.sleep_until, self._late):
                yield due_ns
        finally:
            timer.close()

    def due_blocking(self) -> Iterator[int]:
        """The same without an event loop."""
        precise_sleep()
        early = early_ns(self.task.rate)
        for due_ns in self._schedule():
            while (left_ns := due_ns - time.monotonic_ns()) > 0:
                time.sleep(max(0, left_ns - early) / 1e9)  # sleeping 0 s lets other threads have the interpreter
            self._late(max(0, time.monotonic_ns() - due_ns))
            yield due_ns

    def _schedule(self, records: int = 1) -> Schedule:
        # Producers alternate: together they are one steady stream of records.
        offset_ns = int(self.task.index * records * 1e9 / self.workload.rate)
        return Schedule(self._began_ns + offset_ns, self.end_ns, self.task.rate / records)

    def _late(self, late_ns: int) -> None:
        if time.monotonic_ns() >= self.start_ns:
            self.latencies("late").add(late_ns)

    def sent(self, records: int = 1) -> None:
        """Count records that were given to the client."""
        self._sent += records

    def acknowledged(self, records: int = 1, due_ns: int | None = None) -> None:
        """Count acknowledged ones of those `sent`. `due_ns`: with a rate, when it was due; without, when it was given
        to the client, or None for the many that are not timed. By one thread only, whichever it is.
        """
        now_ns = time.monotonic_ns()
        self._acknowledged += records
        self._last_ns = now_ns
        if self.start_ns <= now_ns < self.end_ns:
            self._counted += records
        if due_ns is not None and self.start_ns <= due_ns < self.end_ns:
            self.latencies("ack").add(now_ns - due_ns, records)

    # -- consumers

    def seen(self, records: int, now_ns: int | None = None) -> None:
        """Count records that the client has delivered, at `now_ns` or just now."""
        now_ns = now_ns or time.monotonic_ns()
        self._seen += records
        self._last_ns = now_ns
        if self.start_ns <= now_ns < self.end_ns:
            self._counted += records

    def arrived(self, due_ns: int, now_ns: int, records: int = 1) -> None:
        """With a rate, besides `seen`: note the due time of records, as their value says."""
        if self.start_ns <= due_ns < self.end_ns:
            self.latencies("end_to_end").add(now_ns - due_ns, records)

    # -- figures

    def latencies(self, name: str) -> Latencies:
        """The latencies of a name."""
        found = self._latencies.get(name)
        if found is None:
            found = self._latencies[name] = Latencies()
        return found

    @property
    def counted(self) -> int:
        """The records that count, so far."""
        return self._counted

    def take_latencies(self) -> dict[str, str]:
        """`Latencies.encode` of all latencies since they were last taken."""
        taken, self._latencies = self._latencies, {}
        return {name: each.encode() for name, each in taken.items()}

    def result(self) -> Result:
        """The result of the worker."""
        if self.own is not None:
            return self.own
        backlog = bool(self.workload.backlog_bytes)
        return Result(
            records=self._counted,
            bytes=self._counted * self.workload.record_bytes,
            start_ns=self.start_ns,
            end_ns=self._last_ns if backlog else self.end_ns,
            sent=self._sent,
            acknowledged=self._acknowledged,
            seen=self._seen,
            peak_rss_bytes=peak_rss_bytes(os.getpid()),
            latencies=self.take_latencies(),
            errors=self.errors,
        )


def run_async(produce: Callable[[Worker], Awaitable[None]], consume: Callable[[Worker], Awaitable[None]]) -> int:
    """Be the worker that standard input describes, with functions for an event loop."""

    async def work(worker: Worker) -> None:
        await (produce if worker.task.role == "produce" else consume)(worker)

    return _run(lambda worker: uvloop.run(work(worker)))


def run(produce: Callable[[Worker], None], consume: Callable[[Worker], None]) -> int:
    """Be the worker that standard input describes, without an event loop."""
    return _run(lambda worker: (produce if worker.task.role == "produce" else consume)(worker))


def _run(work: Callable[[Worker], None]) -> int:
    os.environ.setdefault(DIE_WITH_PARENT_VARIABLE, "1")
    die_with_parent()
    worker = Worker(Task.model_validate_json(sys.stdin.readline()))
    try:
        work(worker)
    except Exception as error:  # noqa: BLE001 - any error of a client is its result
        answer({"error": f"{type(error).__name__}: {error}"})
        return 1
    worker.stopped.set()
    answer(asdict(worker.result()))
    threading.Event().wait()  # the parent looks at the process before ending it
    return 0


def answer(message: dict[str, Any]) -> None:
    """Write a line of standard output, from any thread."""
    with _OUTPUT:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def precise_sleep() -> None:
    """Let this thread's sleeps end in time: the kernel may make them 50 µs longer, to wake up less often."""
    pr_set_timerslack = 29
    ctypes.CDLL(None).prctl(pr_set_timerslack, 1)


def peak_rss_bytes(pid: int) -> int:
    """The peak of the process's memory in RAM; shared memory counts in full."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0
