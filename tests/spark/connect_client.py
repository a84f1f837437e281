"""A client of Spark Connect: run by test_connect.py as a script of its own, with nothing of this tree on its path.

It knows the server's address and a stream's name. Everything of KerA happens on the server, and to prove it the client
cannot import KerA. What it finds it prints as one line of JSON.
"""

import argparse
import json
import sys
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

Row = tuple[int, int, str]


def rows(frame: DataFrame) -> list[Row]:
    """Streamlet, offset and value of each record, in order."""
    return sorted((row.streamlet, row.offset, bytes(row.value).decode()) for row in frame.collect())


def batch(spark: SparkSession, options: dict[str, str], stream: str, _folder: str) -> Any:
    """The stream as a batch."""
    return rows(spark.read.format("kera").options(**options).load(stream).select("streamlet", "offset", "value"))


def streaming(spark: SparkSession, options: dict[str, str], stream: str, folder: str) -> Any:
    """The stream as a stream, up to its end, into files: what they have, and where the query has come to."""
    frame = spark.readStream.format("kera").options(**options, startingOffsets="earliest").load(stream)
    writer = frame.select("streamlet", "offset", "value").writeStream.format("parquet")
    writer = writer.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True)
    query = writer.start(f"{folder}/output")
    query.awaitTermination()
    progress = query.lastProgress
    assert progress is not None
    return {"rows": rows(spark.read.parquet(f"{folder}/output")), "end": progress["sources"][0]["endOffset"]}


def foreach(spark: SparkSession, options: dict[str, str], stream: str, folder: str) -> Any:
    """The stream through `foreachBatch`, whose code runs beside the server: so it writes what it finds to a table."""

    def take(found: DataFrame, _number: int) -> None:
        found.write.mode("append").parquet(f"{folder}/output")

    frame = spark.readStream.format("kera").options(**options, startingOffsets="earliest").load(stream)
    writer = frame.select("streamlet", "offset", "value").writeStream.foreachBatch(take)
    writer.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start().awaitTermination()
    return rows(spark.read.parquet(f"{folder}/output"))


def write(spark: SparkSession, options: dict[str, str], stream: str, folder: str) -> Any:
    """Every record written back to the same stream: as a batch, and then all there is by a streaming query."""
    frame = spark.read.format("kera").options(**options).load(stream)
    frame.select("key", "value").write.format("kera").options(**options).mode("append").save(stream)
    frame = spark.readStream.format("kera").options(**options, startingOffsets="earliest").load(stream)
    writer = frame.select("key", "value").writeStream.format("kera").options(**options, stream=stream)
    writer.option("checkpointLocation", folder).trigger(availableNow=True).start().awaitTermination()
    return rows(spark.read.format("kera").options(**options).load(stream).select("streamlet", "offset", "value"))


def mistake(spark: SparkSession, options: dict[str, str], stream: str, _folder: str) -> Any:
    """What is said about an option that does not exist."""
    try:
        spark.read.format("kera").options(**options, startingOfsets="earliest").load(stream).collect()
    except PySparkException as error:
        return str(error)
    return None


WORK = {work.__name__: work for work in (batch, streaming, foreach, write, mistake)}


def main() -> None:
    """Do one piece of work on the server, and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("remote")
    parser.add_argument("work", choices=WORK)
    parser.add_argument("bootstrap")
    parser.add_argument("stream")
    parser.add_argument("folder")
    parser.add_argument("options", type=json.loads, help="for reading")
    arguments = parser.parse_args()
    sys.modules["kera"] = None  # type: ignore[assignment]  # importing it is an error from here on
    spark = SparkSession.builder.remote(arguments.remote).getOrCreate()
    options = {"kera.bootstrap.servers": arguments.bootstrap, **arguments.options}
    found = WORK[arguments.work](spark, options, arguments.stream, arguments.folder)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
