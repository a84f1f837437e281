"""Differences between Spark's versions in the interface of Python data sources, and replacements for missing parts.

    Spark       read limits, and where a micro-batch starts    stream writers get Arrow    columnar engine
    4.0         no                                             no: rows                    no
    4.1         no                                             yes                         no
    4.2         yes                                            yes                         no
    4.3         yes                                            yes                         yes

Features are detected in the installed Spark instead of derived from its version. Only the columnar engine, which is
compiled against Spark's internal classes, requires the versions that it was tested with (`engine.COLUMNAR_VERSIONS`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyspark
from pyspark.sql import datasource
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import DataType, StructType

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamArrowWriter
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )

HAS_READ_LIMITS = hasattr(datasource.DataSourceStreamReader, "getDefaultReadLimit")
"""Whether Spark gives a reader the start and the limits of a micro-batch."""
WRITES_ARROW = hasattr(datasource, "DataSourceStreamArrowWriter")
"""Whether a stream's writer gets Arrow batches; otherwise it gets rows."""
ROWS_PER_BATCH = 8_192
"""Number of rows that are gathered into a batch."""
VERSION: str = pyspark.__version__

if not TYPE_CHECKING:
    if HAS_READ_LIMITS:
        from pyspark.sql.streaming.datasource import (
            ReadAllAvailable,
            ReadLimit,
            ReadMaxBytes,
            ReadMaxRows,
            ReadMinRows,
            SupportsTriggerAvailableNow,
        )
    else:

        class ReadLimit:
            """A replacement for Spark's class; only the connector makes instances."""

        class ReadAllAvailable(ReadLimit):
            """No limit."""

        class ReadMaxBytes(ReadLimit):
            """Never made."""

        class ReadMaxRows(ReadLimit):
            """Never made."""

        class ReadMinRows(ReadLimit):
            """Never made."""

        class SupportsTriggerAvailableNow:
            """A replacement for Spark's class; this Spark reads all records with one micro-batch instead."""

    if WRITES_ARROW:
        from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamArrowWriter
    else:
        from pyspark.sql.datasource import DataSourceStreamWriter as StreamArrowWriter

__all__ = [
    "HAS_READ_LIMITS",
    "VERSION",
    "WRITES_ARROW",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "ReadMaxRows",
    "ReadMinRows",
    "StreamArrowWriter",
    "SupportsTriggerAvailableNow",
    "arrow_batches",
    "arrow_schema",
    "spark_type",
]

_UTC: dict[str, Any] = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
"""The argument for UTC; older versions lack it and use UTC anyway."""


def arrow_schema(columns: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects of batches with these columns."""
    return to_arrow_schema(columns, **_UTC)


def spark_type(of: pa.DataType) -> DataType:
    """Return Spark's type for an Arrow type; raises one of Spark's errors if it has none."""
    return from_arrow_type(of, prefer_timestamp_ntz=True)


def arrow_batches(rows: Iterator[Any], columns: StructType) -> Iterator[pa.RecordBatch]:
    """Yield the input of a stream's writer as Arrow batches: it consists of batches, or of rows with `columns`."""
    if WRITES_ARROW:
        yield from rows
        return
    from pyspark.sql.conversion import LocalDataToArrowConversion

    while some := list(islice(rows, ROWS_PER_BATCH)):
        table = LocalDataToArrowConversion.convert(some, columns, use_large_var_types=False)
        yield from table.combine_chunks().to_batches()
