"""A Spark job to be killed: run by test_restart.py as ``python -m tests.spark.killed_job``.

It reads a stream in small micro-batches until it has what is there now, and writes it by one of two ways: ``files``, a
sink of Spark's own that counts each micro-batch once, or ``batches``, one file per micro-batch, replaced when it is
run again. At the point that ``--stop-at`` names it says so on stdout and waits there, for ever, to be killed.
"""

import argparse
import json
import os
import sys
import threading
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from tests.spark.support import with_kera

RECORDS_PER_TRIGGER = "100"


def stop_here() -> None:
    sys.stdout.write("waiting\n")
    sys.stdout.flush()
    threading.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bootstrap")
    parser.add_argument("stream")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sink", choices=["files", "batches"], required=True)
    parser.add_argument("--stop-at", choices=["before-output", "after-output"])
    parser.add_argument("--batch", type=int, default=2)
    arguments = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]")
    for name, value in {"spark.driver.memory": "512m", "spark.ui.enabled": "false"}.items():
        builder = builder.config(name, value)
    spark = with_kera(builder.getOrCreate())
    reader = spark.readStream.format("kera").option("kera.bootstrap.servers", arguments.bootstrap)
    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": RECORDS_PER_TRIGGER}
    frame = reader.options(**options).load(arguments.stream).select("streamlet", "entry", "offset", "value")
    output = arguments.folder / "output"

    def write(batch: DataFrame, number: int) -> None:
        rows = [[row.streamlet, row.entry, row.offset, row.value.decode()] for row in batch.collect()]
        stop = number == arguments.batch and arguments.stop_at
        if stop == "before-output":
            stop_here()
        output.mkdir(exist_ok=True)
        draft = output / f"{number}.draft"
        draft.write_text(json.dumps(rows))
        draft.rename(output / f"{number}.json")
        if stop == "after-output":
            stop_here()

    writer = frame.writeStream.trigger(availableNow=True)
    writer = writer.option("checkpointLocation", str(arguments.folder / "checkpoint"))
    if arguments.sink == "files":
        query = writer.format("parquet").option("path", str(output)).start()
    else:
        query = writer.foreachBatch(write).start()
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
