"""A Spark job that reads through push and checks every record; `tests.chaos.push` kills its Python workers.

→ {"ready": true}        the session exists
← read                   it reads the whole stream, slowly
→ {"records": 3000}      each record was there, once, with all its bytes
→ {"wrong": "…"}         a record was wrong or missing
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from kera.core.base.process import die_with_parent
from tests.chaos.spark_session import check, session

SCHEMA = "streamlet int, offset bigint, value binary"
PAUSE_S = 0.02


def read(spark: SparkSession, bootstrap: str, stream: str, streamlets: int) -> dict[str, Any]:
    """Run one job; returns its answer."""

    def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            time.sleep(PAUSE_S)  # sleep: makes the source's worker wait, while it holds pushed chunks
            yield batch

    frame = (
        spark.read.format("kera")
        .schema(SCHEMA)
        .option("kera.bootstrap.servers", bootstrap)
        .option("sharedMemory", "always")
        .load(stream)
    )
    table = frame.mapInArrow(slowly, SCHEMA).toArrow()
    try:
        check(table, dict.fromkeys(range(streamlets), 0))
    except AssertionError as error:
        return {"wrong": str(error)}
    return {"records": len(table)}


def main() -> None:
    """Run as a driver."""
    die_with_parent()
    bootstrap, stream, streamlets = sys.argv[1:]
    spark = session()
    spark.sparkContext.setLogLevel("OFF")  # failing tasks are expected
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    answers.write(json.dumps({"ready": True}) + "\n")
    for _ in sys.stdin:
        try:
            answer = read(spark, bootstrap, stream, int(streamlets))
        except Exception as error:  # noqa: BLE001 - every error is part of the verdict
            answer = {"wrong": repr(error)}
        answers.write(json.dumps(answer) + "\n")
    spark.stop()


if __name__ == "__main__":
    main()
