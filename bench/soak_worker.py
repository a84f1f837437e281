"""A producer or the consumer of the soak, a process of its own: ``python -m bench.soak_worker``.

Like the workers of `bench.compare.worker`, of which it takes clock, pace and histograms; but it tells what it has seen
in each interval, for as long as it takes, instead of one result at the end:

    ← {"role": "produce", …}        its `Task`
    → {"ready": true}
    ← go START_NS                   of CLOCK_MONOTONIC: intervals count from there, in all processes alike
    → {"number": 0, "records": …}   an `Interval`, when it is over
    ← stop 4711                     a consumer: so many records there are in all; it ends when it has seen them
    → {"done": true, "records": …}  acknowledged, or seen, from beginning to end; or {"error": …}; then it ends

A producer gives ready batches to the SDK, each with the time at which it was due as the timestamp of its records (of
CLOCK_MONOTONIC, in microseconds), and all latencies count from there, however late it was.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Awaitable
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import uvloop

from bench.compare.worker import Latencies, Schedule, Timer, paced
from kera.cli.bench._payload import make_batch, records_per_chunk
from kera.client import Client
from kera.core.process import die_with_parent
from kera.core.settings import MIB

BUFFER_BYTES = 16 * MIB
"""Less than usual: what waits in it while the machine does something else must not look like a leak."""


@dataclasses.dataclass
class Task:
    """What a worker does."""

    role: Literal["produce", "consume"]
    bootstrap: str
    stream: str
    record_bytes: int
    chunk_bytes: int
    rate: float
    """Records per second of this producer; 0: as fast as it goes."""
    seconds: float
    interval_s: float


@dataclasses.dataclass
class Interval:
    """What happened in one: from ``number * interval_s`` after the start on."""

    number: int
    records: int
    """Acknowledged, or seen."""
    cpu_s: float
    latencies: dict[str, str]
    """`Latencies.encode` of "ack" and "late" (of the producer itself), or of "end_to_end"."""


class Teller:
    """Keeps the figures of the current interval, and tells them when it is over."""

    def __init__(self, task: Task, start_ns: int) -> None:
        self.records = 0
        """From beginning to end."""
        self._task = task
        self._start_ns = start_ns
        self._latencies: dict[str, Latencies] = {}
        self._told_records = 0
        self._told_cpu_s = time.process_time()

    def add(self, name: str, time_ns: int, records: int) -> None:
        """A latency of so many records."""
        if name not in self._latencies:
            self._latencies[name] = Latencies()
        self._latencies[name].add(time_ns, records)

    async def tell(self) -> None:
        """Each interval when it is over, until cancelled; the last one may be cut off."""
        number = 0
        while True:
            number += 1
            end_ns = self._start_ns + int(number * self._task.interval_s * 1e9)
            await asyncio.sleep(max(0.0, (end_ns - time.monotonic_ns()) / 1e9))
            cpu_s = time.process_time()
            latencies = {name: each.encode() for name, each in self._latencies.items()}
            interval = Interval(number - 1, self.records - self._told_records, cpu_s - self._told_cpu_s, latencies)
            self._latencies, self._told_records, self._told_cpu_s = {}, self.records, cpu_s
            _answer(dataclasses.asdict(interval))


async def produce(task: Task, client: Client) -> int:
    """Batches at the rate, or as fast as it goes. How many records were acknowledged."""
    rows = records_per_chunk(task.record_bytes, task.chunk_bytes)
    batch = make_batch(task.record_bytes, rows)
    async with client.producer(chunk_bytes_max=task.chunk_bytes, buffer_bytes_max=BUFFER_BYTES) as producer:
        await producer.prepare(task.stream)
        teller = Teller(task, start_ns := await _begin())
        waiting: set[asyncio.Task[None]] = set()

        async def acknowledged(delivery: Awaitable[Any], due_ns: int) -> None:
            await delivery
            teller.records += rows
            teller.add("ack", time.monotonic_ns() - due_ns, rows)

        async def send(due_ns: int) -> None:
            delivery = await producer.send_batch(task.stream, _due(batch, due_ns))
            # A task each: one that took them in turn would be late itself, and count that as theirs.
            following = asyncio.create_task(acknowledged(delivery, due_ns))
            waiting.add(following)
            following.add_done_callback(waiting.discard)

        telling = asyncio.create_task(teller.tell())
        end_ns = start_ns + int(task.seconds * 1e9)
        if task.rate:
            timer = Timer(early_ns=0)  # at so many batches a second there is no time to look at the clock
            schedule = Schedule(start_ns, end_ns, task.rate / rows)
            async for due_ns in paced(schedule, timer.sleep_until, lambda late_ns: teller.add("late", late_ns, 1)):
                await send(due_ns)
            timer.close()
        else:
            while (now_ns := time.monotonic_ns()) < end_ns:
                await send(now_ns)
        await producer.flush()
        await asyncio.gather(*waiting)
        telling.cancel()
        return teller.records


def _due(batch: pa.RecordBatch, due_ns: int) -> pa.RecordBatch:
    """The batch with another time; the other columns are the same memory."""
    at = batch.schema.get_field_index("timestamp")
    field = batch.schema.field(at)
    times = pa.py_buffer(np.full(batch.num_rows, due_ns // 1000))
    return batch.set_column(at, field, pa.Array.from_buffers(field.type, batch.num_rows, [None, times]))


async def consume(task: Task, client: Client) -> int:
    """Everything, as it is pushed. How many records."""
    total = sys.maxsize
    async with client.consumer(task.stream, start="earliest", shared_memory="always") as consumer:
        teller = Teller(task, await _begin())

        async def read() -> None:
            async for chunk in consumer.batches():
                now_ns = time.monotonic_ns()
                rows = chunk.batch.num_rows
                teller.records += rows
                teller.add("end_to_end", now_ns - chunk.batch.column("timestamp")[0].value * 1000, rows)
                if teller.records >= total:
                    return

        async def listen() -> None:
            nonlocal total
            total = int((await _next_line()).removeprefix("stop "))

        reading, listening = asyncio.create_task(read()), asyncio.create_task(listen())
        telling = asyncio.create_task(teller.tell())
        await asyncio.wait([reading, listening], return_when=asyncio.FIRST_COMPLETED)
        if teller.records < total:
            await reading  # also to learn why it has ended too early
        reading.cancel()
        telling.cancel()
        return teller.records


async def _begin() -> int:
    _answer({"ready": True})
    return int((await _next_line()).removeprefix("go "))


async def _next_line() -> str:
    line: str = await asyncio.to_thread(sys.stdin.readline)
    return line.strip()


def _answer(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


async def _work(task: Task) -> int:
    try:
        async with await Client.connect(task.bootstrap) as client:
            records = await (produce if task.role == "produce" else consume)(task, client)
        _answer({"done": True, "records": records})
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the soak's result
        _answer({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    die_with_parent()
    sys.exit(uvloop.run(_work(Task(**json.loads(sys.stdin.readline())))))
