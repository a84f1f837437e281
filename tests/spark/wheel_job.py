"""A job of a user who has only installed the wheel; test_wheel.py runs it with another environment's Python.

It reads a stream with each engine, and streams it into files. It prints one line of JSON: the read values, the values
of the files, and the places from which the driver and the executors' Python workers have imported KerA.
"""

import json
import sys
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812  # the usual name


def imported_from() -> str:
    """The file from which this process has imported the connector."""
    import kera.spark_connector

    return str(kera.spark_connector.__file__)


def read(spark: SparkSession, bootstrap: str, stream: str, engine: str) -> dict[str, Any]:
    """The values of the stream, read with an engine, and whether they came in columns."""
    reader = spark.read.format("kera").option("kera.bootstrap.servers", bootstrap).option("engine", engine)
    frame = reader.load(stream).select(F.col("value").cast("string"))
    plan: Any = frame._jdf
    columns = "ColumnarToRow" in plan.queryExecution().executedPlan().toString()
    return {"values": sorted(row.value for row in frame.collect()), "columns": columns}


def main() -> None:
    """Read, and print the results."""
    from kera.spark_connector import configure

    bootstrap, stream, folder = sys.argv[1:]
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = configure(builder.config("spark.driver.memory", "512m")).getOrCreate()
    batches = {engine: read(spark, bootstrap, stream, engine) for engine in ("columnar", "python")}
    reader = spark.readStream.format("kera").option("kera.bootstrap.servers", bootstrap)
    frame = reader.option("startingOffsets", "earliest").load(stream)
    worker = F.udf(imported_from)()
    writer = frame.select(F.col("value").cast("string"), worker.alias("worker")).writeStream.format("parquet")
    writer = writer.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True)
    writer.start(f"{folder}/output").awaitTermination()
    found = spark.read.parquet(f"{folder}/output").collect()
    values, workers = sorted(row.value for row in found), sorted({row.worker for row in found})
    told = {"read": batches, "values": values, "workers": workers, "driver": imported_from()}
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
