"""Records out of chunks, as far as a page looks at them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from kera.client import ChunkBatch, StreamDescription
from kera.client.consuming.values import rows_of

SLICE_ROWS = 512
"""Are made into Python values at once: others get their turn between them."""


class Row(NamedTuple):
    """A record."""

    offset: int
    timestamp_us: int
    keys: tuple[bytes | None, ...]
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    columns: Mapping[str, Any] | None
    """All of them, of a stream with a schema of its own."""


def rows_in(
    chunk: ChunkBatch, stream: StreamDescription, low: int, high: int, slice_rows: int = SLICE_ROWS
) -> Iterator[list[Row]]:
    """The records of a chunk with ordinals from `low` up to `high`, at most `slice_rows` at a time."""
    first = chunk.header.first_record
    begin, end = max(low - first, 0), min(high - first, chunk.batch.num_rows)
    make = _typed if stream.typed else _plain
    for at in range(begin, end, slice_rows):
        yield make(chunk.batch.slice(at, min(slice_rows, end - at)), stream, first + at, chunk.header.min_timestamp_us)


def _plain(batch: pa.RecordBatch, _: StreamDescription, first: int, _earliest_us: int) -> list[Row]:
    times = batch.column("timestamp").cast(pa.int64()).to_pylist()
    columns = (batch.column(name).to_pylist() for name in ("keys", "value", "headers"))
    return [
        Row(first + at, time_us, tuple(keys or ()), value, tuple(headers or ()), None)
        for at, (time_us, keys, value, headers) in enumerate(zip(times, *columns, strict=True))
    ]


def _typed(batch: pa.RecordBatch, stream: StreamDescription, first: int, earliest_us: int) -> list[Row]:
    times: list[int | None] = [None] * batch.num_rows
    if stream.timestamp_column is not None:
        column = batch.column(stream.timestamp_column)
        times = pc.cast(column, pa.timestamp("us", tz=column.type.tz), safe=False).cast(pa.int64()).to_pylist()
    rows = []
    for at, (columns, time_us) in enumerate(zip(rows_of(batch), times, strict=True)):
        key = columns[stream.key_column] if stream.key_column is not None else None
        keys = () if key is None else (key if isinstance(key, bytes) else str(key).encode(),)
        rows.append(Row(first + at, earliest_us if time_us is None else time_us, keys, None, (), columns))
    return rows
