"""A client of Spark Connect: test_connect.py runs it as a separate script, without this tree on its path.

It gets the server's address and a stream's name. All of KerA's work happens on the server; to prove that, the client
cannot import KerA. It prints its result as one line of JSON.
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
    """Read the stream as a batch."""
    return rows(spark.read.format("kera").options(**options).load(stream).select("streamlet", "offset", "value"))


def streaming(spark: SparkSession, options: dict[str, str], stream: str, folder: str) -> Any:
    """Stream up to the present end into files; return their rows and the end offset of the query."""
    frame = spark.readStream.format("kera").options(**options, startingOffsets="earliest").load(stream)
    writer = frame.select("streamlet", "offset", "value").writeStream.format("parquet")
    writer = writer.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True)
    query = writer.start(f"{folder}/output")
    query.awaitTermination()
    progress = query.lastProgress
    assert progress is not None
    return {"rows": rows(spark.read.parquet(f"{folder}/output")), "end": progress["sources"][0]["endOffset"]}


def foreach(spark: SparkSession, options: dict[str, str], stream: str, folder: str) -> Any:
    """Read through `foreachBatch`; its code runs beside the server, so it writes the rows to files."""

    def take(found: DataFrame, _number: int) -> None:
        found.write.mode("append").parquet(f"{folder}/output")

    frame = spark.readStream.format("kera").options(**options, startingOffsets="earliest").load(stream)
    writer = frame.select("streamlet", "offset", "value").writeStream.foreachBatch(take)
    writer.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start().awaitTermination()
    return rows(spark.read.parquet(f"{folder}/output"))


def write(spark: SparkSession, options: dict[str, str], stream: str, folder: str) -> Any:
    """Write every record back to the same stream: first as a batch, then everything by a streaming query."""
    frame = spark.read.format("kera").options(**options).load(stream)
    frame.select("key", "value").write.format("kera").options(**options).mode("append").save(stream)
    frame = spark.readStream.format("kera").options(**options, startingOffsets="earliest").load(stream)
    writer = frame.select("key", "value").writeStream.format("kera").options(**options, stream=stream)
    writer.option("checkpointLocation", folder).trigger(availableNow=True).start().awaitTermination()
    return rows(spark.read.format("kera").options(**options).load(stream).select("streamlet", "offset", "value"))


def mistake(spark: SparkSession, options: dict[str, str], stream: str, _folder: str) -> Any:
    """The error for an unknown option."""
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
