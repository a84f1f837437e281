"""The executors' side: the records of one partition as Arrow batches.

Chunks come as the producers made them. Small ones are put together, because each batch that Spark takes costs it some
100 µs: with batches of 100 records a noop sink takes 2.3 M records/s, with 1,000 3.1, with 10,000 and more 5.5
(local[2], 100-byte values). Large ones are handed on as they are, without a copy.

The chunks of a partition are followed over all brokers that have some of them (`kera.client`), wherever they have gone
since it was planned; what a crashed broker had is waited for while it is being recovered.

Promise: a partition gives exactly the records that it was planned with, or an error. Never fewer without a word.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from kera.core.errors import DataLost
from kera.spark_connector.chunks import chunks
from kera.spark_connector.columns import Shaper
from kera.spark_connector.planning import KeraPartition
from kera.spark_connector.portal import shared

if TYPE_CHECKING:
    from kera.client import ChunkBatch, Client

BATCH_RECORDS = 16_384
"""Chunks are put together until there are so many records …"""
BATCH_BYTES = 2 << 20
"""… or so many bytes."""
BATCHES_AHEAD = 2
"""Batches fetched before Spark asks for them."""


def read_partition(bootstrap: str, partition: InputPartition, wanted: StructType) -> Iterator[pa.RecordBatch]:
    """The records of `partition`, with the columns `wanted`."""
    if not isinstance(partition, KeraPartition):
        return  # Spark makes one empty partition of a batch query that has none
    shaper = Shaper(wanted, stream=partition.stream, typed=partition.typed)
    records = 0
    for gathered in shared(bootstrap).iterate(lambda client: _gathered(client, partition), BATCHES_AHEAD):
        for batch in shaper.shape([chunk.batch for chunk in gathered], gathered[0].header):
            records += batch.num_rows
            yield batch
    if records != partition.records:
        raise DataLost(
            f"stream '{partition.stream}' gave {records} of the {partition.records} records between"
            f" {tuple(partition.start)} and {tuple(partition.end)} of streamlet {partition.entry.streamlet_id},"
            f" entry {partition.entry.entry}",
            stream=partition.stream,
            streamlet=partition.entry.streamlet_id,
            entry=partition.entry.entry,
            records=records,
            records_planned=partition.records,
        )


async def _gathered(client: Client, partition: KeraPartition) -> AsyncGenerator[list[ChunkBatch], None]:
    """The partition's chunks, so many at a time that they make a batch of a good size."""
    gathered: list[ChunkBatch] = []
    records = length_bytes = 0
    whole = chunks(client, partition.stream, partition.entry, partition.start, partition.end)
    async with contextlib.aclosing(whole) as source:
        async for chunk in source:
            gathered.append(chunk)
            records += chunk.header.record_count
            length_bytes += chunk.header.payload_bytes
            if records >= BATCH_RECORDS or length_bytes >= BATCH_BYTES:
                yield gathered
                gathered = []
                records = length_bytes = 0
    if gathered:
        yield gathered
