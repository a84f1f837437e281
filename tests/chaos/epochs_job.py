"""The Spark job of ``tests.chaos.epochs``, in its own process: it reports the contents of each micro-batch.

It writes one file per micro-batch, ``<number>.json``: the number of rows and their hash (`digest_of`) for each epoch.
A repeated micro-batch must have the same contents: otherwise there is a file ``<number>.wrong`` beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
from collections.abc import Iterable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.chaos.spark_session import session
from tests.spark.support import QUICK_JVM

EPOCH = "1s"
Row = tuple[int, int, int, bytes]
"""Streamlet, entry, ordinal and value."""


def digest_of(rows: Iterable[Row]) -> str:
    """A hash that is the same for the same rows, in any order."""
    digest = hashlib.blake2b(digest_size=16)
    for streamlet, entry, record, value in sorted(rows):
        digest.update(struct.pack("<IIQI", streamlet, entry, record, len(value)) + value)
    return digest.hexdigest()


def tell(folder: Path, number: int, rows_by_epoch: dict[int, list[Row]]) -> None:
    """Write the contents of a micro-batch to its file."""
    found = {str(epoch): [len(rows), digest_of(rows)] for epoch, rows in sorted(rows_by_epoch.items())}
    text, path = json.dumps(found), folder / f"{number}.json"
    if path.exists() and path.read_text() != text:
        (folder / f"{number}.wrong").write_text(text)
        return
    draft = folder / f"{number}.draft"
    draft.write_text(text)
    draft.rename(path)


def start(spark: SparkSession, arguments: argparse.Namespace) -> StreamingQuery:
    """Start the query. With the folder of an earlier query it goes on from there."""
    records = (
        spark.readStream.format("kera")
        .option("kera.bootstrap.servers", arguments.bootstrap)
        .option("engine", arguments.engine)
        .option("startingOffsets", "earliest")
        .option("epoch", EPOCH)
        .option("epochsPerTrigger", arguments.epochs)
        .option("includeEpoch", "true")
        .load(arguments.stream)
    )
    folder = arguments.folder / "batches"
    folder.mkdir(parents=True, exist_ok=True)

    def take(batch: DataFrame, number: int) -> None:
        found: dict[int, list[Row]] = {}
        for row in batch.select("epoch", "streamlet", "entry", "offset", "value").collect():
            found.setdefault(row.epoch, []).append((row.streamlet, row.entry, row.offset, bytes(row.value)))
        tell(folder, number, found)

    writer = records.writeStream.foreachBatch(take).option("checkpointLocation", str(arguments.folder / "checkpoint"))
    return (writer.trigger(availableNow=True) if arguments.backfill else writer).start()


def main() -> None:
    """Run until somebody kills it, the query fails, or a backfill is complete."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bootstrap")
    parser.add_argument("stream")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, required=True, help="of each micro-batch")
    parser.add_argument("--engine", choices=("python", "columnar"), required=True)
    parser.add_argument("--backfill", action="store_true")
    arguments = parser.parse_args()
    settings = {"spark.driver.extraJavaOptions": QUICK_JVM}
    spark = session(settings=settings, memory="768m", columnar=arguments.engine == "columnar")
    start(spark, arguments).awaitTermination()


if __name__ == "__main__":
    main()
