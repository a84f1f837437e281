"""Spark reads the same records with our columnar engine, our Python engine, and from Kafka with Spark's own source.

All three in one session, one after the other in each round, from brokers that run side by side on this machine: one of
KerA, in whose memory the stream is, and one of Kafka (`bench.kafka`), which has its log in the page cache. Neither
replicates. As many streamlets as partitions; the records of Kafka are copied from the stream, so they are the same.
Chunks and Kafka's batches have the same size.

Batch queries, after some rounds that are not counted: ``count`` (`DataFrame.count`), ``noop`` (all values into a sink
that does nothing), ``group`` (a filter that takes half of the records, group by 16 values, count) and ``arrow``
(`mapInArrow` with a function that counts records and bytes). Reported: records per second; processor seconds per GB of
values, of the broker, and of Spark: the JVM with all its processes. Checked: all of them count the same.

The Python engine cannot know which columns a query uses, and gets them by ``.schema("value binary")``, as its
documentation says. The others find out.

Micro-batches: a producer of the system at hand sends 1,000 records per second, each with the time when it was due; a
query without pause between micro-batches takes each one to the driver (``foreachBatch``); a short round before is not
counted. Reported: from the time when a record was due until Spark has handed it over, of all records after the warm-up;
and the processors that Spark and the broker take meanwhile. Checked: each record comes exactly once.

Anything that is not available is not measured, and the table says so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from bench import kafka
from bench.common import BROKER, Figures, alternating, directory, machine, parser, say, size
from bench.common import describe as describe_machine
from bench.cpu import run_s, tree_s
from bench.due import DIGITS
from bench.spark_read import JOBS, Wrong, jvm_pid
from kera.cli.bench._payload import make_batch, records_per_chunk
from kera.client import Client
from kera.core.base.process import DIE_WITH_PARENT_VARIABLE
from kera.core.base.settings import KIB, MIB
from kera.local.cluster import LocalCluster, RunningCluster
from kera.spark_connector import configure
from kera.spark_connector.engine import EngineMissing

CONTESTANTS = ("columnar", "python", "kafka")
PARTITIONS = 2
STORED_SHARE = 1.6
"""Maximum size of a stream in the broker's memory for each byte of its values."""
PRODUCER_START_S = 30.0
DRAIN_S = 60.0
"""How long a query may take to see the last record."""
FIGURES = ("records", "broker's CPU", "Spark's CPU")
LATENCIES = ("p50", "p99", "max", "Spark's CPU", "broker's CPU")


def noop(frame: DataFrame) -> Any:
    """Write all values into a sink that does nothing."""
    frame.write.format("noop").mode("overwrite").save()


ALL_JOBS: dict[str, Callable[[DataFrame], Any]] = {
    "count": JOBS["count"],
    "noop": noop,
    "group": JOBS["group"],
    "arrow": JOBS["arrow"],
}


# -- contestants ---------------------------------------------------------------------------------------------------


@dataclass
class Contestant:
    """A way to read, with its broker."""

    name: str
    kind: str
    """kera or kafka: the system of the producer."""
    bootstrap: str
    broker_pid: int
    settings: dict[str, str]
    """Options of Spark's readers."""
    schema: str | None = None

    def load(self, reader: Any, stream: str) -> DataFrame:
        """Values of a stream, through ``spark.read`` or ``spark.readStream``."""
        reader = reader.format(self.kind).option("startingOffsets", "earliest")
        for name, value in self.settings.items():
            reader = reader.option(name, value)
        if self.schema is not None:
            reader = reader.schema(self.schema)
        if self.kind == "kafka":
            reader = reader.option("subscribe", stream)
            stream = ""
        found: DataFrame = (reader.load(stream) if stream else reader.load()).select("value")
        return found


