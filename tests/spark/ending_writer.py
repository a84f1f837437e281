"""A program of test_ends_of_writers.py that writes and then ends in a given way.

It runs as ``python -m tests.spark.ending_writer``, and writes the numbers below `RECORDS` as a batch. Each task yields
its first rows at once, and the others when a file called ``go-on`` exists: until then the write is incomplete.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from kera.spark_connector import configure
from tests.spark.support import QUICK_JVM, Kera, wait_until, with_kera

RECORDS = 1000
VALUE_BYTES = 1000
ROWS_PER_BATCH = 10
FIRST_BATCHES = 20
"""The batches that each task yields at once: more bytes than Spark buffers."""
WAIT_S = 600.0
GO_ON = "go-on"
TARGET = {"latencyTarget": "50ms"}
"""With it, rows are stored while their task waits for the others."""
ONCE = {"txnAppId": "ends", "txnVersion": "1"}


def in_two_parts(frame: DataFrame, folder: Path) -> DataFrame:
    """The rows of `frame`; the last rows of each task wait for a file in `folder`."""
    gate = folder / GO_ON

    def parts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches):
            if number == FIRST_BATCHES:
                wait_until(gate.exists, "the file that ends the wait", WAIT_S)
            yield batch

    return frame.mapInArrow(parts, frame.schema)


def write(kera: Kera, stream: str, folder: Path) -> None:
    """Write all numbers as a batch; a repetition adds the missing ones."""
    value = f"lpad(cast(id as string), {VALUE_BYTES}, '0') as value"
    frame = in_two_parts(kera.spark.range(RECORDS, numPartitions=2).selectExpr(value), folder)
    writer = frame.write.format("kera").option("kera.bootstrap.servers", kera.bootstrap).option("engine", kera.engine)
    writer.options(**TARGET, **ONCE).mode("append").save(stream)


def main() -> None:
    """Do as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("engine")
    parser.add_argument("end", choices=["returns", "fails", "exits", "SIGTERM"])
    parser.add_argument("bootstrap")
    parser.add_argument("stream")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    builder = SparkSession.builder.master("local[2]")
    for name, value in {
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": QUICK_JVM,
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(ROWS_PER_BATCH),
        "spark.sql.warehouse.dir": str(arguments.folder / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }.items():
        builder = builder.config(name, value)
    kera = Kera(with_kera(configure(builder).getOrCreate()), arguments.bootstrap, arguments.engine)
    write(kera, arguments.stream, arguments.folder)
    sys.stdout.write("written\n")
    sys.stdout.flush()
    sys.stdin.read()  # until the test closes stdin or sends a signal
    if arguments.end == "fails":
        raise RuntimeError("of the program")
    if arguments.end == "exits":
        sys.exit()


if __name__ == "__main__":
    main()
