"""A Spark job to be killed: test_restart.py runs it as ``python -m tests.spark.killed_job``.

It reads a stream in small micro-batches up to its present end, and writes it in one of two ways: ``files``, a sink of
Spark that counts each micro-batch once, or ``batches``, one file per micro-batch, replaced in a repetition. At the
given point it prints a line and waits to be killed.
"""

import argparse
import json
import os
import sys
import threading
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.spark.support import Kera, with_kera

RECORDS_PER_TRIGGER = "100"
STOPS_IN_BATCH = 2


def stop_here() -> None:
    sys.stdout.write("waiting\n")
    sys.stdout.flush()
    threading.Event().wait()


def start(kera: Kera, stream: str, folder: Path, sink: str, stop_at: str = "nowhere") -> StreamingQuery:
    """Start the job; with the same folder it goes on from its checkpoint."""
    frame = kera.stream(stream, startingOffsets="earliest", maxOffsetsPerTrigger=RECORDS_PER_TRIGGER)
    frame = frame.select("streamlet", "entry", "offset", "value")
    output = folder / "output"

    def write(batch: DataFrame, number: int) -> None:
        rows = [[row.streamlet, row.entry, row.offset, row.value.decode()] for row in batch.collect()]
        if stop_at == "before-output" and number == STOPS_IN_BATCH:
            stop_here()
        output.mkdir(exist_ok=True)
        draft = output / f"{number}.draft"
        draft.write_text(json.dumps(rows))
        draft.rename(output / f"{number}.json")
        if stop_at == "after-output" and number == STOPS_IN_BATCH:
            stop_here()

    writer = frame.writeStream.trigger(availableNow=True).option("checkpointLocation", str(folder / "checkpoint"))
    if sink == "files":
        return writer.format("parquet").option("path", str(output)).start()
    return writer.foreachBatch(write).start()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bootstrap")
    parser.add_argument("stream")
    parser.add_argument("folder", type=Path)
    parser.add_argument("sink", choices=["files", "batches"])
    parser.add_argument("stop_at", choices=["before-output", "after-output", "nowhere"])
    arguments = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]")
    for name, value in {"spark.driver.memory": "512m", "spark.ui.enabled": "false"}.items():
        builder = builder.config(name, value)
    kera = Kera(with_kera(builder.getOrCreate()), arguments.bootstrap)
    start(kera, arguments.stream, arguments.folder, arguments.sink, arguments.stop_at).awaitTermination()


if __name__ == "__main__":
    main()
