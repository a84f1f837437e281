"""Streams of KerA in Spark: ``spark.readStream.format("kera")`` and ``spark.read.format("kera")``.

A Python Data Source (Spark 4.3 or newer) that is found without registration (see ``pyspark_kera``). It plans offsets
on the driver and yields the chunks' Arrow batches from the executors' Python workers.

==============  ======================================================================================
`options`       what a user may say, checked, with the names of Spark's Kafka source
`offsets`       what a checkpoint holds, as JSON
`planning`      which range a micro-batch takes and how it is cut into partitions; pure
`columns`       a chunk's Arrow batch as the columns that Spark sees; pure
`chunks`        a range of one entry, as the client reads it
`survey`        what planning has to know of the cluster
`portal`        calls from Spark's synchronous code into the asynchronous client
`source`        the data source; `batch` and `streaming` are its two readers, `worker` the executors' side
==============  ======================================================================================

Only `KeraDataSource` is public: options and columns are documented in docs/spark.md.
"""

from kera.spark_connector.source import KeraDataSource

__all__ = ["KeraDataSource"]
