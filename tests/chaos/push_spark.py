"""A Spark job that reads through push and checks every record, its Python workers to be killed by `tests.chaos.push`.

→ {"ready": true}        the session is there
← read                   it reads the whole stream, slowly
→ {"records": 3000}      each was there, once, with all its bytes
→ {"wrong": "…"}         one was not
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
from tests.integration.support import number_of
from tests.spark.support import with_kera

SCHEMA = "streamlet int, offset bigint, value binary"
TASK_FAILURES_MAX = 8
PAUSE_S = 0.02


def session() -> SparkSession:
    """Two cores; a task may fail some times, as on a cluster."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    builder = SparkSession.builder.master(f"local[2,{TASK_FAILURES_MAX}]").appName("kera chaos")
    for name, value in {
        "spark.driver.memory": "1g",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }.items():
        builder = builder.config(name, value)
    made = with_kera(builder.getOrCreate())
    made.sparkContext.setLogLevel("OFF")  # that tasks fail is what is wanted
    return made


def read(spark: SparkSession, bootstrap: str, stream: str, streamlets: int) -> dict[str, Any]:
    """One job."""

    def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            time.sleep(PAUSE_S)  # sleep: the source's worker has to wait, with what it was pushed
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


def check(table: pa.Table, due: dict[int, int]) -> None:
    """Rows of `SCHEMA` that go on in each streamlet where `due` says, which then says where the next ones do.

    Raises `AssertionError`.
    """
    rows = sorted(zip(*(table[name].to_pylist() for name in ("streamlet", "offset", "value")), strict=True))
    for streamlet, offset, value in rows:
        found, wanted = (offset, number_of(value)), (due[streamlet], streamlet + due[streamlet] * len(due))
        assert found == wanted, f"{streamlet}: offset and number are {found}, where {wanted} were due"
        due[streamlet] += 1


def main() -> None:
    """Do as told."""
    die_with_parent()
    bootstrap, stream, streamlets = sys.argv[1:]
    spark = session()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    answers.write(json.dumps({"ready": True}) + "\n")
    for _ in sys.stdin:
        try:
            answer = read(spark, bootstrap, stream, int(streamlets))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the verdict
            answer = {"wrong": repr(error)}
        answers.write(json.dumps(answer) + "\n")
    spark.stop()


if __name__ == "__main__":
    main()
