"""The cost of the synchronous SDK, beside the asynchronous one: ``python -m bench.sync_sdk``.

Both do the same in turns, over the same cluster: records one by one, batches of a thousand, and reading both back.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import pyarrow as pa

from bench.common import Figures
from kera.client import Client as AsyncClient
from kera.client.sync import Client
from kera.local.cluster import LocalCluster

VALUE = b"x" * 100
BATCH_RECORDS = 1000
ARENA_BYTES = 512 << 20
HOW = ("sent one by one", "sent in batches", "read one by one", "read in batches")


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.sync_sdk", description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=200_000, help="of each kind, in a round")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kera-bench-") as directory:
        figures = Figures("sync_sdk", arguments, Path(directory))
        with LocalCluster.running(data_dir=Path(directory), arena_bytes=ARENA_BYTES) as cluster:
            for _ in range(arguments.rounds):
                for name, seconds in zip(HOW, asyncio.run(_async(cluster.bootstrap, arguments.records)), strict=True):
                    figures.add(f"{name}, asyncio", arguments.records / seconds / 1000, "1000/s")
                for name, seconds in zip(HOW, _sync(cluster.bootstrap, arguments.records), strict=True):
                    figures.add(f"{name}, without", arguments.records / seconds / 1000, "1000/s")
    for name in HOW:
        ratio = figures.median(f"{name}, without") / figures.median(f"{name}, asyncio")
        figures.notes[name] = f"without asyncio / with: {ratio:.2f}"
    figures.print()


def _check(read: int, count: int) -> None:
    expected = 2 * (count // BATCH_RECORDS) * BATCH_RECORDS
    if read != expected:
        raise SystemExit(f"{read} records were read, and not {expected}")


def _batch() -> pa.RecordBatch:
    return pa.record_batch({"value": pa.array([VALUE] * BATCH_RECORDS, pa.binary())})


async def _async(bootstrap: str, count: int) -> list[float]:
    seconds = []
    async with await AsyncClient.connect(bootstrap) as client:
        for stream in ("one", "many"):
            await client.admin.create_stream(stream)
        begun = time.perf_counter()
        async with client.producer() as producer:
            await producer.prepare("one")
            for number in range(count):
                producer.send("one", VALUE)
                if number % 100 == 0:
                    await producer.drain()
        seconds.append(time.perf_counter() - begun)
        begun, batch = time.perf_counter(), _batch()
        async with client.producer() as producer:
            for _ in range(count // BATCH_RECORDS):
                await producer.send_batch("many", batch)
        seconds.append(time.perf_counter() - begun)
        begun, read = time.perf_counter(), 0
        async with client.consumer("many", start="earliest", end="latest") as consumer:
            async for _ in consumer:
                read += 1
        seconds.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        async with client.consumer("many", start="earliest", end="latest") as consumer:
            async for each in consumer.batches():
                read += each.batch.num_rows
        seconds.append(time.perf_counter() - begun)
        _check(read, count)
        for stream in ("one", "many"):
            await client.admin.delete_stream(stream)
    return seconds


def _sync(bootstrap: str, count: int) -> list[float]:
    seconds = []
    with Client(bootstrap) as client:
        for stream in ("one", "many"):
            client.admin.create_stream(stream)
        begun = time.perf_counter()
        with client.producer() as producer:
            for _ in range(count):
                producer.send("one", VALUE)
        seconds.append(time.perf_counter() - begun)
        begun, batch = time.perf_counter(), _batch()
        with client.producer() as producer:
            for _ in range(count // BATCH_RECORDS):
                producer.send_batch("many", batch)
        seconds.append(time.perf_counter() - begun)
        begun, read = time.perf_counter(), 0
        with client.consumer("many", start="earliest", end="latest") as consumer:
            for _ in consumer:
                read += 1
        seconds.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        with client.consumer("many", start="earliest", end="latest") as consumer:
            for each in consumer.batches():
                read += each.batch.num_rows
        seconds.append(time.perf_counter() - begun)
        _check(read, count)
        for stream in ("one", "many"):
            client.admin.delete_stream(stream)
    return seconds


if __name__ == "__main__":
    main()
