"""How many rows Spark reads in a second from small chunks, beside as many in large ones.

    python -m bench.spark_small

For each size a stream of one streamlet is written once, into the broker's memory, with lean chunks and records of 100
bytes; then Spark reads all values of it into a sink that does nothing. Pushed and pulled, with the columnar engine and
the Python one, in turns, after rounds that are not counted; the best of each counts. Processor seconds are those of the
JVM with all its processes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from itertools import product
from pathlib import Path

from pyspark.sql import SparkSession

from bench.common import Figures, broker, directory, parser, say, size
from bench.cpu import tree_s
from bench.read_cost import RECORD_BYTES, WAYS, fill, stream_of
from bench.spark_engines import noop, session
from bench.spark_read import jvm_pid
from kera.client import Client
from kera.core.base.settings import KIB, MIB

ENGINES = ("columnar", "python")


def read(spark: SparkSession, bootstrap: str, chunk_bytes: int, way: str, engine: str) -> tuple[float, float]:
    """Seconds, and processor seconds."""
    reader = spark.read.format("kera").option("kera.bootstrap.servers", bootstrap).option("engine", engine)
    reader = reader.option("sharedMemory", WAYS[way]).option("startingOffsets", "earliest")
    if engine == "python":  # the Python engine cannot know which columns are used
        reader = reader.schema("value binary")
    frame = reader.load(stream_of(chunk_bytes)).select("value")
    pid = jvm_pid(spark)
    begun_s, begun_cpu_s = time.perf_counter(), tree_s([pid])
    noop(frame)
    return time.perf_counter() - begun_s, tree_s([pid]) - begun_cpu_s


async def run(arguments: argparse.Namespace, root: Path) -> None:
    """Write, read, and print."""
    figures = Figures("spark_small", arguments, root)
    records = arguments.stream_bytes // RECORD_BYTES // 10_000 * 10_000
    arena_bytes = (len(arguments.chunk_bytes) * 2 * arguments.stream_bytes // (8 * MIB) + 8) * 8 * MIB
    async with broker(None, arena_bytes=arena_bytes, segment_bytes=8 * MIB) as made:
        bootstrap = made.cluster.bootstrap
        async with await Client.connect(bootstrap) as client:
            for chunk_bytes in arguments.chunk_bytes:
                await fill(client, chunk_bytes, records)
        spark = await asyncio.to_thread(session, 2, root, (), columnar="columnar" in arguments.engines)
        try:
            for number in range(-arguments.warm_rounds, arguments.rounds):
                say(f"round {number + 1}")
                for chunk_bytes, way, engine in product(arguments.chunk_bytes, WAYS, arguments.engines):
                    taken_s, cpu_s = await asyncio.to_thread(read, spark, bootstrap, chunk_bytes, way, engine)
                    if number >= 0:
                        name = f"{chunk_bytes // KIB} KiB, {way}, {engine}"
                        figures.add(name, records / taken_s / 1e6, "M rows/s")
                        figures.add(f"{name}, CPU", records / max(cpu_s, 0.01) / 1e6, "M rows per processor second")
        finally:
            spark.stop()
    print_table(figures, arguments.engines, arguments.chunk_bytes)


def print_table(figures: Figures, engines: list[str], sizes: list[int]) -> None:
    """The best of each, relative to the largest chunks, in Markdown; then all samples as JSON."""
    print("| chunks | way | engine | M rows/s | of the largest chunks | M rows per processor second | |")
    print("|--:|---|---|--:|--:|--:|--:|")
    for engine, way, chunk_bytes in product(engines, WAYS, sizes):
        cells = []
        for what in ("", ", CPU"):
            best = figures.best(f"{chunk_bytes // KIB} KiB, {way}, {engine}{what}")
            share = best / figures.best(f"{max(sizes) // KIB} KiB, {way}, {engine}{what}")
            cells.append(f"{best:.2f} | {share:.0%}")
        print(f"| {chunk_bytes // KIB} KiB | {way} | {engine} | {' | '.join(cells)} |")
    print("\n" + figures.json(), flush=True)


def main() -> int:
    """Measure as the command line says."""
    made = parser(__doc__)
    made.add_argument("--stream-bytes", type=size, default=100 * MIB, help="values of each stream")
    made.add_argument("--chunk-bytes", type=size, nargs="+", default=[KIB, 4 * KIB, 16 * KIB, 256 * KIB])
    made.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    made.add_argument("--rounds", type=int, default=4)
    made.add_argument("--warm-rounds", type=int, default=6)
    arguments = made.parse_args()
    with directory(arguments) as root:
        asyncio.run(run(arguments, root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
