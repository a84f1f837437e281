"""Spark reads the same rows from four places: KerA pushed, KerA pulled, Parquet files, and memory.

* ``pushed``: the connector with ``sharedMemory`` ``always``: in place, in the broker's memory;
* ``pulled``: the same with ``never``: through the broker's sockets;
* ``parquet``: Spark's own file source, in the JVM (files that the page cache has);
* ``memory``: a Python data source that yields ready Arrow batches out of shared memory: what a connector in Python can
  reach at most, as all that it does is Spark's work.

Jobs: ``count`` (`DataFrame.count`, for which Parquet reads no rows at all, only footers), ``group`` (a filter that
takes half of the rows, group by 16 values, count) and ``arrow`` (`mapInArrow` with a function that counts rows and
bytes). Rows have one column, ``value``; chunks and batches have ``--chunk-rows`` rows.

Jobs and sources alternate in each round, after one round that is not counted. Reported: rows/s; processor seconds per
GB of values, of the broker, and of Spark: the JVM with all its Python processes. Checked: all of them count the same.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from bench.common import Figures, alternating, broker, directory, parser, say, size
from bench.cpu import run_s, tree_s
from kera.cli.bench._payload import make_batch
from kera.client import Client
from kera.core.base.settings import MIB

SOURCES = ("pushed", "pulled", "parquet", "memory")
PARTITIONS = 2
"""Partitions of each source: streamlets, or files."""
SHARED_MEMORY = {"pushed": "always", "pulled": "never"}
RECORD_BYTES = 100
CHUNK_BYTES_PER_ROW = 160
"""More than the size of a row in a chunk, with Arrow's overhead."""


class Wrong(Exception):
    """Two sources do not have the same rows."""


# -- a source of batches that are in memory ------------------------------------------------------------------


class MemorySource(DataSource):
    """Format ``bench-memory``: the batches of the Arrow files in the folder ``path``, one partition each."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "bench-memory"

    def schema(self) -> str:
        """Values only."""
        return "value binary"

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - what Spark gives
        """For ``spark.read``."""
        return MemoryReader(self.options["path"])


class MemoryReader(DataSourceReader):
    """Yields the batches of the files, in place."""

    def __init__(self, path: str) -> None:
        self._path = path

    def partitions(self) -> list[InputPartition]:
        """One partition for each file."""
        return [InputPartition(number) for number in range(PARTITIONS)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The batches of a file."""
        with pa.memory_map(f"{self._path}/{partition.value}.arrow") as file:
            reader = pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)


# -- the same rows in four places ------------------------------------------------------------------------------


