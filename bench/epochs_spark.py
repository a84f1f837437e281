"""Records that Spark drops as late: reading entries as they come, against micro-batches that end with epochs.

    python -m bench.epochs_spark

Four streamlets with as many records each, one of them an hour of event time behind the others: a backlog that is being
read. A query counts records by windows of ten minutes, with a watermark of 0 s. It reads them as they come, in
micro-batches of a fixed number of records; with the option ``epoch``; and, unless ``--no-kafka`` is given, as they come
from as many partitions of a Kafka with the same records, with Spark's own source, in the same session.

Reported: the records that the query has not counted, by an oracle; the number that Spark reports as dropped
(``numRowsDroppedByWatermark``, which counts rows after grouping by window); and the speed. With epochs nothing may be
missing: otherwise this ends with an error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from bench import kafka
from bench.common import Figures, alternating, directory, parser, say
from bench.epochs import rows_of
from bench.spark_engines import session
from kera.client import Client
from kera.local.cluster import LocalCluster

STREAM = "rides"
STREAMLETS = 4
LATE_STREAMLET = STREAMLETS - 1
HOUR_US = 3_600_000_000
WINDOW_US = 600_000_000
END_US = 3 * HOUR_US
"""A record for each streamlet that closes all epochs before it."""
RECORDS_OF_CHUNK = 10_000
CHUNKS = 100
"""Chunks of a streamlet; short streamlets have smaller chunks."""
ARENA_BYTES = 1 << 30
BATCHES = 16
"""Micro-batches of the queries that read records as they come."""
EPOCH = "as epochs"
CONTESTANTS = ("as it comes", EPOCH, "kafka")


class Wrong(Exception):
    """A query with epochs misses records."""


def times_of(streamlet: int, records: int) -> npt.NDArray[np.int64]:
    """The event times of a streamlet's records; the last record closes all epochs."""
    begun_us = 0 if streamlet == LATE_STREAMLET else HOUR_US
    spread = begun_us + np.arange(records, dtype=np.int64) * HOUR_US // records
    return np.append(spread, END_US)


