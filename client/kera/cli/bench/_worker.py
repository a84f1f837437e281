"""The process of one producer or consumer of a benchmark: ``python -m kera.cli.bench._worker``.

It reads commands from standard input and answers on standard output, a JSON object or words per line:

    ← {"role": "produce", …}        the task, see `Task`
    → {"ready": true}               the worker is connected and warmed up
    ← go                            the worker begins
    ← total 10000                   to consumers: the number of all records, after which the worker stops
    → {"records": …, …}             the result, see `Result`
    → {"error": "…"}                in place of any answer; the process ends

Times are from the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Awaitable
from typing import Any, Literal

import uvloop

from kera.cli.bench._latency import Latencies
from kera.cli.bench._payload import make_batch, make_value, records_per_chunk
from kera.client import Client, ClientSettings, Consumer, Producer
from kera.core.base.process import die_with_parent
from kera.core.errors import KeraError

WARM_UP_BYTES = 32_000_000
"""Bytes that a producer sends before it is measured, to warm up connections, code and the broker's memory."""
WARM_UP_RECORDS_MAX = 50_000
SENDS_PER_DRAIN = 100
SENDS_PER_SAMPLE = 1000
CHUNKS_PER_SAMPLE = 4
"""One in this many chunks is timed when they are sent as fast as possible, as timing itself takes time."""
SAMPLES_PER_S_MAX = 20_000
RECORDS_PER_TICK_MAX = 1000
"""More records would overrun the producer's buffer between two drains."""
LATE_S_MAX = 1.0
"""How long a round at a fixed rate may overrun its time to send the records that are due."""


@dataclasses.dataclass
class Task:
    """The task of a worker; its fields travel as JSON."""

    role: str
    """produce or consume."""
    bootstrap: str
    stream: str
    warm_up_stream: str
    record_bytes: int
    mode: str
    """produce: send_batch or send. consume: batches or records."""
    transport: str
    records: int = 0
    """produce: the maximum number of records."""
    seconds: float | None = None
    rate: float = 0.0
    """Records per second of this producer; 0: as fast as possible."""
    chunk_bytes: int = 0
    producer_settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    consumer_settings: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Result:
    """The result of a worker."""

    records: int
    record_bytes: int
    """Size of all values together."""
    chunks: int
    start_ns: int
    end_ns: int
    cpu_s: float
    latencies: str
    """From `Latencies.encode`: times from sending to acknowledgement, or from a chunk's creation to its arrival."""


