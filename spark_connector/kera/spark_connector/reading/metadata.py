"""``option("metadata", …)``: DataFrames about streams, and about the partitions of a query.

``streams``     a row per subscribed stream; without a subscription, per stream
``partitions``  a row per partition that a batch query with the same options has now: where its records are, and whether
                a task on the driver's node would read them in place (push) or get copies (pull)

Spark's planning process makes the rows; the only task passes them on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from kera.core.base.process import node_id
from kera.core.errors import UnknownStream
from kera.spark_connector.columns import check_columns
from kera.spark_connector.options.names import METADATA
from kera.spark_connector.options.reading import Metadata, ReadOptions, SharedMemory
from kera.spark_connector.planning import Piece
from kera.spark_connector.portal import shared
from kera.spark_connector.reading.batch import plan_batch
from kera.spark_connector.reading.survey import SIDE_BY_SIDE_MAX, descriptions
from kera.spark_connector.spark_api import arrow_schema

if TYPE_CHECKING:
    from kera.client import Client, StreamDescription

COLUMNS: dict[Metadata, StructType] = {
    "streams": StructType(
        [
            StructField("name", StringType()),
            StructField("stream_id", LongType()),
            StructField("streamlets", IntegerType()),
            StructField("entries", IntegerType()),
            StructField("durability", StringType()),
            StructField("replication", IntegerType()),
            StructField("records", LongType()),
            StructField("bytes", LongType()),
            StructField("typed", BooleanType()),
            StructField("schema", StringType()),
        ]
    ),
    "partitions": StructType(
        [
            StructField("stream", StringType()),
            StructField("streamlet", IntegerType()),
            StructField("entry", IntegerType()),
            StructField("start", ArrayType(LongType())),
            StructField("end", ArrayType(LongType())),
            StructField("records", LongType()),
            StructField("bytes", LongType()),
            StructField("broker", IntegerType()),
            StructField("node", StringType()),
            StructField("access", StringType()),
        ]
    ),
}


@dataclass(repr=False)
class Rows(InputPartition):
    """The partition with all rows."""

    rows: list[dict[str, Any]]


class KeraMetadataReader(DataSourceReader):
    """Reads rows about streams instead of their records."""

    def __init__(self, options: ReadOptions, kind: Metadata, wanted: StructType) -> None:
        options.check_batch()
        check_columns(wanted, COLUMNS[kind], f"option {METADATA}={kind}")
        self._options = options
        self._kind = kind
        self._wanted = wanted

    def partitions(self) -> list[InputPartition]:
        """Return one partition, with all rows."""
        tell = _streams if self._kind == "streams" else _partitions
        with shared(self._options.connection) as portal:
            return [Rows(portal.call(lambda client: tell(client, self._options)))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows."""
        if isinstance(partition, Rows):
            yield pa.RecordBatch.from_pylist(partition.rows, schema=arrow_schema(self._wanted))


async def _streams(client: Client, options: ReadOptions) -> list[dict[str, Any]]:
    room = asyncio.Semaphore(SIDE_BY_SIDE_MAX)

    async def row(stream: StreamDescription) -> dict[str, Any] | None:
        async with room:
            try:
                bounds = await client.bounds(stream.name)
            except UnknownStream:
                if options.subscription.named is not None:
                    raise
                return None  # it was deleted just now
        entries = [entry for of_streamlet in bounds.values() for entry in of_streamlet]
        return {
            "name": stream.name,
            "stream_id": stream.stream_id,
            "streamlets": stream.config.streamlets,
            "entries": stream.config.entries,
            "durability": stream.config.durability,
            "replication": stream.config.replication,
            "records": sum(entry.next_record - entry.first_record for entry in entries),
            "bytes": sum(entry.length_bytes for entry in entries),
            "typed": stream.typed,
            "schema": stream.schema.to_string(show_field_metadata=False, show_schema_metadata=False),
        }

    rows = await asyncio.gather(*map(row, await descriptions(client, options.subscription)))
    return [each for each in rows if each is not None]


async def _partitions(client: Client, options: ReadOptions) -> list[dict[str, Any]]:
    node = node_id()
    return [
        {
            "stream": piece.stream,
            "streamlet": piece.entry.streamlet_id,
            "entry": piece.entry.entry,
            "start": list(piece.start),
            "end": list(piece.end),
            "records": piece.records,
            "bytes": piece.length_bytes or None,
            "broker": piece.broker_id or None,
            "node": piece.node_id or None,
            "access": access(piece, options.shared_memory, node),
        }
        for piece in await plan_batch(client, options, None)
    ]


def access(piece: Piece, shared_memory: SharedMemory, node: str) -> str:
    """Return how a task on `node` reads a partition: ``push``, in the broker's memory, or ``pull``, as copies."""
    if shared_memory == "always" or (shared_memory == "auto" and piece.node_id == node):
        return "push"
    return "pull"