class Bench:
    """The measurements, with everything started."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        figures: Figures,
        spark: SparkSession,
        cluster: RunningCluster,
        broker: kafka.Kafka | None,
        parts: kafka.Parts | None,
        names: Sequence[str],
        root: Path,
    ) -> None:
        self._arguments = arguments
        self._figures = figures
        self._spark = spark
        self._cluster = cluster
        self._kafka = broker
        self._parts = parts
        self._root = root
        self.contestants = [self._contestant(name) for name in names]

    def _contestant(self, name: str) -> Contestant:
        if name == "kafka":
            assert self._kafka is not None  # noqa: S101 - otherwise it is not among the names
            settings = {"kafka.bootstrap.servers": self._kafka.bootstrap}
            return Contestant(name, "kafka", self._kafka.bootstrap, self._kafka.pid, settings)
        bootstrap = self._cluster.bootstrap
        settings = {"kera.bootstrap.servers": bootstrap, "engine": name}
        schema = "value binary" if name == "python" else None
        return Contestant(name, "kera", bootstrap, self._cluster.processes[BROKER], settings, schema)

    # -- batches ---------------------------------------------------------------------------------------------------

    def batches(self, record_bytes: int) -> None:
        """Run all jobs, contestants and rounds."""
        stream = f"records-{record_bytes}"
        records = self._fill(stream, record_bytes)
        size_gb = records * record_bytes / 1e9
        for number, job in enumerate(
            alternating(self._arguments.jobs, self._arguments.rounds + self._arguments.warm_rounds)
        ):
            expected = None
            for each in self.contestants:
                before = self._cpu(each), time.monotonic()
                found = ALL_JOBS[job](each.load(self._spark.read, stream))
                after_s, (broker_s, spark_s) = time.monotonic(), self._cpu(each)
                if (expected := expected or found) != found:
                    raise Wrong(f"{job}: {each.name} has {found}, {self.contestants[0].name} has {expected}")
                if number < self._arguments.warm_rounds * len(self._arguments.jobs):  # Kafka's code warms up
                    continue
                name = f"{record_bytes} bytes, {job}, {each.name}"
                million_per_s = records / (after_s - before[1]) / 1e6
                say(f"  {name}: {million_per_s:.2f} M/s")
                self._figures.add(f"{name}: records", million_per_s, "M/s")
                self._figures.add(f"{name}: broker's CPU", (broker_s - before[0][0]) / size_gb, "s/GB")
                self._figures.add(f"{name}: Spark's CPU", (spark_s - before[0][1]) / size_gb, "s/GB")
        self._delete(stream)

    def _cpu(self, contestant: Contestant) -> tuple[float, float]:
        """Processor time of broker and Spark until now."""
        # Kafka's threads come and go, so its time is only available in ticks.
        of_broker = tree_s([contestant.broker_pid]) if contestant.kind == "kafka" else run_s(contestant.broker_pid)
        return of_broker, tree_s([jvm_pid(self._spark)])

    def _fill(self, stream: str, record_bytes: int) -> int:
        per_chunk = records_per_chunk(record_bytes, self._arguments.chunk_bytes)
        records: int = self._arguments.bytes // record_bytes // per_chunk * per_chunk
        say(f"{records:,} records of {record_bytes} bytes in chunks of {per_chunk:,}")
        asyncio.run(self._fill_kera(stream, record_bytes, per_chunk, records))
        if self._kafka is not None:
            self._kafka.create(stream, PARTITIONS)
            kera = next((each for each in self.contestants if each.kind == "kera"), None) or self._contestant("python")
            writer = kera.load(self._spark.read, stream).write.format("kafka")
            for name, value in {
                "kafka.bootstrap.servers": self._kafka.bootstrap,
                "kafka.batch.size": self._arguments.chunk_bytes,
                "kafka.linger.ms": 50,
                "topic": stream,
            }.items():
                writer = writer.option(name, value)
            writer.save()
        return records

    async def _fill_kera(self, stream: str, record_bytes: int, per_chunk: int, records: int) -> None:
        block = make_batch(record_bytes, per_chunk)
        chunk_bytes = self._arguments.chunk_bytes
        async with (
            await Client.connect(self._cluster.bootstrap) as client,
            client.producer(chunk_bytes_max=chunk_bytes) as producer,
        ):
            await client.admin.create_stream(stream, streamlets=PARTITIONS)
            for number in range(records // per_chunk):
                await producer.send_batch(stream, block, streamlet=number % PARTITIONS)

    def create(self, stream: str, contestant: Contestant) -> None:
        """Make a stream, or a topic."""
        if contestant.kind == "kafka":
            assert self._kafka is not None  # noqa: S101 - it has a contestant
            self._kafka.create(stream, PARTITIONS)
            return

        async def create() -> None:
            async with await Client.connect(self._cluster.bootstrap) as client:
                await client.admin.create_stream(stream, streamlets=PARTITIONS)

        asyncio.run(create())

    def _delete(self, stream: str) -> None:
        async def delete() -> None:
            async with await Client.connect(self._cluster.bootstrap) as client:
                await client.admin.delete_stream(stream)

        asyncio.run(delete())

    # -- micro-batches ---------------------------------------------------------------------------------------------

    def latency(self) -> None:
        """Measure the time from due to handed over, at a fixed rate."""
        by_name = {each.name: each for each in self.contestants}
        for number, name in enumerate(alternating(list(by_name), self._arguments.latency_rounds + 1)):
            counts = number >= len(by_name)  # the code is warm
            say(f"micro-batches: {name}" + ", to warm up" * (not counts))
            self._latency_of(by_name[name], f"due-{number}", self._arguments.seconds if counts else 1.0, counts=counts)

    def _latency_of(self, contestant: Contestant, stream: str, seconds: float, *, counts: bool) -> None:
        self.create(stream, contestant)
        arrivals = Arrivals()
        query = (
            contestant.load(self._spark.readStream, stream)
            .select(sf.substring("value", 1, DIGITS).cast("string").cast("long").alias("due_us"))
            .writeStream.foreachBatch(arrivals.take)
            .option("checkpointLocation", str(self._root / f"checkpoint-{stream}"))
            .start()
        )
        try:
            with self.producer(contestant, stream, self._arguments.warm_up + seconds) as producer:
                query.processAllAvailable()  # the query runs then
                producer.go()
                time.sleep(self._arguments.warm_up)
                before = self._cpu(contestant), time.monotonic()
                sent, late_s = producer.result(seconds + PRODUCER_START_S)
                (broker_s, spark_s), after_s = self._cpu(contestant), time.monotonic()
            deadline = time.monotonic() + DRAIN_S
            while arrivals.records < sent and query.isActive and time.monotonic() < deadline:
                arrivals.came.wait(0.5)
                arrivals.came.clear()
        finally:
            query.stop()
        if query.exception() is not None:
            raise Wrong(f"{contestant.name}: {query.exception()}")
        due_us, late_us = arrivals.all()
        if len(due_us) != sent or len(np.unique(due_us)) != sent:
            raise Wrong(
                f"{contestant.name}: {len(due_us)} records came, {len(np.unique(due_us))} different; sent: {sent}"
            )
        if not counts:
            return
        measured_ms = late_us[due_us >= due_us.min() + self._arguments.warm_up * 1e6] / 1e3
        say(f"  p50 {np.percentile(measured_ms, 50):.0f} ms, p99 {np.percentile(measured_ms, 99):.0f} ms")
        passed_s, add = after_s - before[1], self._figures.add
        for what, value in (
            ("p50", np.percentile(measured_ms, 50)),
            ("p99", np.percentile(measured_ms, 99)),
            ("max", measured_ms.max()),
        ):
            add(f"micro-batches, {contestant.name}: {what}", float(value), "ms")
        add(f"micro-batches, {contestant.name}: Spark's CPU", (spark_s - before[0][1]) / passed_s, "cores")
        add(f"micro-batches, {contestant.name}: broker's CPU", (broker_s - before[0][0]) / passed_s, "cores")
        add(f"micro-batches, {contestant.name}: producer late by at most", late_s * 1e3, "ms")

    @contextlib.contextmanager
    def producer(self, contestant: Contestant, stream: str, seconds: float) -> Iterator[DueProducer]:
        """A connected producer of the contestant's system."""
        argv = [sys.executable, "-m", "bench.due", contestant.kind, contestant.bootstrap, stream]
        argv += ["--rate", str(self._arguments.rate), "--seconds", str(seconds)]
        if self._parts is not None:
            argv += ["--client", str(self._parts.client)]
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, DIE_WITH_PARENT_VARIABLE: "1"},
        )
        with process:
            try:
                yield DueProducer(process)
            finally:
                process.kill()


