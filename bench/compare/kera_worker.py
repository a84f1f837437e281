"""A producer or consumer of KerA: ``python -m bench.compare.kera_worker``, see `bench.compare.worker`."""

from __future__ import annotations

import asyncio
import struct
import sys
import time
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from itertools import cycle
from typing import Any

import numpy as np
import pyarrow as pa

from bench.compare.worker import Task, Worker, due_of, make_keys, make_values, run_async, stamped
from bench.compare.workload import DUE_BYTES, Workload
from kera.cli.bench._payload import make_batch, records_per_chunk
from kera.client import Client, Producer
from kera.client.chunk_batch import ChunkBatch
from kera.client.settings import ProducerSettings

DIFFERENT = 10_000
"""The number of prepared records with keys, which are sent again and again."""
SENDS_PER_DRAIN = 100
TIMED_EACH = 4
"""One of this many batches is timed: timing each of them would cost a part of the measured time."""


async def produce(worker: Worker) -> None:
    """Write to the streams of this producer, in turn; each of its clients writes to all of them."""
    task = worker.task
    names = [task.settings["streams"][each] for each in task.streams]
    settings = {
        "chunk_bytes_max": int(task.workload.batch_bytes),
        "linger_ms": task.workload.linger_ms,
        **task.settings["producer"],
    }
    async with AsyncExitStack() as stack:
        producers = []
        for _ in range(task.workload.clients):
            client = await stack.enter_async_context(await Client.connect(task.settings["bootstrap"]))
            producers.append(await stack.enter_async_context(client.producer(**settings)))
            for name in names:
                await producers[-1].prepare(name)
        if task.rate:
            await _at_rate(worker, producers[0], names)
        elif task.workload.send == "record":
            await _records(worker, producers[0], names)
        else:
            await _batches(worker, producers, names)


async def _batches(worker: Worker, producers: list[Producer], names: list[str]) -> None:
    workload = worker.workload
    size = workload.batch_records or full_chunk(workload)
    if workload.keys != "none" and not workload.batch_records:
        size *= workload.streamlets  # keys spread it: a full chunk for each
    batch = _with_keys(make_batch(workload.record_bytes, size), worker.task)

    async def send(producer: Producer) -> None:
        for number, name in enumerate(cycle(names)):
            left = worker.more
            if not left:
                break
            some = batch if left >= size else batch.slice(0, left)
            given_ns = time.monotonic_ns()
            delivery = await producer.send_batch(name, some)
            worker.sent(some.num_rows)
            acknowledgements.follow(delivery, some.num_rows, None if number % TIMED_EACH else given_ns)
            if len(producers) > 1:
                await asyncio.sleep(0)  # lets other tasks run, even if this one never has to wait
        await producer.flush()

    await worker.begin()
    async with Acknowledgements(worker) as acknowledgements:
        await asyncio.gather(*map(send, producers))


def full_chunk(workload: Workload) -> int:
    """The number of a workload's records that fill a producer's chunk."""
    return records_per_chunk(workload.record_bytes, int(workload.batch_bytes), lean=ProducerSettings().lean)


def _with_keys(batch: pa.RecordBatch, task: Task) -> pa.RecordBatch:
    keys = make_keys(task.workload, batch.num_rows, task.index)
    if keys is None:
        return batch
    at = batch.schema.get_field_index("keys")
    column = pa.array([[key] for key in keys], batch.schema.field(at).type)
    return batch.set_column(at, batch.schema.field(at), column)