def batches(rows: int, chunk_rows: int, partition: int) -> Iterator[pa.RecordBatch]:
    """The rows of a partition, as batches of the default schema. The same batch again and again: the values do not
    matter.
    """
    block = make_batch(RECORD_BYTES, chunk_rows)
    for _ in range(partition, rows // chunk_rows, PARTITIONS):
        yield block


async def fill(bootstrap: str, stream: str, rows: int, chunk_rows: int, files: Path, memory: Path) -> None:
    """Put the rows into a stream, into Parquet files, and into Arrow files."""
    chunk_bytes = max(MIB, chunk_rows * CHUNK_BYTES_PER_ROW)
    async with (
        await Client.connect(bootstrap) as client,
        client.producer(chunk_bytes_max=chunk_bytes, buffer_bytes_max=64 * MIB) as producer,
    ):
        await client.admin.create_stream(stream, streamlets=PARTITIONS)
        files.mkdir()
        memory.mkdir()
        for partition in range(PARTITIONS):
            schema = pa.schema([("value", pa.binary())])
            with (
                pq.ParquetWriter(files / f"{partition}.parquet", schema) as parquet,
                pa.ipc.new_file(memory / f"{partition}.arrow", schema) as arrow,
            ):
                waiting: list[pa.RecordBatch] = []
                for batch in batches(rows, chunk_rows, partition):
                    await producer.send_batch(stream, batch, streamlet=partition)
                    narrow = batch.select(["value"])
                    arrow.write_batch(narrow)
                    waiting.append(narrow)
                    if len(waiting) * chunk_rows >= 500_000:
                        parquet.write_table(pa.Table.from_batches(waiting))
                        waiting = []
                if waiting:
                    parquet.write_table(pa.Table.from_batches(waiting))
        await producer.flush()


# -- jobs --------------------------------------------------------------------------------------------------------


def count(frame: DataFrame) -> Any:
    """Count all rows."""
    return frame.count()


def group(frame: DataFrame) -> Any:
    """Filter the rows whose first digit is below 8, and group them by the second digit."""
    some = frame.where(sf.substring("value", 1, 1) < sf.lit(b"8"))
    return sorted((bytes(key), rows) for key, rows in some.groupBy(sf.substring("value", 2, 1)).count().collect())


def arrow(frame: DataFrame) -> Any:
    """Count rows and bytes, in Python."""

    def add_up(found: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = length_bytes = 0
        for batch in found:
            rows += batch.num_rows
            length_bytes += pc.sum(pc.binary_length(batch["value"])).as_py()
        yield pa.record_batch({"rows": pa.array([rows]), "bytes": pa.array([length_bytes])})

    # The function belongs to this module, and PySpark types it by pandas' protocols.
    found = frame.mapInArrow(add_up, "rows long, bytes long").agg(sf.sum("rows"), sf.sum("bytes")).collect()
    return tuple(found[0])


JOBS: dict[str, Callable[[DataFrame], Any]] = {"count": count, "group": group, "arrow": arrow}


# -- the measurement ---------------------------------------------------------------------------------------------


def session(cores: int, root: Path) -> SparkSession:
    """Spark in this process' JVM."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master(f"local[{cores}]").appName("kera bench")
    for name, value in {
        "spark.driver.memory": "4g",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(root / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }.items():
        builder = builder.config(name, value)
    made = builder.getOrCreate()
    made.sparkContext.setLogLevel("ERROR")
    made.dataSource.register(MemorySource)
    return made


def jvm_pid(spark: SparkSession) -> int:
    """Process id of Spark's JVM, whose children the Python workers are."""
    return int(spark.sparkContext._jvm.ProcessHandle.current().pid())  # type: ignore[union-attr]


def frame_of(spark: SparkSession, source: str, bootstrap: str, stream: str, files: Path, memory: Path) -> DataFrame:
    """The rows, from one of `SOURCES`."""
    if source == "parquet":
        return spark.read.schema("value binary").parquet(str(files))
    if source == "memory":
        return spark.read.format("bench-memory").option("path", str(memory)).load()
    reader = spark.read.format("kera").schema("value binary").option("kera.bootstrap.servers", bootstrap)
    return reader.option("sharedMemory", SHARED_MEMORY[source]).load(stream)


async def run(arguments: argparse.Namespace, root: Path, shared: Path) -> None:
    """Measure all chunk sizes."""
    figures = Figures("spark_read", arguments, root)
    spark = await asyncio.to_thread(session, arguments.cores, root)
    most = arguments.bytes // RECORD_BYTES * CHUNK_BYTES_PER_ROW
    async with broker(None, arena_bytes=most + 64 * MIB, segment_bytes=8 * MIB) as made:
        for chunk_rows in arguments.chunk_rows:
            stream = f"rows-{chunk_rows}"
            rows = arguments.bytes // RECORD_BYTES // chunk_rows * chunk_rows
            files, memory = root / stream, shared / stream
            say(f"{rows:,} rows in chunks of {chunk_rows:,}")
            await fill(made.cluster.bootstrap, stream, rows, chunk_rows, files, memory)
            begun_s, before_s = time.monotonic(), run_s(made.pid)
            await asyncio.sleep(2.0)
            figures.add("broker's CPU while idle", (run_s(made.pid) - before_s) / (time.monotonic() - begun_s), "cores")
            size_gb = rows * RECORD_BYTES / 1e9
            for number, job in enumerate(alternating(arguments.jobs, arguments.rounds + 1)):
                expected = None
                for source in arguments.sources:
                    frame = await asyncio.to_thread(
                        frame_of, spark, source, made.cluster.bootstrap, stream, files, memory
                    )
                    before = run_s(made.pid), tree_s([jvm_pid(spark)]), time.monotonic()
                    found = await asyncio.to_thread(JOBS[job], frame)
                    after = run_s(made.pid), tree_s([jvm_pid(spark)]), time.monotonic()
                    if (expected := expected or found) != found:
                        raise Wrong(f"{job}: {source} has {found}, {arguments.sources[0]} has {expected}")
                    if number < len(arguments.jobs):  # code and files are warm now
                        continue
                    broker_s, spark_s, passed_s = (b - a for a, b in zip(before, after, strict=True))
                    name = f"{chunk_rows} rows, {job}, {source}"
                    figures.add(f"{name}: rows", rows / passed_s / 1e6, "M/s")
                    figures.add(f"{name}: broker's CPU", broker_s / size_gb, "s/GB")
                    figures.add(f"{name}: Spark's CPU", spark_s / size_gb, "s/GB")
            async with await Client.connect(made.cluster.bootstrap) as client:
                await client.admin.delete_stream(stream)
    await asyncio.to_thread(spark.stop)
    figures.print()
    table(arguments, figures)


def table(arguments: argparse.Namespace, figures: Figures) -> None:
    """Sources side by side."""
    sources = list(arguments.sources)
    print(f"\n| rows of a chunk, job | figure | {' | '.join(sources)} | ratios |\n|{'---|' * (3 + len(sources))}")
    for chunk_rows in arguments.chunk_rows:
        for job in arguments.jobs:
            for what, unit in (("rows", "M/s"), ("broker's CPU", "s/GB"), ("Spark's CPU", "s/GB")):
                values = {each: figures.median(f"{chunk_rows} rows, {job}, {each}: {what}") for each in sources}
                wanted = ("pushed", "pulled") if what == "broker's CPU" else ("pushed", "memory")
                ratio = ""
                if set(wanted) <= values.keys():
                    if what == "broker's CPU":
                        wanted = ("pulled", "pushed")
                    ratio = f"{wanted[0]} / {wanted[1]}: {values[wanted[0]] / values[wanted[1]]:.2f}"
                row = " | ".join(f"{value:.3g}" for value in values.values())
                print(f"| {chunk_rows:,}, {job} | {what}, {unit} | {row} | {ratio} |")


def main() -> int:
    """Measure."""
    made = parser(__doc__)
    made.add_argument("--bytes", type=size, default=10**9, help="of the values")
    made.add_argument("--chunk-rows", type=int, nargs="+", default=[10_000, 1_000])
    made.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    made.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--cores", type=int, default=2, help="of Spark: local[2]")
    arguments = made.parse_args()
    shm = "/dev/shm"  # noqa: S108 - shared memory is the point
    with directory(arguments) as root, tempfile.TemporaryDirectory(prefix="kera-bench-", dir=shm) as shared:
        asyncio.run(run(arguments, root, Path(shared)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
