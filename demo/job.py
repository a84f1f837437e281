"""The Spark job: both streams live from KerA, joined on origin and hour, delays per carrier and week.

The job uses a stream-stream join, and not a lookup in a weather table: weather and flights arrive at the same time, and
a flight must get the observation of its hour, whichever arrives first. Spark keeps rows that wait for the other side
until the watermark has passed. A flight without an observation then appears with nulls (left outer), so no flight is
ever lost. Results are final when they appear (append mode).

The watermark is two weeks of event time behind the newest row. The replay runs at some days a second, so that a row may
be late by some seconds. (`demo.feeder` keeps the delay below six hours of event time, plus the event time that passes
between reading two streamlets.)
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as all the world calls it
from pyspark.sql.streaming.query import StreamingQuery

from demo.check import VISIBILITY_LOW_MILES
from demo.running import wait_for_descendants_of
from kera.spark_connector import configure, register

WATERMARK = "14 days"
WINDOW = "7 days"
FIRST_MONDAY = "4 days"
"""Windows start on Mondays: 1970 began on a Thursday."""

JVM_FLAGS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For a minute and a half the quick compiler alone is faster, and leaves the cores to the job."""

LOGGING = """
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = File
appender.file.name = file
appender.file.fileName = {log}
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{HH:mm:ss}} %p %c{{1}}: %m%n%ex
"""


def start_query(
    spark: SparkSession, bootstrap: str, folder: Path, take: Callable[[int, pa.Table], None]
) -> StreamingQuery:
    """Start the query; `take` gets each micro-batch's number and its results."""

    def stream(name: str) -> DataFrame:
        reader = spark.readStream.format("kera").option("kera.bootstrap.servers", bootstrap)
        return reader.option("startingOffsets", "earliest").load(name)

    flights = stream("flights").withColumn("hour", F.date_trunc("hour", "event_time")).withWatermark("hour", WATERMARK)
    weather = stream("weather").withWatermark("hour", WATERMARK)
    sky = (
        F.when(F.col("precip").isNull(), "unknown")
        .when(F.col("precip") > 0, "rain")
        .when(F.col("visib") < VISIBILITY_LOW_MILES, "murk")
        .otherwise("fair")
    )
    delays = (
        flights.join(weather, ["origin", "hour"], "left_outer")
        .groupBy(F.window("hour", WINDOW, startTime=FIRST_MONDAY), "carrier", sky.alias("sky"))
        .agg(
            F.count("*").alias("flights"),
            F.count("dep_delay").alias("departed"),
            F.sum("dep_delay").alias("dep_delay"),
            F.count("arr_delay").alias("arrived"),
            F.sum("arr_delay").alias("arr_delay"),
            F.sum("distance").alias("distance"),
        )
        .withColumn("week", F.col("window.start"))
        .drop("window")
    )
    return (
        delays.writeStream.outputMode("append")
        .foreachBatch(lambda frame, number: take(number, frame.toArrow()))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .start()
    )


def stored(spark: SparkSession, bootstrap: str) -> int:
    """Read the stream of flights as a batch, and return how many rows it has."""
    return spark.read.format("kera").option("kera.bootstrap.servers", bootstrap).load("flights").count()


@contextlib.contextmanager
def spark_session(folder: Path) -> Iterator[SparkSession]:
    """Run a small local Spark that prints nothing: its output goes to logs/spark.log in `folder`."""
    log = folder / "logs" / "spark.log"
    settings = folder / "log4j2.properties"
    settings.write_text(LOGGING.format(log=log))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master("local[2]").appName("KerA demo")
    for name, value in {
        "spark.driver.extraJavaOptions": f"{JVM_FLAGS} -Dlog4j2.configurationFile={settings.as_uri()}",
        "spark.driver.memory": "1g",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.metricsEnabled": "false",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(folder),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }.items():
        builder = builder.config(name, value)
    with _stderr_to(log):  # for the launching script, and for the JVM, which keeps it
        spark = configure(builder).getOrCreate()
    if " " in sys.executable:  # then Spark does not look for data sources
        register(spark)
    gateway: Any = spark.sparkContext._gateway  # noqa: SLF001  # the only way to the JVM's process
    try:
        yield spark
    finally:
        with wait_for_descendants_of(gateway.proc.pid):  # Spark's Python workers, which end after the JVM
            spark.stop()
            gateway.shutdown()
            gateway.proc.stdin.close()  # ends the JVM
            gateway.proc.wait()


@contextlib.contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    sys.stderr.flush()
    before = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
