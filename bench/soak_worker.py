"""A producer or the consumer of the soak, a process of its own: ``python -m bench.soak_worker``.

A worker as in `bench.compare.worker`, which also reports each interval since the measurement began::

    → {"number": 0, "records": …}   an `Interval`, when it is over; before its result

A producer gives ready batches to the SDK, each with the time at which it was due as the timestamp of its records (of
CLOCK_MONOTONIC, in microseconds), and all latencies count from there, however late it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import sys
import time
from collections.abc import AsyncIterator

import numpy as np
import pyarrow as pa

from bench.compare.kera_worker import Acknowledgements
from bench.compare.worker import Worker, answer, run_async
from kera.cli.bench._payload import make_batch, records_per_chunk
from kera.client import Client, Consumer
from kera.core.base.settings import MIB

BUFFER_BYTES = 16 * MIB
"""Less than usual: records that wait in it while the machine is busy must not look like a leak."""


@dataclasses.dataclass
class Interval:
    """The figures of one interval: its start is ``number`` times its length after the start of the measurement."""

    number: int
    records: int
    """Records acknowledged, or seen."""
    latencies: dict[str, str]
    """`Latencies.encode` of "ack" and "late" (of the producer itself), or of "end_to_end"."""


@contextlib.asynccontextmanager
async def _intervals(worker: Worker) -> AsyncIterator[None]:
    """Report each interval when it is over; the last one may be cut off."""

    async def tell() -> None:
        told = 0
        for number in itertools.count():
            end_ns = worker.start_ns + int((number + 1) * worker.task.settings["interval_s"] * 1e9)
            await asyncio.sleep(max(0.0, (end_ns - time.monotonic_ns()) / 1e9))
            counted = worker.counted
            answer(dataclasses.asdict(Interval(number, counted - told, worker.take_latencies())))
            told = counted

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()


async def produce(worker: Worker) -> None:
    """Send batches at the rate, or as fast as possible."""
    workload, settings = worker.workload, worker.task.settings
    chunk_bytes, stream = int(workload.batch_bytes), settings["stream"]
    rows = records_per_chunk(workload.record_bytes, chunk_bytes)
    batch = make_batch(workload.record_bytes, rows)
    async with (
        await Client.connect(settings["bootstrap"]) as client,
        client.producer(chunk_bytes_max=chunk_bytes, buffer_bytes_max=BUFFER_BYTES) as producer,
    ):
        await producer.prepare(stream)
        await worker.begin()
        async with _intervals(worker), Acknowledgements(worker) as acknowledgements:
            async for due_ns in worker.due(rows) if worker.task.rate else _at_once(worker):
                delivery = await producer.send_batch(stream, _due(batch, due_ns))
                worker.sent(rows)
                acknowledgements.follow(delivery, rows, due_ns)
            await producer.flush()


async def _at_once(worker: Worker) -> AsyncIterator[int]:
    while worker.more:
        yield time.monotonic_ns()


def _due(batch: pa.RecordBatch, due_ns: int) -> pa.RecordBatch:
    """The batch with another time; the other columns share its memory."""
    at = batch.schema.get_field_index("timestamp")
    field = batch.schema.field(at)
    times = pa.py_buffer(np.full(batch.num_rows, due_ns // 1000))
    return batch.set_column(at, field, pa.Array.from_buffers(field.type, batch.num_rows, [None, times]))


async def consume(worker: Worker) -> None:
    """Read everything, as it is pushed."""
    settings = worker.task.settings
    async with (
        await Client.connect(settings["bootstrap"]) as client,
        client.consumer(settings["stream"], start="earliest", shared_memory="always") as consumer,
    ):
        await worker.begin()
        async with _intervals(worker):
            await worker.until_stopped(_read(worker, consumer))


async def _read(worker: Worker, consumer: Consumer) -> None:
    async for chunk in consumer.batches():
        now_ns, rows = time.monotonic_ns(), chunk.batch.num_rows
        worker.seen(rows, now_ns)
        worker.arrived(chunk.batch.column("timestamp")[0].value * 1000, now_ns, rows)


if __name__ == "__main__":
    sys.exit(run_async(produce, consume))