class DueProducer:
    """`bench.due` in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._line()

    def go(self) -> None:
        """Let it begin."""
        assert self._process.stdin is not None  # noqa: S101 - asked for
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def result(self, timeout_s: float) -> tuple[int, float]:
        """The number of records, and the greatest delay in seconds."""
        watch = threading.Timer(timeout_s, self._process.kill)
        watch.start()
        try:
            sent, late_s = self._line().split()
        finally:
            watch.cancel()
        return int(sent), float(late_s)

    def _line(self) -> str:
        assert self._process.stdout is not None  # noqa: S101 - asked for
        line = self._process.stdout.readline()
        if not line:
            raise Wrong(f"the producer ended with {self._process.wait()}")
        return line


class Arrivals:
    """The due times of records, and their delays; filled by Spark's thread."""

    def __init__(self) -> None:
        self.records = 0
        self.came = threading.Event()
        self._due_us: list[npt.NDArray[np.int64]] = []
        self._late_us: list[npt.NDArray[np.int64]] = []

    def take(self, frame: DataFrame, _number: int) -> None:
        """Take a micro-batch."""
        due_us = frame.toArrow()["due_us"].to_numpy()
        self._late_us.append(time.time_ns() // 1000 - due_us)
        self._due_us.append(due_us)
        self.records += len(due_us)
        self.came.set()

    def all(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Due times and delays."""
        return np.concatenate(self._due_us), np.concatenate(self._late_us)


# -- the measurement -----------------------------------------------------------------------------------------------


def session(cores: int, root: Path, jars: Sequence[Path], *, columnar: bool) -> SparkSession:
    """Spark in this process' JVM, with what contestants need."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master(f"local[{cores}]").appName("kera bench")
    for name, value in {
        "spark.driver.memory": "4g",
        "spark.jars": ",".join(map(str, jars)),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(root / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }.items():
        builder = builder.config(name, value)
    if columnar:
        builder = configure(builder)
    made = builder.getOrCreate()
    made.sparkContext.setLogLevel("ERROR")
    return made


def run(arguments: argparse.Namespace, root: Path) -> None:
    """Start everything, and measure."""
    figures = Figures("spark_engines", arguments, root)
    head = describe_machine(machine(root))
    names, parts = list(arguments.contestants), None
    with contextlib.ExitStack() as stack:
        broker = None
        if "kafka" in names:
            try:
                parts = kafka.bring()
                broker = stack.enter_context(kafka.running(parts, root / "kafka"))
                figures.notes["kafka"] = f"Kafka {kafka.BROKER_VERSION}; {parts.spark_module}"
            except kafka.Missing as error:
                names.remove("kafka")
                figures.notes["kafka"] = f"not measured: {error}"
                say(figures.notes["kafka"])
        arena_bytes = int(arguments.bytes * STORED_SHARE) + 256 * MIB
        cluster = stack.enter_context(LocalCluster.running(arena_bytes=arena_bytes // (8 * MIB) * 8 * MIB))
        spark_jars = parts.spark if parts else []
        columnar = "columnar" in names
        try:
            spark = session(arguments.cores, root, spark_jars, columnar=columnar)
        except EngineMissing as error:
            names.remove("columnar")
            figures.notes["columnar"] = f"not measured: {error}"
            say(figures.notes["columnar"])
            spark = session(arguments.cores, root, spark_jars, columnar=False)
        stack.callback(spark.stop)
        bench = Bench(arguments, figures, spark, cluster, broker, parts, names, root)
        if "batches" in arguments.parts:
            for record_bytes in arguments.record_bytes:
                bench.batches(record_bytes)
        if "latency" in arguments.parts:
            bench.latency()
    table(arguments, figures, names, head)
    if arguments.json is not None:
        arguments.json.write_text(figures.json() + "\n")


def table(arguments: argparse.Namespace, figures: Figures, names: Sequence[str], head: str) -> None:
    """Contestants side by side: median (least-most)."""
    print(f"{head}\n\n| | | {' | '.join(names)} |\n|{'---|' * (2 + len(names))}")
    known = set(figures.names)
    groups = [(f"{length} bytes, {job}", FIGURES) for length in arguments.record_bytes for job in arguments.jobs]
    for group, whats in [*groups, ("micro-batches", LATENCIES)]:
        for what in whats:
            cells = [f"{group}, {name}: {what}" for name in names]
            if cells[0] in known:
                row = " | ".join(map(figures.cell, cells))
                print(f"| {group} | {what}, {figures.unit(cells[0])} | {row} |")
    for name, note in figures.notes.items():
        print(f"\n{name}: {note}")
    sys.stdout.flush()


def main() -> int:
    """Measure."""
    made = parser(__doc__)
    made.add_argument("--parts", nargs="+", choices=("batches", "latency"), default=["batches", "latency"])
    made.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    made.add_argument("--bytes", type=size, default=500 * 10**6, help="of the values")
    made.add_argument("--record-bytes", type=int, nargs="+", default=[100])
    made.add_argument("--chunk-bytes", type=size, default=256 * KIB, help="of a chunk, and of a batch of Kafka's")
    made.add_argument("--jobs", nargs="+", choices=ALL_JOBS, default=list(ALL_JOBS))
    made.add_argument("--rounds", type=int, default=4)
    made.add_argument("--warm-rounds", type=int, default=3, help="of batches, before those that count")
    made.add_argument("--cores", type=int, default=2, help="of Spark: local[2]")
    made.add_argument("--rate", type=int, default=1000, help="records per second of micro-batches")
    made.add_argument("--seconds", type=float, default=15.0, help="how long a round of micro-batches takes")
    made.add_argument("--warm-up", type=float, default=5.0, help="seconds of it before that do not count")
    made.add_argument("--latency-rounds", type=int, default=3)
    made.add_argument("--json", type=Path, help="a file for all samples")
    made.add_argument("--quick", action="store_true", help="see whether it works: little of everything")
    arguments = made.parse_args()
    if arguments.quick:
        arguments.bytes, arguments.rounds, arguments.latency_rounds = 50 * 10**6, 1, 1
        arguments.warm_rounds = 1
        arguments.seconds, arguments.warm_up = 5.0, 3.0
    with directory(arguments) as root:
        run(arguments, root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
