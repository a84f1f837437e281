"""Extracts the records of chunks that a page examines. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from kera.client import ChunkBatch, StreamDescription
from kera.client.consuming.delivering.values import rows_of
from kera.client.json_form import texts_of
from kera.client.json_form.writing import is_bytes
from kera.console.browsing.row_json import Rows, bare
from kera.core.errors import invariant

SLICE_ROWS = 512
"""Number of rows to convert into Python values at once; other requests run in between."""


class Row(NamedTuple):
    """A record."""

    offset: int
    timestamp_us: int
    keys: tuple[bytes | None, ...]
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    columns: Mapping[str, Any] | None
    """All columns as Python values, in a typed stream; otherwise None."""
    origin: tuple[Rows, int] | None = None
    """The rows that have this one, and its index, for the JSON of columns; None unless the stream is typed."""

    @property
    def _origin(self) -> tuple[Rows, int]:
        invariant(self.origin is not None, "only rows with columns have JSON of their own")
        return self.origin  # type: ignore[return-value]  # see above

    def cell(self, name: str, length: int) -> str:
        """Return the JSON of a column, see `Rows.cell`."""
        rows, at = self._origin
        return rows.cell(at, name, length)

    def json(self, length: int) -> str:
        """Return the JSON of all columns, see `Rows.row`."""
        rows, at = self._origin
        return rows.row(at, length)

    def has(self, wanted: str) -> bool:
        """Return whether the JSON of all columns contains `wanted`, see `Rows.has`."""
        rows, at = self._origin
        return rows.has(at, wanted)


def rows_in(
    chunk: ChunkBatch, stream: StreamDescription, low: int, high: int, slice_rows: int = SLICE_ROWS
) -> Iterator[list[Row]]:
    """Yield the records of a chunk with ordinals from `low` up to before `high`, at most `slice_rows` at a time."""
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
    keys = [()] * batch.num_rows if stream.key_column is None else _keys(batch.column(stream.key_column))
    origin = Rows(batch)
    return [
        Row(first + at, earliest_us if time_us is None else time_us, own, None, (), columns, (origin, at))
        for at, (columns, time_us, own) in enumerate(zip(rows_of(batch), times, keys, strict=True))
    ]


def _keys(column: pa.Array) -> list[tuple[bytes, ...]]:
    """Return the keys of each row: bytes unchanged, and anything else as its JSON, without quotes."""
    if is_bytes(column.type):
        return [() if key is None else (key,) for key in column.to_pylist()]
    texts = texts_of(column).to_pylist()
    there = column.is_valid().to_pylist()
    return [(bare(text).encode(),) if is_there else () for text, is_there in zip(texts, there, strict=True)]
