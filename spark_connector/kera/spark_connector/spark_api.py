"""Differences between Spark's versions in the interface of Python data sources, and replacements for missing parts.

    Spark       read limits, and where a micro-batch starts    stream writers get Arrow    columnar engine
    4.0         no                                             no: rows                    no
    4.1         no                                             yes                         no
    4.2         yes                                            yes                         no
    4.3         yes                                            yes                         yes

Everything is looked for in the Spark that is installed, not concluded from its version; only the columnar engine, which
is compiled against Spark's own classes, goes by the versions that it was tested with (`COLUMNAR`).
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
"""Whether a reader is told where a micro-batch starts, and how much it may take."""
WRITES_ARROW = hasattr(datasource, "DataSourceStreamArrowWriter")
"""Whether a stream's writer gets Arrow batches; else it gets rows."""
ROWS_PER_BATCH = 8_192
"""Rows are put together to batches of so many."""
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
            """Stands in for Spark's: nobody makes one but the connector."""

        class ReadAllAvailable(ReadLimit):
            """All there is."""

        class ReadMaxBytes(ReadLimit):
            """Never made."""

        class ReadMaxRows(ReadLimit):
            """Never made."""

        class ReadMinRows(ReadLimit):
            """Never made."""

        class SupportsTriggerAvailableNow:
            """Spark reads all there is with one micro-batch instead."""

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
    """The Arrow schema that Spark expects of batches with these columns."""
    return to_arrow_schema(columns, **_UTC)


def spark_type(of: pa.DataType) -> DataType:
    """Spark's type for an Arrow type; raises one of its errors where it has none."""
    return from_arrow_type(of, prefer_timestamp_ntz=True)


def arrow_batches(rows: Iterator[Any], columns: StructType) -> Iterator[pa.RecordBatch]:
    """The input of a stream's writer as Arrow batches: it is that already, or rows with these columns."""
    if WRITES_ARROW:
        yield from rows
        return
    from pyspark.sql.conversion import LocalDataToArrowConversion

    while some := list(islice(rows, ROWS_PER_BATCH)):
        table = LocalDataToArrowConversion.convert(some, columns, use_large_var_types=False)
        yield from table.combine_chunks().to_batches()
