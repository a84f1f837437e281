"""The common parts of the Spark jobs of chaos: the session, and the check of the rows that a query has read."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import pyarrow as pa
from pyspark.sql import SparkSession

from kera.spark_connector import configure
from tests.integration.support import number_of
from tests.spark.support import with_kera

TASK_ATTEMPTS = 8
LOCAL = f"local[2,{TASK_ATTEMPTS}]"
"""Two cores; a task may fail several times, as on a cluster."""


def session(
    master: str = LOCAL, settings: Mapping[str, str] | None = None, *, memory: str = "1g", columnar: bool = False
) -> SparkSession:
    """A session with this driver memory; `columnar`: with the columnar engine."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    builder = SparkSession.builder.master(master).appName("kera chaos")
    for name, value in {
        "spark.driver.memory": memory,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        **(settings or {}),
    }.items():
        builder = builder.config(name, value)
    return with_kera((configure(builder) if columnar else builder).getOrCreate())


def check(table: pa.Table, due: dict[int, int]) -> None:
    """Check that rows go on in each streamlet at the number in `due`, and advance `due` past them.

    Columns are streamlet, offset, and value; records were sent to the streamlets in turn. Raises `AssertionError`.
    """
    rows = sorted(zip(*(table[name].to_pylist() for name in ("streamlet", "offset", "value")), strict=True))
    for streamlet, offset, value in rows:
        found, wanted = (offset, number_of(value)), (due[streamlet], streamlet + due[streamlet] * len(due))
        assert found == wanted, f"{streamlet}: offset and number are {found}, where {wanted} were due"
        due[streamlet] += 1
