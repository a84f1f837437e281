"""Batches as records: for those who want Python values, at the price of making them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kera.client.types import ChunkBatch, Record, StreamDescription


def records_of(chunk: ChunkBatch, stream: StreamDescription) -> Iterator[Record]:
    """The records of a chunk, in order."""
    return _typed(chunk, stream) if stream.typed else _default(chunk, stream)


def _default(chunk: ChunkBatch, stream: StreamDescription) -> Iterator[Record]:
    batch, first = chunk.batch, chunk.header.first_record
    _, streamlet, entry = chunk.entry
    count = batch.num_rows
    timestamps = batch.column("timestamp").cast(pa.int64()).to_pylist()
    values = batch.column("value").to_pylist()
    keys = _lists(batch.column("keys"), count)
    headers = _lists(batch.column("headers"), count)
    for index in range(count):
        row_keys = tuple(keys[index] or ())
        yield Record(
            stream=stream.name,
            streamlet=streamlet,
            entry=entry,
            offset=first + index,
            timestamp_us=timestamps[index],
            key=row_keys[0] if row_keys else None,
            keys=row_keys,
            value=values[index],
            headers=dict(headers[index] or ()),
            row=None,
        )


def _lists(column: pa.Array, count: int) -> list[Any]:
    return [None] * count if column.null_count == count else column.to_pylist()


def _typed(chunk: ChunkBatch, stream: StreamDescription) -> Iterator[Record]:
    batch, first = chunk.batch, chunk.header.first_record
    _, streamlet, entry = chunk.entry
    times: list[int | None] = [chunk.header.min_timestamp_us] * batch.num_rows
    if stream.timestamp_column is not None:
        column = batch.column(stream.timestamp_column)
        times = pc.cast(column, pa.timestamp("us", tz=column.type.tz), safe=False).cast(pa.int64()).to_pylist()
    for index, row in enumerate(batch.to_pylist()):
        key = row[stream.key_column] if stream.key_column is not None else None
        encoded = key if key is None or isinstance(key, bytes) else str(key).encode()
        time_us = times[index]
        yield Record(
            stream=stream.name,
            streamlet=streamlet,
            entry=entry,
            offset=first + index,
            timestamp_us=chunk.header.min_timestamp_us if time_us is None else time_us,
            key=encoded,
            keys=() if encoded is None else (encoded,),
            value=None,
            headers={},
            row=row,
        )
