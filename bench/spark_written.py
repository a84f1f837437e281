"""How fast Spark counts what was written at a low rate: without linger, with a latency target, and in full chunks.

    python -m bench.spark_written

A producer sends 20,000 records a second with keys into 64 streamlets, each by itself, as an application does: without
linger, with ``latency_target_ms=200``, and in chunks of 64 KiB that go when they are full, each into a stream of its
own, in the broker's memory. Then Spark counts each stream (`DataFrame.count`), in turns, after rounds that are not
counted, with the columnar engine and the Python one; the best of each counts. Checked: it counts what was sent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from bench.common import Figures, broker, directory, parser, say
from bench.cpu import tree_s
from bench.spark_engines import session
from bench.spark_read import Wrong, jvm_pid
from kera.client import Client, ConsumerSettings, Producer
from kera.core.base.settings import KIB, MIB

ENGINES = ("columnar", "python")
WAYS: Mapping[str, Mapping[str, Any]] = {
    "no linger": {"linger_ms": 0},
    "target": {"latency_target_ms": 200},
    "full chunks": {"linger_ms": 3_600_000, "chunk_bytes_max": 64 * KIB},
}
RECORD_BYTES = 100
KEYS = 10_000
TICK_S = 0.001
STORED_BYTES = 1_000
"""Size of a record, over all streams: one with a chunk for each, and two with shared chunks."""
SEGMENTS = 4
"""Maximum of a streamlet's segments that are not full."""


def stream_of(way: str) -> str:
    """The stream of a way to write."""
    return way.replace(" ", "-")


async def send(producer: Producer, stream: str, rate: int, seconds: float) -> int:
    """Send the records that are due each millisecond; returns their number."""
    value, keys = b"x" * RECORD_BYTES, [b"key-%d" % number for number in range(KEYS)]
    sent, begun_s = 0, time.perf_counter()
    while (gone_s := time.perf_counter() - begun_s) < seconds:
        for number in range(sent, int(gone_s * rate)):
            producer.send(stream, value, keys=keys[number % KEYS])
            sent += 1
        await producer.drain()
        await asyncio.sleep(TICK_S)
    await producer.flush()
    return sent


async def chunks_of(client: Client, stream: str) -> int:
    """The number of chunks of a stream."""
    settings, found = ConsumerSettings.load(shared_memory="never", joined_bytes_max=0), 0
    for streamlet, entries in (await client.bounds(stream)).items():
        for number, entry in enumerate(entries):
            chunks = client.read_range(stream, streamlet, number, entry.start, entry.end, settings=settings)
            async with contextlib.aclosing(chunks):  # type: ignore[type-var]  # it is a generator
                found += len([chunk async for chunk in chunks])
    return found


async def write(bootstrap: str, arguments: argparse.Namespace, figures: Figures) -> dict[str, int]:
    """Write all streams; returns the number of records of each."""
    sent = {}
    async with await Client.connect(bootstrap) as client:
        for way, settings in WAYS.items():
            await client.admin.create_stream(stream_of(way), streamlets=arguments.streamlets)
            async with client.producer(**settings) as producer:
                await producer.prepare(stream_of(way))
                sent[way] = await send(producer, stream_of(way), arguments.rate, arguments.seconds)
            chunks = await chunks_of(client, stream_of(way))
            say(f"{way}: {sent[way]:,} records in {chunks:,} chunks")
            figures.add(f"{way}, records in a chunk", sent[way] / chunks, "")
    return sent


def count(spark: SparkSession, bootstrap: str, way: str, engine: str) -> tuple[int, float, float]:
    """The number of records, the seconds, and the processor seconds."""
    reader = spark.read.format("kera").option("kera.bootstrap.servers", bootstrap).option("engine", engine)
    if engine == "python":  # the Python engine cannot know which columns are used
        reader = reader.schema("value binary")
    frame, pid = reader.load(stream_of(way)), jvm_pid(spark)
    begun_s, begun_cpu_s = time.perf_counter(), tree_s([pid])
    found = frame.count()
    return found, time.perf_counter() - begun_s, tree_s([pid]) - begun_cpu_s


async def run(arguments: argparse.Namespace, root: Path) -> None:
    """Write, count, and print."""
    figures = Figures("spark_written", arguments, root)
    records = int(arguments.rate * arguments.seconds)
    arena_bytes = (records * STORED_BYTES // MIB + SEGMENTS * len(WAYS) * arguments.streamlets) * MIB
    async with broker(None, arena_bytes=arena_bytes, segment_bytes=MIB) as made:
        bootstrap = made.cluster.bootstrap
        sent = await write(bootstrap, arguments, figures)
        spark = await asyncio.to_thread(session, 2, root, (), columnar="columnar" in arguments.engines)
        try:
            for number in range(-arguments.warm_rounds, arguments.rounds):
                say(f"round {number + 1}")
                for way, engine in product(WAYS, arguments.engines):
                    found, taken_s, cpu_s = await asyncio.to_thread(count, spark, bootstrap, way, engine)
                    if found != sent[way]:
                        raise Wrong(f"{way}, {engine}: {found:,} of {sent[way]:,}")
                    if number >= 0:
                        figures.add(f"{way}, {engine}", found / taken_s / 1e6, "M rows/s")
                        figures.add(f"{way}, {engine}, CPU", found / max(cpu_s, 0.01) / 1e6, "M rows/processor second")
        finally:
            spark.stop()
    print_table(figures, arguments.engines)


def print_table(figures: Figures, engines: list[str]) -> None:
    """The best of each, relative to no linger, in Markdown; then all samples as JSON."""
    print("| written | records in a chunk | engine | M rows/s | of no linger | M rows per processor second | |")
    print("|---|--:|---|--:|--:|--:|--:|")
    for engine, way in product(engines, WAYS):
        cells = []
        for what in ("", ", CPU"):
            best = figures.best(f"{way}, {engine}{what}")
            cells.append(f"{best:.2f} | {best / figures.best(f'no linger, {engine}{what}'):.1f} x")
        print(f"| {way} | {figures.cell(f'{way}, records in a chunk')} | {engine} | {' | '.join(cells)} |")
    print("\n" + figures.json(), flush=True)


def main() -> int:
    """Measure as the command line says."""
    made = parser(__doc__)
    made.add_argument("--rate", type=int, default=20_000, help="records a second")
    made.add_argument("--seconds", type=float, default=30.0, help="for so long each stream is written")
    made.add_argument("--streamlets", type=int, default=64)
    made.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--warm-rounds", type=int, default=3)
    arguments = made.parse_args()
    with directory(arguments) as root:
        asyncio.run(run(arguments, root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
