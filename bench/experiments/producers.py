"""Several producers in one process, each with connections of its own: ``python -m bench.experiments.producers``.

For points with more producers than a few cores can run processes. It is a worker of `bench.compare.worker`, which sees
them as one producer: together they do what `bench.compare.kera_worker` does with a single one. ``producers`` of its
settings says how many they are.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from itertools import cycle

from bench.compare.kera_worker import TIMED_EACH, consume, full_chunk
from bench.compare.worker import Worker, run_async
from kera.cli.bench._payload import make_batch
from kera.client import Client, Producer


async def produce(worker: Worker) -> None:
    """All of them at once, each in turns of its streams."""
    task = worker.task
    names = [task.settings["streams"][each] for each in task.streams]
    chunk_bytes = int(task.workload.batch_bytes)
    async with AsyncExitStack() as stack:
        producers = []
        for _ in range(task.settings["producers"]):
            client = await stack.enter_async_context(await Client.connect(task.settings["bootstrap"]))
            settings = {"chunk_bytes_max": chunk_bytes, **task.settings["producer"]}
            producer = await stack.enter_async_context(client.producer(**settings))
            for name in names:
                await producer.prepare(name)
            producers.append(producer)
        batch = make_batch(task.workload.record_bytes, full_chunk(task.workload))

        async def send(producer: Producer) -> None:
            turn = cycle(names)
            number = 0
            async with asyncio.TaskGroup() as waiting:
                while worker.more:
                    given_ns = None if number % TIMED_EACH else time.monotonic_ns()
                    delivery = await producer.send_batch(next(turn), batch)
                    worker.sent(batch.num_rows)
                    waiting.create_task(_acknowledged(worker, delivery, batch.num_rows, given_ns))
                    number += 1
                    await asyncio.sleep(0)  # the others' turn, even where this one never has to wait
                await producer.flush()

        await worker.begin()
        await asyncio.gather(*map(send, producers))


async def _acknowledged(worker: Worker, delivery: Awaitable[object], records: int, given_ns: int | None) -> None:
    await delivery
    worker.acknowledged(records, given_ns)


if __name__ == "__main__":
    sys.exit(run_async(produce, consume))
