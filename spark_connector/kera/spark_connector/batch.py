"""The batch reader: ``spark.read.format("kera")``.

Spark makes it in its planning process, asks it for partitions there, and sends a copy to each task for `read`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from kera.spark_connector.columns import check_columns, columns_of
from kera.spark_connector.options import ENDING, STARTING, KeraOptions
from kera.spark_connector.planning import partitions
from kera.spark_connector.portal import shared
from kera.spark_connector.survey import settle, survey
from kera.spark_connector.worker import read_partition

if TYPE_CHECKING:
    from kera.client import Client


class KeraBatchReader(DataSourceReader):
    """Reads a stream once, from ``startingOffsets`` up to ``endingOffsets``."""

    def __init__(self, options: KeraOptions, wanted: StructType) -> None:
        options.check_batch()
        self._options = options
        self._wanted = wanted

    def partitions(self) -> list[InputPartition]:
        """One per entry with records, as the stream is now."""

        async def plan(client: Client) -> list[InputPartition]:
            options = self._options
            now = await survey(client, options.stream)
            check_columns(self._wanted, columns_of(now.description.schema, typed=now.description.typed), options.stream)
            start = await settle(client, now, STARTING, options.batch_starting)
            end = await settle(client, now, ENDING, options.batch_ending)
            return list(partitions(start, end, typed=now.description.typed))

        return shared(self._options.bootstrap).call(plan)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one partition; runs in an executor's Python worker."""
        return read_partition(self._options.bootstrap, partition, self._wanted)
