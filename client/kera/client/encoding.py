"""Records into batches, batches into payloads of chunks. Pure functions over Arrow data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from kera.client.types import StreamDescription
from kera.core.chunk import chunk_bytes_of, encode_payload
from kera.core.errors import RecordTooLarge, SchemaMismatch
from kera.core.schema import DEFAULT_SCHEMA

_KEYS = DEFAULT_SCHEMA.field("keys").type
_HEADERS = DEFAULT_SCHEMA.field("headers").type
_TIMESTAMP = DEFAULT_SCHEMA.field("timestamp").type


class Payload(NamedTuple):
    """What goes into one chunk, and what its header says about it."""

    payload: pa.Buffer
    record_count: int
    min_timestamp_us: int
    max_timestamp_us: int


def records_to_batch(
    values: Sequence[bytes | None],
    timestamps_us: Sequence[int],
    keys: Sequence[Sequence[bytes] | None] | None,
    headers: Sequence[Mapping[str, bytes] | None] | None,
) -> pa.RecordBatch:
    """Columns of the default schema from lists; None where no record has any keys or headers."""
    count = len(values)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(timestamps_us, pa.int64()).view(_TIMESTAMP),
            pa.nulls(count, _KEYS) if keys is None else pa.array(keys, _KEYS),
            pa.array(values, pa.binary()),
            pa.nulls(count, _HEADERS)
            if headers is None
            else pa.array([None if item is None else list(item.items()) for item in headers], _HEADERS),
        ],
        schema=DEFAULT_SCHEMA,
    )


def conform(batch: pa.RecordBatch, stream: StreamDescription, now_us: int) -> pa.RecordBatch:
    """`batch` with exactly the columns of the stream's schema, in its order, without copying any.

    Columns that may be null are added where they are missing; so is the timestamp of the default schema. Raises
    `SchemaMismatch` for anything else that differs: values are never converted silently.
    """
    schema = stream.schema
    if batch.schema.equals(schema):
        return batch
    extra = set(batch.schema.names) - set(schema.names)
    if extra:
        raise _mismatch(stream, f"has no column {min(extra)!r}")
    arrays = []
    for field in schema:
        at = batch.schema.get_field_index(field.name)
        if at >= 0:
            column = batch.column(at)
            if column.type != field.type:
                raise _mismatch(stream, f"column {field.name!r} is {field.type}, the batch has {column.type}")
            if not field.nullable and column.null_count:
                raise _mismatch(stream, f"column {field.name!r} takes no nulls, the batch has {column.null_count}")
            arrays.append(column)
        elif not stream.typed and field.name == "timestamp":
            arrays.append(pa.repeat(pa.scalar(now_us, _TIMESTAMP), batch.num_rows))
        elif field.nullable:
            arrays.append(pa.nulls(batch.num_rows, field.type))
        else:
            raise _mismatch(stream, f"needs column {field.name!r}")
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _mismatch(stream: StreamDescription, text: str) -> SchemaMismatch:
    return SchemaMismatch(f"stream {stream.name!r}: {text}", stream=stream.name, schema_id=stream.schema_id)


def payloads(batch: pa.RecordBatch, stream: StreamDescription, chunk_bytes_max: int, now_us: int) -> Iterator[Payload]:
    """`batch` as payloads of chunks of about `chunk_bytes_max`; `now_us` stands in for times that are not there.

    Raises `RecordTooLarge` when a single row does not fit into a segment.
    """
    limit = stream.segment_bytes_min or chunk_bytes_max
    target = min(chunk_bytes_max, limit)
    for piece in _pieces(batch, target, limit, stream):
        low, high = _time_range(piece, stream, now_us)
        yield Payload(encode_payload(piece, stream.codec), piece.num_rows, low, high)


def _pieces(batch: pa.RecordBatch, target: int, limit: int, stream: StreamDescription) -> Iterator[pa.RecordBatch]:
    size = chunk_bytes_of(batch)
    rows = batch.num_rows
    if size <= target:
        yield batch
        return
    step = max(1, rows * target // size)
    for start in range(0, rows, step):
        piece = batch.slice(start, step)
        if chunk_bytes_of(piece) <= limit:
            yield piece
        elif piece.num_rows == 1:
            raise too_large(chunk_bytes_of(piece), limit, stream.name)
        else:  # rows of very different sizes
            half = piece.num_rows // 2
            yield from _pieces(piece.slice(0, half), target, limit, stream)
            yield from _pieces(piece.slice(half), target, limit, stream)


def too_large(size: int, limit: int, stream: str) -> RecordTooLarge:
    """The error for a record that fits into no segment."""
    return RecordTooLarge(
        f"record of {size} bytes does not fit into a segment of stream {stream!r} ({limit} bytes);"
        " split it, or run brokers with a larger --segment-bytes",
        stream=stream,
        record_bytes=size,
        limit=limit,
    )


def _time_range(batch: pa.RecordBatch, stream: StreamDescription, now_us: int) -> tuple[int, int]:
    name = stream.timestamp_column if stream.typed else "timestamp"
    if name is None:
        return now_us, now_us
    times = batch.column(name)
    if times.type != _TIMESTAMP:
        times = pc.cast(times, pa.timestamp("us", tz=times.type.tz), safe=False)
    ends = pc.min_max(times)
    low, high = ends["min"].value, ends["max"].value
    return (now_us, now_us) if low is None else (low, high)
