"""The cost of a record that travels alone: ``python -m bench.lone``.

Processor time of each record in client, broker and backup, and the time until it is acknowledged: back to back, where
each record is sent when the one before it is acknowledged, and at 1,000 records a second, where caches are cold. Also
the synchronous SDK beside the asynchronous one, and batches of eight rows, for 1,024 streamlets in turn. The processor
time of the same loop without records is subtracted from the client's at a rate. All share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import uvloop

from bench.common import IN_MEMORY, Broker, Figures, broker, directory, parser
from bench.cpu import run_s
from kera.client import Client, Producer
from kera.client.sync import Client as SyncClient
from kera.core.base.settings import MIB
from kera.local.cluster import BACKUP

RATE = 1000
VALUE = b"x" * 128
ROWS = 8
STREAMLETS = 1024
WARM = 500
"""Records before the measurement."""
ARENA_BYTES = 1024 * MIB


class _Watch:
    """Processor time of client and daemons since its creation."""

    def __init__(self, made: Broker) -> None:
        pids = {name: pid for name, pid in made.cluster.processes.items() if name.startswith(("broker", BACKUP))}
        self._daemons = {name.split("-", maxsplit=1)[0]: pid for name, pid in pids.items()}
        self._begun = self._now()

    def _now(self) -> dict[str, float]:
        return {"client": time.process_time()} | {name: run_s(pid) for name, pid in self._daemons.items()}

    def since(self) -> dict[str, float]:
        """Seconds of each process."""
        return {name: now_s - self._begun[name] for name, now_s in self._now().items()}


async def _paced(count: int, do: Callable[[], Awaitable[object]]) -> None:
    """Await `do` `count` times, `RATE` times a second."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    for number in range(count):
        wait_s = begun_s + number / RATE - loop.time()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        await do()


async def _nothing() -> None:
    """Send no record."""


async def _alone(figures: Figures, made: Broker, producer: Producer, name: str, count: int, *, paced: bool) -> None:
    took_us: list[float] = []

    async def one() -> None:
        begun_ns = time.perf_counter_ns()
        await producer.send("lone", VALUE)
        took_us.append((time.perf_counter_ns() - begun_ns) / 1000)

    for _ in range(WARM):
        await one()
    took_us.clear()
    idle: dict[str, float] = {}
    if paced:
        watch = _Watch(made)
        await _paced(count, _nothing)
        idle = watch.since()
    watch = _Watch(made)
    if paced:
        await _paced(count, one)
    else:
        for _ in range(count):
            await one()
    for who, seconds in watch.since().items():
        figures.add(f"{name}: {who}", (seconds - idle.get(who, 0.0)) / count * 1e6, "µs of processor")
    for share in (50, 99):
        figures.add(f"{name}: p{share}", float(np.percentile(took_us, share)), "µs")


async def _small_batches(figures: Figures, made: Broker, client: Client, count: int) -> None:
    batch = pa.record_batch({"value": pa.array([VALUE] * ROWS, pa.binary())})
    async with client.producer() as producer:
        await producer.prepare("wide")
        for counted in (False, True):
            watch, begun_s = _Watch(made), time.perf_counter()
            for number in range(count):
                await producer.send_batch("wide", batch, streamlet=number % STREAMLETS)
            await producer.flush()
            if counted:
                rows = count * ROWS / 1000
                figures.add(f"batches of {ROWS} rows", rows / (time.perf_counter() - begun_s), "1000 records/s")
                figures.add(f"batches of {ROWS} rows: client", watch.since()["client"] / count * 1e6, "µs of processor")


async def _all(figures: Figures, folder: Path, arguments: argparse.Namespace) -> None:
    for backups in range(arguments.backups + 1):
        async with (
            broker(
                folder / str(backups), arena_bytes=ARENA_BYTES, segment_bytes=MIB, backups=backups, **IN_MEMORY
            ) as made,
            await Client.connect(made.cluster.bootstrap) as client,
        ):
            level = "replicated" if backups else "leader"
            await client.admin.create_stream("lone", replication=backups, durability=level)
            async with client.producer() as producer:
                await producer.prepare("lone")
                for _ in range(arguments.rounds):
                    await _alone(figures, made, producer, f"{level}, back to back", arguments.records, paced=False)
                    await _alone(figures, made, producer, f"{level}, {RATE}/s", RATE * arguments.seconds, paced=True)
            if backups:
                continue
            await client.admin.create_stream("wide", streamlets=STREAMLETS)
            for _ in range(arguments.rounds):
                await _small_batches(figures, made, client, arguments.records)
                rate = await _one_by_one(client, arguments.records)
                sync_rate = await asyncio.to_thread(_sync_one_by_one, made.cluster.bootstrap, arguments.records)
                figures.add("awaited one by one: with asyncio", rate, "records/s")
                figures.add("awaited one by one: without", sync_rate, "records/s")
                figures.add("awaited one by one: without / with", sync_rate / rate, "×")


async def _one_by_one(client: Client, count: int) -> float:
    async with client.producer() as producer:
        await producer.prepare("lone")
        begun_s = time.perf_counter()
        for _ in range(count):
            await producer.send("lone", VALUE)
        return count / (time.perf_counter() - begun_s)


def _sync_one_by_one(bootstrap: str, count: int) -> float:
    with SyncClient(bootstrap) as client, client.producer() as producer:
        begun_s = time.perf_counter()
        for _ in range(count):
            producer.send("lone", VALUE).result()
        return count / (time.perf_counter() - begun_s)


def main() -> None:
    """Measure, and print."""
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--records", type=int, default=10_000, help="of a round, back to back")
    made.add_argument("--seconds", type=int, default=5, help=f"of a round, at {RATE} records a second")
    made.add_argument("--backups", type=int, choices=(0, 1), default=1)
    arguments = made.parse_args()
    with directory(arguments) as folder:
        figures = Figures("lone", arguments, folder)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_all(figures, folder, arguments))
    figures.print()


if __name__ == "__main__":
    main()
