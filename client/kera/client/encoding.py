"""Records into batches, batches into payloads of chunks. Pure functions over Arrow data."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kera.client.types import StreamDescription
from kera.core.chunk import HEADER_BYTES, chunk_bytes_of, encode_payload, padded
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
            pa.Array.from_buffers(_TIMESTAMP, count, [None, pa.py_buffer(np.array(timestamps_us, np.int64))]),
            null_column(count, _KEYS) if keys is None else pa.array(keys, _KEYS),
            pa.array(values, pa.binary()),
            null_column(count, _HEADERS)
            if headers is None
            else pa.array([None if item is None else list(item.items()) for item in headers], _HEADERS),
        ],
        schema=DEFAULT_SCHEMA,
    )


def null_column(count: int, kind: pa.DataType) -> pa.Array:
    """`count` nulls of any type. See `_solid` for what is wrong with `pa.nulls`."""
    return _nulls(kind, 1 << (count - 1).bit_length() if count else 1).slice(0, count)


@functools.lru_cache(maxsize=64)
def _nulls(kind: pa.DataType, count: int) -> pa.Array:
    return pa.array([None], kind).take(pa.repeat(0, count))


def conform(batch: pa.RecordBatch, stream: StreamDescription, now_us: int) -> pa.RecordBatch:
    """`batch` with exactly the columns of the stream's schema, in its order, without copying any.

    Columns that may be null are added where they are missing; so is the timestamp of the default schema. Raises
    `SchemaMismatch` for anything else that differs: values are never converted silently.
    """
    schema = stream.schema
    names = batch.schema.names
    if len(set(names)) < len(names):
        raise _mismatch(stream, f"the batch has several columns {Counter(names).most_common(1)[0][0]!r}")
    extra = set(names) - set(schema.names)
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
            arrays.append(null_column(batch.num_rows, field.type))
        else:
            raise _mismatch(stream, f"needs column {field.name!r}")
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _mismatch(stream: StreamDescription, text: str) -> SchemaMismatch:
    return SchemaMismatch(f"stream {stream.name!r}: {text}", stream=stream.name, schema_id=stream.schema_id)


def check_rows(batch: pa.RecordBatch, stream: StreamDescription) -> None:
    """Raises `RecordTooLarge` when a single row does not fit into a segment. Cheap: it looks at sizes only."""
    limit = stream.segment_bytes_min
    if limit:
        for _ in _pieces(batch, limit, limit, stream):
            pass


def payloads(batch: pa.RecordBatch, stream: StreamDescription, chunk_bytes_max: int, now_us: int) -> Iterator[Payload]:
    """`batch` as payloads of chunks of about `chunk_bytes_max`; `now_us` stands in for times that are not there.

    Raises `RecordTooLarge` when a single row does not fit into a segment.
    """
    limit = stream.segment_bytes_min or chunk_bytes_max
    target = min(chunk_bytes_max, limit)
    for piece in _pieces(batch, target, limit, stream):
        yield from _encoded(piece, limit, stream, now_us)


def _encoded(batch: pa.RecordBatch, limit: int, stream: StreamDescription, now_us: int) -> Iterator[Payload]:
    payload = encode_payload(batch, stream.codec)
    chunk_bytes = HEADER_BYTES + padded(payload.size)
    if chunk_bytes <= limit:
        low, high = _time_range(batch, stream, now_us)
        yield Payload(payload, batch.num_rows, low, high)
        return
    # Compressed, what cannot be compressed is somewhat larger than before.
    if batch.num_rows == 1:
        raise too_large(chunk_bytes, limit, stream.name)
    half = batch.num_rows // 2
    yield from _encoded(batch.slice(0, half), limit, stream, now_us)
    yield from _encoded(batch.slice(half), limit, stream, now_us)


def _pieces(batch: pa.RecordBatch, target: int, limit: int, stream: StreamDescription) -> Iterator[pa.RecordBatch]:
    size = chunk_bytes_of(batch)
    rows = batch.num_rows
    if size <= target:
        yield batch
        return
    step = max(1, rows * target // size)
    for start in range(0, rows, step):
        piece = batch.slice(start, step)
        size = chunk_bytes_of(piece)
        if size > 2 * target:  # suspicious: larger rows than the others', or a hollow column
            piece = _solid(piece)
            size = chunk_bytes_of(piece)
        if size <= limit:
            yield piece
        elif piece.num_rows == 1:
            raise too_large(size, limit, stream.name)
        else:  # rows of very different sizes
            half = piece.num_rows // 2
            yield from _pieces(piece.slice(0, half), target, limit, stream)
            yield from _pieces(piece.slice(half), target, limit, stream)


def _solid(batch: pa.RecordBatch) -> pa.RecordBatch:
    """`batch` without hollow columns, which are copied.

    A list column (or map) whose lists are all empty or null is hollow: Arrow's writer leaves out the part of a column
    that a slice does not show, except for children without any value, whose buffers it writes as long as they are.
    Then each slice of a batch would carry the offsets of the whole, and so does what `pa.nulls` makes.
    """
    hollow = [_is_hollow(column) for column in batch.columns]
    if not any(hollow):
        return batch
    rows = pa.array(np.arange(batch.num_rows))
    columns = [column.take(rows) if bad else column for column, bad in zip(batch.columns, hollow, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _is_hollow(column: pa.Array) -> bool:
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        offsets = column.offsets
        first, end = offsets[0].as_py(), offsets[len(offsets) - 1].as_py()
        return bool(first == end) or _is_hollow(column.values.slice(first, end - first))
    if pa.types.is_struct(kind):
        return any(_is_hollow(column.field(index)) for index in range(kind.num_fields))
    return False


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
    if not times.null_count:
        values = times.view(pa.int64()).to_numpy()  # a third of what min_max costs for a small chunk
        return int(values.min()), int(values.max())
    ends = pc.min_max(times)
    low, high = ends["min"].value, ends["max"].value
    return (now_us, now_us) if low is None else (low, high)
