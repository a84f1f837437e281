"""How evenly the consumers of one consumer group share a small stream, and how fast they are together.

    python -m bench.shares
    python -m bench.shares --workers 1 4 --work-us 0 20 --rounds 5

A stream with one streamlet and one entry gets `--size` of records of `--record-bytes`, with the default settings of
streams and brokers. Each round reads it with a new consumer group of `--workers` processes: "before" reads what was
written before; "while" starts the consumers first, and writes at `--rate` then. A consumer takes records (or with
`--batches` whole batches), and waits `--work-us` for each record, as one does that asks a database. Printed: the share
of each consumer, the smallest one over all rounds, the throughput, and how many records came twice. It fails if one is
missing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import time
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa

from bench.common import TIMEOUT_S, directory, parser, say, size
from kera.client import Client
from kera.core.base.settings import MIB
from kera.local.cluster import LocalCluster

CONTEXT = get_context("spawn")
QUIET_S = 0.5
"""A round has ended when nothing has come for this long."""
BATCH_RECORDS = 1000
PAUSE_S = 0.005
"""A consumer works this long without a pause."""


@dataclass(frozen=True)
class Task:
    """The task of a consumer."""

    bootstrap: str
    group: str
    stream: str
    work_us: int
    batches: bool


# -- a consumer ------------------------------------------------------------------------------------------------------


def consume(task: Task, number: int, counts: Any, pipe: Connection) -> None:
    """Read until the end of the input; then report what was read, and when the last record came."""
    asyncio.run(_consume(task, number, counts, pipe))


async def _consume(task: Task, number: int, counts: Any, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    taken, last_s = array("Q"), [0.0]
    async with await Client.connect(task.bootstrap) as client:
        pipe.send("ready")
        await loop.run_in_executor(None, pipe.recv)
        async with client.group_consumer(task.group, task.stream) as consumer:
            reading = asyncio.create_task(_take(task, consumer, number, counts, taken, last_s))
            stopped = loop.run_in_executor(None, pipe.recv)
            await asyncio.wait({reading, stopped}, return_when=asyncio.FIRST_COMPLETED)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
            await consumer.commit()
    pipe.send((taken.tobytes(), last_s[0]))


async def _take(task: Task, consumer: Any, number: int, counts: Any, taken: array[int], last_s: list[float]) -> None:
    owed_s = 0.0
    async for first, count in _places(task, consumer):
        taken.extend(range(first, first + count))
        counts[number] += count
        last_s[0] = time.monotonic()
        owed_s += task.work_us * count / 1e6
        if owed_s >= PAUSE_S:
            await asyncio.sleep(owed_s)  # sleep: the work of a consumer
            owed_s = 0.0


async def _places(task: Task, consumer: Any) -> AsyncIterator[tuple[int, int]]:
    """The ordinal of the next records, and their number."""
    if task.batches:
        async for chunk in consumer.batches():
            yield chunk.header.first_record, chunk.batch.num_rows
    else:
        async for record in consumer:
            yield record.offset, 1


# -- a round ---------------------------------------------------------------------------------------------------------


async def write(client: Client, stream: str, arguments: argparse.Namespace, rate: int) -> float:
    """Write all records, at `rate` bytes a second (0: as fast as possible); returns the seconds."""
    begun = time.monotonic()
    async with client.producer() as producer:
        value = bytes(arguments.record_bytes)
        for first in range(0, arguments.records, BATCH_RECORDS):
            count = min(BATCH_RECORDS, arguments.records - first)
            await producer.send_batch(stream, pa.record_batch({"value": [value] * count}))
            due_s = begun + (first + count) * arguments.record_bytes / rate if rate else 0.0
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))  # sleep: the rate that was asked for
    return time.monotonic() - begun


@dataclass(frozen=True)
class Round:
    """The figures of a round."""

    counts: list[int]
    seconds: float
    missing: int
    twice: int


async def read(task: Task, workers: int, arguments: argparse.Namespace, writing: Any = None) -> Round:
    """Run one round."""
    counts = CONTEXT.Array("Q", workers, lock=False)
    pipes, processes = [], []
    for number in range(workers):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=consume, args=(task, number, counts, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        await asyncio.to_thread(pipe.recv)
    begun_s = time.monotonic()
    for pipe in pipes:
        pipe.send("go")
    running = asyncio.create_task(writing()) if writing is not None else None
    seen, since_s = -1, begun_s
    while sum(counts) < arguments.records or time.monotonic() - since_s < QUIET_S:
        if sum(counts) != seen:
            seen, since_s = sum(counts), time.monotonic()
        if time.monotonic() - begun_s > TIMEOUT_S:
            break
        await asyncio.sleep(0.02)
    if running is not None:
        await running
    found, last_s = array("Q"), 0.0
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("stop")
        taken, at_s = await asyncio.to_thread(pipe.recv)
        found.frombytes(taken)
        last_s = max(last_s, at_s)
        process.join()
    different = len(set(found))
    return Round(list(counts), last_s - begun_s, arguments.records - different, len(found) - different)


async def run(arguments: argparse.Namespace, cluster: Any) -> int:
    """Run all rounds; returns the number of missing records."""
    number, missing = itertools.count(), 0
    async with await Client.connect(cluster.bootstrap) as client:
        await client.admin.create_stream("before", streamlets=1)
        seconds = await write(client, "before", arguments, 0)
        print(f"written at {arguments.records * arguments.record_bytes / seconds / 1e6:.0f} MB/s")
        for workers, work_us, when in itertools.product(arguments.workers, arguments.work_us, arguments.when):
            rounds = []
            for _ in range(arguments.rounds):
                stream = "before" if when == "before" else f"while-{next(number)}"
                writing = None
                if when == "while":
                    await client.admin.create_stream(stream, streamlets=1)
                    writing = lambda stream=stream: write(client, stream, arguments, arguments.rate)  # noqa: E731
                task = Task(cluster.bootstrap, f"g-{next(number)}", stream, work_us, arguments.batches)
                rounds.append(await read(task, workers, arguments, writing))
            missing += sum(each.missing for each in rounds)
            show(arguments, f"{when:6} {workers} workers, {work_us:4} us a record", rounds)
    return missing


def show(arguments: argparse.Namespace, name: str, rounds: list[Round]) -> None:
    """Print the figures of the rounds of one kind."""
    shares = [[count / arguments.records for count in sorted(each.counts, reverse=True)] for each in rounds]
    rate = statistics.median(arguments.records * arguments.record_bytes / each.seconds / 1e6 for each in rounds)
    print(
        f"{name}: smallest share {min(map(min, shares)):.0%}, {rate:.1f} MB/s,"
        f" {sum(each.missing for each in rounds)} missing, {sum(each.twice for each in rounds)} twice; "
        + "; ".join("/".join(f"{share:.0%}" for share in each) for each in shares),
        flush=True,
    )


def main() -> None:
    """See the head of this module."""
    made = parser(__doc__)
    made.add_argument("--size", type=size, default=50_000_000, help="of all records")
    made.add_argument("--record-bytes", type=int, default=1000)
    made.add_argument("--workers", type=int, nargs="+", default=[4])
    made.add_argument("--work-us", type=int, nargs="+", default=[0, 100], help="for each record")
    made.add_argument("--when", nargs="+", choices=["before", "while"], default=["before", "while"])
    made.add_argument("--rate", type=size, default=20_000_000, help="of the writer, in bytes a second")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--batches", action="store_true", help="consumers take batches, not records")
    arguments = made.parse_args()
    arguments.records = arguments.size // arguments.record_bytes
    with directory(arguments) as path, LocalCluster.running(data_dir=path, arena_bytes=256 * MIB) as cluster:
        missing = asyncio.run(run(arguments, cluster))
    if missing:
        say(f"{missing} records are missing")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
