"""The batch reader: ``spark.read.format("kera")``.

Spark makes it in its planning process, asks it for partitions there, and sends a copy to each task for `read`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from kera.spark_connector.delegation.asking import for_tasks
from kera.spark_connector.options.reading import ReadOptions
from kera.spark_connector.planning import Piece, ranges
from kera.spark_connector.portal import shared
from kera.spark_connector.reading.partition import KeraPartition
from kera.spark_connector.reading.survey import (
    cutting_of_batch,
    resolve_places,
    split,
    survey,
    tell_skipped,
    with_columns,
)
from kera.spark_connector.reading.worker import read_partition

if TYPE_CHECKING:
    from kera.client import Client


async def plan_batch(
    client: Client, options: ReadOptions, wanted: StructType | None, *, parallelism: int | None = None
) -> list[Piece]:
    """Return the pieces that a batch query reads, as the streams are now.

    `wanted`: the query's columns, to check them; `parallelism`: Spark's default parallelism, if known.
    """
    now = await survey(client, options.subscription, begins=True)
    if wanted is not None:
        now, skipped = with_columns(wanted, now, options.on_mismatch)
        tell_skipped(skipped, set())
    now_us = time.time_ns() // 1000
    loss = options.fail_on_data_loss
    start = await resolve_places(client, options.batch_starting, now, now_us=now_us, fail_on_data_loss=loss)
    end = await resolve_places(client, options.batch_ending, now, now_us=now_us, fail_on_data_loss=loss)
    return await split(client, ranges(start, end, now), now, options, cutting=cutting_of_batch(options, parallelism))


class KeraBatchReader(DataSourceReader):
    """Reads streams once, from ``startingOffsets`` up to ``endingOffsets``."""

    def __init__(self, options: ReadOptions, wanted: StructType) -> None:
        options.check_batch()
        self._options = options
        self._wanted = wanted

    def partitions(self) -> list[InputPartition]:
        """Return at least one partition per entry with records, as the streams are now."""
        with shared(self._options.connection) as portal:
            pieces = portal.call(lambda client: plan_batch(client, self._options, self._wanted))
        connection = for_tasks(self._options.connection, {piece.stream for piece in pieces})
        return [KeraPartition(piece, connection) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one partition; runs in an executor's Python worker."""
        return read_partition(self._options, partition, self._wanted)
