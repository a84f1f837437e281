"""Spark writes the same rows with our columnar engine, our Python engine, and to Kafka with Spark's own sink.

    JAVA_HOME="$(sh scripts/java.sh)" .venv/bin/python -m bench.spark_write

All in one session of Spark (``local[2]``), one after the other in each round, to brokers that run side by side on this
machine: one of KerA, which keeps streams in its memory, and one of Kafka (`bench.kafka`), whose log is in the page
cache. Neither replicates. As many streamlets as partitions of Kafka. The rows are made once and cached: what it takes
to take them out of the cache is what ``nothing`` takes, Spark's sink that does nothing.

Rows are ``plain``, a value each, or ``keyed``, with one of 10,000 keys. Reported, after rounds that are not counted:
rows per second; processor seconds per GB of values, of Spark (the JVM with all its processes) and of the broker.
Checked: as many records are there as rows were written.

Anything that is not available is not measured, and the table says so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from bench import kafka
from bench.common import BROKER, Figures, directory, machine, parser, say, size
from bench.common import describe as describe_machine
from bench.cpu import run_s, tree_s
from bench.spark_engines import noop, session
from bench.spark_read import Wrong, jvm_pid
from kera.client import Client
from kera.core.base.settings import KIB, MIB
from kera.local.cluster import LocalCluster, RunningCluster

CONTESTANTS = ("nothing", "python", "columnar", "kafka")
KINDS = ("plain", "keyed")
VALUE_BYTES = 100
KEYS = 10_000
STREAMLETS = 4
PARTITIONS = 2
FIGURES = ("rows", "Spark's CPU", "broker's CPU")


class Bench:
    """The session, the brokers, and the measurements."""

    def __init__(
        self, arguments: argparse.Namespace, figures: Figures, spark: SparkSession, cluster: RunningCluster
    ) -> None:
        self._arguments = arguments
        self._figures = figures
        self._spark = spark
        self._cluster = cluster
        self._written = 0

    def frame(self, kind: str) -> DataFrame:
        """Cached rows of that kind."""
        value = sf.rpad(sf.col("id").cast("string"), VALUE_BYTES, "x").cast("binary").alias("value")
        key = sf.concat(sf.lit("k"), sf.col("id") % KEYS).cast("binary").alias("key")
        rows = self._spark.range(self._arguments.rows, numPartitions=PARTITIONS)
        made = rows.select(*[key, value] if kind == "keyed" else [value]).persist(StorageLevel.MEMORY_ONLY)
        made.count()
        return made

    def measure(
        self, kind: str, frame: DataFrame, contestant: str, broker: kafka.Kafka | None, *, counts: bool
    ) -> None:
        """Measure one write."""
        self._written += 1
        stream = f"written-{self._written}"
        write = self._writer(frame, contestant, broker, stream)
        before, begun_s = self._cpu(contestant, broker), time.monotonic()
        write()
        taken_s, after = time.monotonic() - begun_s, self._cpu(contestant, broker)
        self._clear(contestant, broker, stream)
        rows = self._arguments.rows
        say(f"  {kind}, {contestant}: {rows / taken_s / 1e6:.2f} M/s" + ", to warm up" * (not counts))
        if counts:
            size_gb = rows * VALUE_BYTES / 1e9
            self._figures.add(f"{kind}, {contestant}: rows", rows / taken_s / 1e6, "M/s")
            for name, one, other in zip(FIGURES[1:], before, after, strict=True):
                self._figures.add(f"{kind}, {contestant}: {name}", (other - one) / size_gb, "s/GB")

    def _writer(self, frame: DataFrame, contestant: str, broker: kafka.Kafka | None, stream: str) -> Callable[[], Any]:
        if contestant == "nothing":
            return lambda: noop(frame)
        if contestant == "kafka":
            assert broker is not None  # noqa: S101 - it is among the contestants
            broker.create(stream, STREAMLETS)
            writer = frame.write.format("kafka").option("topic", stream)
            for name, value in {
                "kafka.bootstrap.servers": broker.bootstrap,
                "kafka.batch.size": self._arguments.batch_bytes,
                "kafka.linger.ms": 50,
            }.items():
                writer = writer.option(name, value)
            return writer.save
        asyncio.run(self._create(stream))
        bootstrap = self._cluster.bootstrap
        of_kera = frame.write.format("kera").option("kera.bootstrap.servers", bootstrap).mode("append")
        return lambda: of_kera.option("engine", contestant).save(stream)

    def _cpu(self, contestant: str, broker: kafka.Kafka | None) -> tuple[float, float]:
        """Processor time of Spark and the broker until now."""
        # Kafka's threads come and go, so its time is only available in ticks.
        of_kafka = contestant == "kafka" and broker is not None
        of_broker = tree_s([broker.pid]) if of_kafka and broker else run_s(self._cluster.processes[BROKER])
        return tree_s([jvm_pid(self._spark)]), of_broker

    async def _create(self, stream: str) -> None:
        async with await Client.connect(self._cluster.bootstrap) as client:
            await client.admin.create_stream(stream, streamlets=STREAMLETS)

    def _clear(self, contestant: str, broker: kafka.Kafka | None, stream: str) -> None:
        """Count the stored records, and remove them. Raises `Wrong`."""
        if contestant == "kafka" and broker is not None:
            there = self._spark.read.format("kafka").option("kafka.bootstrap.servers", broker.bootstrap)
            records = there.option("subscribe", stream).load().count()
            broker.delete(stream)
        elif contestant == "nothing":
            return
        else:
            records = asyncio.run(self._remove(stream))
        if records != self._arguments.rows:
            raise Wrong(f"{contestant}: {self._arguments.rows:,} rows became {records:,} records")

    async def _remove(self, stream: str) -> int:
        async with await Client.connect(self._cluster.bootstrap) as client:
            bounds = await client.bounds(stream)
            await client.admin.delete_stream(stream)
            return sum(entry.next_record for entries in bounds.values() for entry in entries)


def run(arguments: argparse.Namespace, root: Path) -> None:
    """Start everything, and measure."""
    figures = Figures("spark_write", arguments, root)
    head = describe_machine(machine(root))
    names, jars, broker = list(arguments.contestants), [], None
    with contextlib.ExitStack() as stack:
        if "kafka" in names:
            try:
                parts = kafka.bring()
                broker = stack.enter_context(kafka.running(parts, root / "kafka"))
                figures.notes["kafka"] = f"Kafka {kafka.BROKER_VERSION}; {parts.spark_module}"
                jars = parts.spark
            except kafka.Missing as error:
                names.remove("kafka")
                figures.notes["kafka"] = f"not measured: {error}"
                say(figures.notes["kafka"])
        # A deleted stream is gone only some time later: there may be two.
        arena_bytes = 2 * int(arguments.rows * VALUE_BYTES * 1.6) + 256 * MIB
        cluster = stack.enter_context(LocalCluster.running(arena_bytes=arena_bytes // (8 * MIB) * 8 * MIB))
        spark = session(arguments.cores, root, jars, columnar=True)
        stack.callback(spark.stop)
        bench = Bench(arguments, figures, spark, cluster)
        for kind in arguments.kinds:
            frame = bench.frame(kind)
            for number in range(-arguments.warm_rounds, arguments.rounds):
                for name in names if number % 2 else names[::-1]:
                    bench.measure(kind, frame, name, broker, counts=number >= 0)
            frame.unpersist(blocking=True)
    table(arguments, figures, names, head)


def table(arguments: argparse.Namespace, figures: Figures, names: Sequence[str], head: str) -> None:
    """Contestants side by side: median (least-most)."""
    print(f"## spark_write\n\n{head}; {arguments.rows:,} rows of {VALUE_BYTES} bytes, local[{arguments.cores}]\n")
    print("| rows | by | M rows/s | times Python's | Spark's CPU, s/GB | broker's CPU, s/GB |")
    print("|---|---|--:|--:|--:|--:|")
    for kind, name in product(arguments.kinds, names):
        cells = [figures.cell(f"{kind}, {name}: {what}") for what in FIGURES]
        times = "-"
        if "python" in names and name != "nothing":
            rates = [figures.median(f"{kind}, {each}: rows") for each in (name, "python")]
            times = f"{rates[0] / rates[1]:.2f}"
        print(f"| {kind} | {name} | {cells[0]} | {times} | {cells[1]} | {cells[2] if name != 'nothing' else '-'} |")
    for name, note in figures.notes.items():
        print(f"\n{name}: {note}")
    print("\n" + figures.json(), flush=True)


def main() -> int:
    """Measure as the command line says."""
    made = parser(__doc__)
    made.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    made.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    made.add_argument("--rows", type=int, default=5_000_000)
    made.add_argument("--batch-bytes", type=size, default=256 * KIB, help="of a batch of Kafka's")
    made.add_argument("--cores", type=int, default=2, help="of Spark: local[2]")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--warm-rounds", type=int, default=4)
    made.add_argument("--quick", action="store_true", help="see whether it works: little of everything")
    arguments = made.parse_args()
    if arguments.quick:
        arguments.rows, arguments.rounds, arguments.warm_rounds = 200_000, 1, 1
    with directory(arguments) as root:
        run(arguments, root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
