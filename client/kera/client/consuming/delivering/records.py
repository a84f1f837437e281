"""Makes records, as Python values, from batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count, repeat
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kera.client.chunk_batch import ChunkBatch
from kera.client.consuming.delivering.values import rows_of
from kera.client.headers import NO_HEADERS, Headers
from kera.client.types import Record, StreamDescription
from kera.core.native import accelerated

_as_record: Callable[[Iterable[Any]], Record] = partial(tuple.__new__, Record)
"""Does the same as `Record._make` in half the time; does not check the number of fields."""


def records_of(chunk: ChunkBatch, stream: StreamDescription) -> Iterator[Record]:
    """Return an iterator over the records of a chunk, in order, which makes each on demand."""
    if stream.typed:
        return _typed(chunk, stream)
    _, streamlet, entry = chunk.entry
    return records(chunk.batch, stream.name, streamlet, entry, chunk.header.first_record, NO_HEADERS)


@accelerated(Record)
def records(
    batch: pa.RecordBatch, stream: str, streamlet: int, entry: int, first: int, no_headers: Headers
) -> Iterator[Record]:
    """Make records of a batch of the default schema; `first`: the ordinal of its first row.

    `no_headers`: the headers of a record without any; the native core makes other headers of the same type.

    Zips whole columns, so that the interpreter's own loops do the work per record, instead of Python code.
    """
    offsets = range(first, first + batch.num_rows)
    times = batch.column("timestamp").cast(pa.int64()).to_pylist()
    return records_at(batch, repeat(stream), repeat(streamlet), repeat(entry), offsets, times, no_headers)


def records_at(
    batch: pa.RecordBatch,
    streams: Iterable[str],
    streamlets: Iterable[int],
    entries: Iterable[int],
    offsets: Iterable[int],
    times: Iterable[int],
    no_headers: Headers = NO_HEADERS,
) -> Iterator[Record]:
    """Make records of a batch of the default schema, with the given stream, streamlet, entry, offset and time each."""
    keys = _keys(batch.column("keys"))
    fields = zip(
        streams,
        streamlets,
        entries,
        offsets,
        times,
        [row[0] if row else None for row in keys],
        keys,
        batch.column("value").to_pylist(),
        _headers(batch.column("headers"), no_headers),
        repeat(None),
        strict=False,  # some of the iterables are endless
    )
    return map(_as_record, fields)


def _keys(column: pa.Array) -> list[tuple[bytes, ...]]:
    """Return the keys of each record."""
    rows = len(column)
    if column.null_count == 0 and len(found := column.flatten()) == rows and pc.all(_has_one(column)).as_py():
        return list(zip(found.to_pylist(), strict=True))
    return [()] * rows if column.null_count == rows else [tuple(row or ()) for row in column.to_pylist()]


def _has_one(column: pa.Array) -> pa.BooleanArray:
    return pc.equal(pc.list_value_length(column), 1)


def _headers(column: pa.Array, no_headers: Headers) -> list[Headers]:
    """Return the headers of each record."""
    rows = len(column)
    if column.null_count == rows:
        return [no_headers] * rows
    return [Headers.of_valid(tuple(row)) if row else no_headers for row in column.to_pylist()]


def times_of(chunk: ChunkBatch, stream: StreamDescription) -> pa.Array:
    """Return the time of each record of a chunk, in microseconds since the Unix epoch: `Record.timestamp_us`.

    A record of a typed stream without a time gets the earliest time of its chunk.
    """
    column = stream.timestamp_column if stream.typed else "timestamp"
    earliest: pa.Array | pa.Scalar = pa.scalar(chunk.header.min_timestamp_us, pa.int64())
    if chunk.joined:
        each = [header.min_timestamp_us for header in chunk.headers for _ in range(header.record_count)]
        earliest = pa.array(each, pa.int64())
    if column is None:
        rows = chunk.batch.num_rows
        return earliest if isinstance(earliest, pa.Array) else pa.repeat(earliest, rows)
    times = chunk.batch.column(column)
    times = pc.cast(times, pa.timestamp("us", tz=times.type.tz), safe=False).cast(pa.int64())
    return pc.coalesce(times, earliest)


def _typed(chunk: ChunkBatch, stream: StreamDescription) -> Iterator[Record]:
    batch, first = chunk.batch, chunk.header.first_record
    _, streamlet, entry = chunk.entry
    known = times_of(chunk, stream).to_pylist()
    return typed_records_at(
        batch, stream.key_column, repeat(stream.name), repeat(streamlet), repeat(entry), count(first), known
    )


def typed_records_at(
    batch: pa.RecordBatch,
    key_column: str | None,
    streams: Iterable[str],
    streamlets: Iterable[int],
    entries: Iterable[int],
    offsets: Iterable[int],
    times: Iterable[int],
) -> Iterator[Record]:
    """Make records of a batch of a typed stream, with the given stream, streamlet, entry, offset and time each."""
    places = zip(streams, streamlets, entries, offsets, times, strict=False)  # some of the iterables are endless
    for row, (stream, streamlet, entry, offset, time_us) in zip(rows_of(batch), places, strict=False):
        key = row[key_column] if key_column is not None else None
        encoded = key if key is None or isinstance(key, bytes) else str(key).encode()
        yield Record(
            stream=stream,
            streamlet=streamlet,
            entry=entry,
            offset=offset,
            timestamp_us=time_us,
            key=encoded,
            keys=() if encoded is None else (encoded,),
            value=None,
            headers=NO_HEADERS,
            row=row,
        )