class ProduceWorker:
    """Sends records of one size to one stream."""

    def __init__(self, task: Task, client: Client) -> None:
        self._task = task
        self._producer: Producer = client.producer(**task.producer_settings)
        self._value = make_value(task.record_bytes)
        self._batch = make_batch(task.record_bytes, records_per_chunk(task.record_bytes, task.chunk_bytes))
        self._latencies = Latencies()
        self._timings: set[asyncio.Task[None]] = set()

    async def warm_up(self) -> None:
        """Send some records to another stream."""
        task = self._task
        records = min(WARM_UP_BYTES // task.record_bytes, WARM_UP_RECORDS_MAX) + 1
        if task.mode == "send_batch":
            records = WARM_UP_BYTES // task.record_bytes + 1
        await self._producer.prepare(task.stream)
        await self._producer.prepare(task.warm_up_stream)
        await self._send(task.warm_up_stream, records, None, 0)
        await self._finish()
        self._latencies = Latencies()

    async def run(self) -> Result:
        """Send all records; measure from the first record to the last acknowledgement."""
        task = self._task
        cpu_s, start_ns = time.process_time(), time.monotonic_ns()
        deadline_s = None if task.seconds is None else time.monotonic() + task.seconds
        records = await self._send(task.stream, task.records, deadline_s, task.rate)
        await self._finish()
        end_ns, cpu_s = time.monotonic_ns(), time.process_time() - cpu_s
        await self._producer.close()
        size = records * task.record_bytes
        return Result(records, size, 0, start_ns, end_ns, cpu_s, self._latencies.encode())

    async def _send(self, stream: str, records: int, deadline_s: float | None, rate: float) -> int:
        if rate:
            return await self._send_at_rate(stream, records, deadline_s, rate)
        if self._task.mode == "send_batch":
            return await self._send_batches(stream, records, deadline_s)
        return await self._send_records(stream, records, deadline_s)

    async def _send_batches(self, stream: str, records: int, deadline_s: float | None) -> int:
        sent = chunks = 0
        size = self._batch.num_rows
        while sent < records and (deadline_s is None or time.monotonic() < deadline_s):
            batch = self._batch if records - sent >= size else self._batch.slice(0, records - sent)
            start_ns = time.perf_counter_ns()
            delivery = await self._producer.send_batch(stream, batch)
            if chunks % CHUNKS_PER_SAMPLE == 0:
                self._time(delivery, start_ns)
            chunks += 1
            sent += batch.num_rows
        return sent

    async def _send_records(self, stream: str, records: int, deadline_s: float | None) -> int:
        producer, value = self._producer, self._value
        sent = 0
        while sent < records and (deadline_s is None or time.monotonic() < deadline_s):
            some = min(records - sent, SENDS_PER_DRAIN)
            if sent % SENDS_PER_SAMPLE == 0:
                start_ns = time.perf_counter_ns()
                self._time(producer.send(stream, value), start_ns)
                sent, some = sent + 1, some - 1
            for _ in range(some):
                producer.send(stream, value)
            sent += some
            await producer.drain()
        return sent

    async def _send_at_rate(self, stream: str, records: int, deadline_s: float | None, rate: float) -> int:
        """Send the records that are due, every millisecond; after a delay it sends more, so that the rate is kept.

        If the rate cannot be kept, it stops `LATE_S_MAX` after the deadline.
        """
        in_batches = self._task.mode == "send_batch"
        records_per_sample = max(1, round(rate / SAMPLES_PER_S_MAX))
        start_s = time.monotonic()
        if deadline_s is not None:
            records = min(records, round((deadline_s - start_s) * rate))
            deadline_s += LATE_S_MAX
        sent = 0
        while sent < records and (deadline_s is None or time.monotonic() < deadline_s):
            # Sleep at least a millisecond, even when records are due: a sender that is always behind would otherwise
            # send one record at a time and never let the producer work. uvloop's clock cannot sleep for less.
            await asyncio.sleep(max(0.001, start_s + sent / rate - time.monotonic()))
            due = min(records, int((time.monotonic() - start_s) * rate) + 1) - sent
            if due <= 0:
                continue
            start_ns = time.perf_counter_ns()
            if in_batches:
                due = min(due, self._batch.num_rows)
                self._time(await self._producer.send_batch(stream, self._batch.slice(0, due)), start_ns, due)
            else:
                due = min(due, RECORDS_PER_TICK_MAX)
                for number in range(sent, sent + due):
                    pending = self._producer.send(stream, self._value)
                    if number % records_per_sample == 0:
                        self._time(pending, time.perf_counter_ns())
                await self._producer.drain()
            sent += due
        return sent

    def _time(self, delivery: Awaitable[Any], start_ns: int, count: int = 1) -> None:
        async def wait() -> None:
            await delivery
            self._latencies.add(time.perf_counter_ns() - start_ns, count)

        timing = asyncio.create_task(wait())
        self._timings.add(timing)
        timing.add_done_callback(self._timings.discard)

    async def _finish(self) -> None:
        await self._producer.flush()
        if self._timings:
            await asyncio.gather(*self._timings)


class ConsumeWorker:
    """Reads a stream from its start until it has seen all records."""

    def __init__(self, task: Task, client: Client) -> None:
        self._task = task
        self._client = client
        self._latencies = Latencies()
        self._records = self._record_bytes = self._chunks = 0
        self._total: int | None = None
        self._last_ns = 0

    async def warm_up(self) -> None:
        """Read the records that the producers have sent for their warm-up."""
        async with self._consumer(self._task.warm_up_stream, end="latest") as consumer:
            await self._read(consumer)
        self._records = self._record_bytes = self._chunks = 0
        self._latencies = Latencies()

    async def run(self) -> Result:
        """Read all records; measure from the first request to the last record."""
        cpu_s, start_ns = time.process_time(), time.monotonic_ns()
        async with self._consumer(self._task.stream) as consumer:
            reading = asyncio.ensure_future(self._read(consumer))
            total = asyncio.ensure_future(_next_line())
            await asyncio.wait([reading, total], return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
            self._total = int((await total).removeprefix("total "))
            if self._records < self._total:
                await reading
            reading.cancel()
            await asyncio.wait([reading])
        cpu_s = time.process_time() - cpu_s
        return Result(
            self._records,
            self._record_bytes,
            self._chunks,
            start_ns,
            self._last_ns,
            cpu_s,
            self._latencies.encode(),
        )

    def _consumer(self, stream: str, end: Literal["latest"] | None = None) -> Consumer:
        return self._client.consumer(stream, start="earliest", end=end, **self._task.consumer_settings)

    async def _read(self, consumer: Consumer) -> None:
        if self._task.mode == "records":
            await self._read_records(consumer)
        else:
            await self._read_batches(consumer)

    async def _read_batches(self, consumer: Consumer) -> None:
        async for chunk in consumer.batches():
            # A batch of joined small chunks counts with the latency of its first chunk, the longest of them.
            self._latencies.add(time.time_ns() - chunk.header.created_us * 1000, chunk.batch.num_rows)
            self._chunks += chunk.chunks
            self._records += chunk.batch.num_rows
            self._record_bytes += chunk.batch.num_rows * self._task.record_bytes
            self._last_ns = time.monotonic_ns()
            if self._records == self._total:
                return

    async def _read_records(self, consumer: Consumer) -> None:
        async for record in consumer:
            self._records += 1
            self._record_bytes += len(record.value or b"")
            self._last_ns = time.monotonic_ns()
            if self._records == self._total:
                return


async def _next_line() -> str:
    line: str = await asyncio.to_thread(sys.stdin.readline)
    return line.strip()


def _answer(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


async def _work(task: Task) -> int:
    try:
        await _run(task)
    except KeraError as error:
        # Answer now: the end of the loop would wait for the thread that reads standard input.
        _answer({"error": error.message})
        return 1
    return 0


async def _run(task: Task) -> None:
    client = await Client.connect(task.bootstrap, ClientSettings.load(transport=task.transport))
    try:
        worker: Any = (ProduceWorker if task.role == "produce" else ConsumeWorker)(task, client)
        await worker.warm_up()
        _answer({"ready": True})
        if await _next_line() != "go":
            return
        _answer(dataclasses.asdict(await worker.run()))
    finally:
        await client.close()


if __name__ == "__main__":
    die_with_parent()
    sys.exit(uvloop.run(_work(Task(**json.loads(sys.stdin.readline())))))
