"""Streams of KerA in Spark: ``spark.readStream.format("kera")`` and ``spark.read.format("kera")``.

A Python Data Source (Spark 4.0 or newer), which Spark finds without registration (see ``pyspark_kera``), and a columnar
engine for Spark's JVM, which replaces it for reading if its jar is loaded. Both plan offsets with the code here. With
the first, Python workers read the chunks and yield Arrow batches; with the second, the JVM reads them.

===========  ==========================================================================================
`planning`   which range a micro-batch takes, how it is cut into partitions, what a checkpoint says; pure
`options`    the user's options, checked, with the names of Spark's Kafka source; pure
`columns`    a chunk's Arrow batch as the columns that Spark sees
`reading`    the readers that Spark gets, and the work of its Python workers
`writing`    the writers, and how each row is stored exactly once
`decoding`   values that name their schemas, as columns: `from_kera`
`source`     the data source that ``format("kera")`` stands for
`service`    the same planning for the columnar engine, in a separate process
`engine`     how a Spark session loads the columnar engine
`portal`     calls from Spark's synchronous code into the asynchronous client
`spark_api`  the differences between the interfaces of Spark's versions
===========  ==========================================================================================

Only the names in this module are public; docs/spark.md documents options and columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kera.spark_connector.engine import configure, jar_path, register

if TYPE_CHECKING:
    from kera.spark_connector.decoding.function import from_kera
    from kera.spark_connector.source import KeraDataSource

__all__ = ["KeraDataSource", "configure", "from_kera", "jar_path", "register"]


def __getattr__(name: str) -> Any:
    if name == "KeraDataSource":  # late: importing it needs pyspark, and is slow
        from kera.spark_connector.source import KeraDataSource

        return KeraDataSource
    if name == "from_kera":
        from kera.spark_connector.decoding.function import from_kera

        return from_kera
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