async def _records(worker: Worker, producer: Producer, names: list[str]) -> None:
    workload = worker.workload
    values = make_values(workload.record_bytes, DIFFERENT)
    keys = make_keys(workload, DIFFERENT, worker.task.index)
    await worker.begin()
    async with Acknowledgements(worker) as acknowledgements:
        at = 0
        for name in cycle(names):
            some = min(worker.more, SENDS_PER_DRAIN)
            if not some:
                break
            given_ns = time.monotonic_ns()
            # The last of a few stands for all: earlier records are acknowledged by then.
            if keys is None:
                for value in values[at : at + some - 1]:
                    producer.send(name, value)
                last = producer.send(name, values[at + some - 1])
            else:
                for value, key in zip(values[at : at + some - 1], keys[at:], strict=False):
                    producer.send(name, value, keys=key)
                last = producer.send(name, values[at + some - 1], keys=keys[at + some - 1])
            at = (at + SENDS_PER_DRAIN) % DIFFERENT
            worker.sent(some)
            acknowledgements.follow(last, some, given_ns)
            await producer.drain()
        await producer.flush()


async def _at_rate(worker: Worker, producer: Producer, names: list[str]) -> None:
    rest = make_values(worker.workload.record_bytes, 1)[0][DUE_BYTES:]
    keys = cycle([[key] for key in make_keys(worker.workload, DIFFERENT, worker.task.index) or []] or [[]])
    turn = cycle(names)
    await worker.begin()
    async with Acknowledgements(worker) as acknowledgements:
        async for due_ns in worker.due():
            pending = producer.send(next(turn), stamped(due_ns, rest), keys=next(keys))
            worker.sent()
            acknowledgements.follow(pending, 1, due_ns)
        await producer.flush()


class Acknowledgements(AbstractAsyncContextManager["Acknowledgements"]):
    """Reports acknowledgements to the worker; leaving the context waits for all."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._waiting: set[asyncio.Task[None]] = set()

    def follow(self, delivery: Awaitable[Any], records: int, due_ns: int | None) -> None:
        """See `Worker.acknowledged`. Each has a task: a shared one would be late itself, and count that as latency."""
        waiting = asyncio.create_task(self._follow(delivery, records, due_ns))
        self._waiting.add(waiting)
        waiting.add_done_callback(self._waiting.discard)

    async def _follow(self, delivery: Awaitable[Any], records: int, due_ns: int | None) -> None:
        await delivery
        self._worker.acknowledged(records, due_ns)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*self._waiting)


async def consume(worker: Worker) -> None:
    """Read from the start, in the workload's way."""
    task = worker.task
    names = [task.settings["streams"][each] for each in task.streams]
    settings: dict[str, Any] = {
        "shared_memory": "never" if task.workload.read == "pull" else "auto",
        **task.settings["consumer"],
    }
    async with await Client.connect(task.settings["bootstrap"]) as client:
        if len(task.partitions) == len(names) * task.workload.streamlets:
            consumer: Any = client.consumer(*names, start="earliest", **settings)
        else:  # some streamlets of a stream belong to others
            consumer = client.group_consumer(f"{names[0]}-readers", names, start="earliest", **settings)
        if not task.workload.backlog_bytes:
            await consumer.start()  # otherwise it would read before it should begin
        await worker.begin()
        async with consumer:
            await worker.until_stopped((_read_records if task.workload.read == "records" else _read)(worker, consumer))


async def _read(worker: Worker, consumer: Any) -> None:
    async for chunk in consumer.batches():
        now_ns = time.monotonic_ns()
        worker.seen(chunk.batch.num_rows, now_ns)
        if worker.task.rate:
            for due_ns in _due_times(chunk):
                worker.arrived(due_ns, now_ns)


def _due_times(chunk: ChunkBatch) -> list[int]:
    """The due times at the beginning of all values, read in place."""
    value = chunk.batch.column("value")
    _, offsets, data = value.buffers()
    starts = np.frombuffer(offsets, np.int32)[value.offset : value.offset + len(value)]
    return [struct.unpack_from(">Q", data, start)[0] for start in starts]


async def _read_records(worker: Worker, consumer: Any) -> None:
    async for record in consumer:
        if worker.task.rate:
            now_ns = time.monotonic_ns()
            worker.seen(1, now_ns)
            worker.arrived(due_of(record.value), now_ns)
        else:
            worker.seen(1)


if __name__ == "__main__":
    sys.exit(run_async(produce, consume))
