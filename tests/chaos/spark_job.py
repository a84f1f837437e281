"""The Spark job of ``tests.chaos.spark``, in a separate process, to be killed: stream in, stream out.

It writes each number once: records come with duplicates, go through a stateful shuffle, and leave each partition in a
different order each time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.streaming.query import StreamingQuery

from tests.chaos.spark_session import session

PARTITIONS = 3
RECORDS_PER_TRIGGER = 2_000


def start(
    spark: SparkSession, bootstrap: str, source: str, target: str, checkpoint: Path, engine: str
) -> StreamingQuery:
    """Start the query, written by `engine`. With the checkpoint of an earlier query it goes on from there."""
    records = (
        spark.readStream.format("kera")
        .option("kera.bootstrap.servers", bootstrap)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", RECORDS_PER_TRIGGER)
        .load(source)
    )
    number = F.split(F.col("value").cast("string"), ":")[0].cast("long")
    once = records.select(number.alias("number"), "value").dropDuplicates(["number"])
    rows = once.select("value", F.concat(F.lit("k"), F.col("number") % 97).alias("key"))
    return (
        rows.mapInArrow(shuffled, rows.schema)
        .writeStream.format("kera")
        .option("kera.bootstrap.servers", bootstrap)
        .option("checkpointLocation", str(checkpoint))
        .option("engine", engine)
        .start(target)
    )


def shuffled(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of a partition in another order each time, as if they came from machines of different speeds."""
    rows = list(batches)
    if rows:
        table = pa.Table.from_batches(rows)
        yield from table.take(pa.array(np.random.default_rng().permutation(len(table)))).combine_chunks().to_batches()


def main() -> None:
    """Run until somebody kills it, or the query fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("bootstrap", "source", "target"):
        parser.add_argument(name)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--engine", choices=("python", "columnar"), default="python")
    arguments = parser.parse_args()
    settings = {"spark.sql.shuffle.partitions": str(PARTITIONS)}
    spark = session(settings=settings, columnar=arguments.engine == "columnar")
    query = start(
        spark, arguments.bootstrap, arguments.source, arguments.target, arguments.checkpoint, arguments.engine
    )
    query.awaitTermination()


if __name__ == "__main__":
    main()