def oracle(records: int) -> dict[int, int]:
    """The number of records in each window, by the start of the window in seconds."""
    every = np.concatenate([times_of(streamlet, records)[:-1] for streamlet in range(STREAMLETS)])
    begins, counts = np.unique(every // WINDOW_US * (WINDOW_US // 1_000_000), return_counts=True)
    return dict(zip(begins.tolist(), counts.tolist(), strict=True))


async def fill(client: Client, records: int) -> None:
    """Write the records; the value of a record is its time, as Spark's sink for Kafka cannot set the time."""
    await client.admin.create_stream(STREAM, streamlets=STREAMLETS, epoch_ms=60_000, punctuation="producers")
    for streamlet in range(STREAMLETS):
        appender = await client.appender(
            STREAM, producer_id=(1 << 63) + streamlet, producer_epoch=1, chunk_bytes_max=4 << 20
        )
        times = times_of(streamlet, records)
        # The last record alone: a chunk belongs to the epoch of its latest record.
        step = min(RECORDS_OF_CHUNK, -(-records // CHUNKS))
        ends = [*range(0, records, step), records, records + 1]
        for sequence, (first, end) in enumerate(itertools.pairwise(ends)):
            part = pa.array(times[first:end])
            values = part.cast(pa.string()).cast(pa.binary())
            await appender.append(streamlet, rows_of(part.cast(pa.timestamp("us", "UTC")), values), sequence)


def to_kafka(spark: SparkSession, bootstrap: str, broker: kafka.Kafka) -> None:
    """Write the same records to as many partitions."""
    broker.create(STREAM, STREAMLETS)
    frame = spark.read.format("kera").option("kera.bootstrap.servers", bootstrap).load(STREAM)
    frame = frame.select("value", sf.col("streamlet").alias("partition"))
    writer = frame.write.format("kafka").option("kafka.bootstrap.servers", broker.bootstrap).option("topic", STREAM)
    writer.save()


def stream_of(spark: SparkSession, name: str, bootstrap: str, arguments: argparse.Namespace) -> DataFrame:
    """The stream that a contestant reads."""
    reader = spark.readStream.option("startingOffsets", "earliest")
    per_batch = (arguments.records + 1) * STREAMLETS // BATCHES
    if name == "kafka":
        reader = reader.format("kafka").option("kafka.bootstrap.servers", bootstrap).option("subscribe", STREAM)
        return reader.option("maxOffsetsPerTrigger", per_batch).load()
    reader = reader.format("kera").option("kera.bootstrap.servers", bootstrap).option("engine", arguments.engine)
    if name == EPOCH:
        return reader.option("epoch", arguments.epoch).option("maxEpochsPerTrigger", 1).load(STREAM)
    return reader.option("maxOffsetsPerTrigger", per_batch).load(STREAM)


def count(frame: DataFrame, checkpoint: Path) -> tuple[dict[int, int], int, int]:
    """The query's counts of each window; the records that Spark reports as dropped; and the number of micro-batches."""
    happened = sf.timestamp_micros(sf.col("value").cast("string").cast("long"))
    counts = (
        frame.select(happened.alias("happened"))
        .withWatermark("happened", "0 seconds")
        .groupBy(sf.window("happened", f"{WINDOW_US // 1_000_000} seconds"))
        .count()
        .select(sf.unix_seconds("window.start").alias("begins"), "count")
    )
    found: dict[int, int] = {}

    def take(batch: DataFrame, _: int) -> None:
        found.update({row.begins: row["count"] for row in batch.collect()})

    writer = counts.writeStream.outputMode("update").foreachBatch(take).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    dropped = [progress["stateOperators"][0]["numRowsDroppedByWatermark"] for progress in query.recentProgress]
    found.pop(END_US // 1_000_000, None)
    return found, sum(dropped), len(dropped)


def measure(
    spark: SparkSession, places: dict[str, str], arguments: argparse.Namespace, root: Path, figures: Figures
) -> None:
    """Run all contestants and rounds."""
    expected, number = oracle(arguments.records), 0
    total = sum(expected.values())
    for number, name in enumerate(alternating(list(places), arguments.rounds)):
        begun_s = time.perf_counter()
        frame = stream_of(spark, name, places[name], arguments)
        found, dropped, batches = count(frame, root / f"checkpoint-{number}")
        taken_s = time.perf_counter() - begun_s
        missing = total - sum(found.values())
        say(f"{name}: {missing:,} of {total:,} missing, {dropped:,} dropped, {batches} micro-batches, {taken_s:.1f} s")
        if name == EPOCH and (found != expected or dropped):
            raise Wrong(f"{name}: {dropped} were dropped, and what was counted is {found}, not {expected}")
        figures.add(f"{name}: missing", missing, "records")
        figures.add(f"{name}: dropped, as Spark counts", dropped, "rows")
        figures.add(f"{name}: micro-batches", batches, "")
        figures.add(f"{name}: speed", total / taken_s / 1e6, "M records/s")


def run(arguments: argparse.Namespace, root: Path) -> None:
    """Start everything, write, measure, print."""
    figures = Figures("epochs_spark", arguments, root)
    with contextlib.ExitStack() as stack:
        parts: kafka.Parts | None = None
        if not arguments.no_kafka:
            try:
                parts = kafka.bring()
            except kafka.Missing as error:
                say(f"without Kafka: {error}")
        cluster = stack.enter_context(LocalCluster.running(data_dir=root / "kera", arena_bytes=ARENA_BYTES))

        async def fill_it() -> None:
            async with await Client.connect(cluster.bootstrap) as client:
                await fill(client, arguments.records)

        asyncio.run(fill_it())
        spark = session(2, root, () if parts is None else parts.spark, columnar=arguments.engine == "columnar")
        stack.callback(spark.stop)
        places: dict[str, Any] = dict.fromkeys(CONTESTANTS[:2], cluster.bootstrap)
        if parts is not None:
            broker = stack.enter_context(kafka.running(parts, root / "kafka"))
            to_kafka(spark, cluster.bootstrap, broker)
            places["kafka"] = broker.bootstrap
        measure(spark, places, arguments, root, figures)
    figures.print()


def main() -> int:
    """Measure as the command line says."""
    made = parser(__doc__)
    made.add_argument("--records", type=int, default=1_000_000, help="of each streamlet")
    made.add_argument("--rounds", type=int, default=1)
    made.add_argument("--epoch", default="10m", help="with which the micro-batches of one of the queries end")
    made.add_argument("--engine", choices=("columnar", "python"), default="columnar")
    made.add_argument("--no-kafka", action="store_true", help="measure KerA alone")
    arguments = made.parse_args()
    with directory(arguments) as root:
        run(arguments, root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
