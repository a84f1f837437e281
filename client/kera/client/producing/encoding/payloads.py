"""Records into batches, batches into payloads of chunks. Pure functions over Arrow data."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kera.client.arrow_input import null_column
from kera.client.headers import Header
from kera.client.producing.encoding.record_message import write_message
from kera.client.producing.encoding.row_sizes import OVERHEAD_BYTES, lean_bytes_of
from kera.client.types import StreamDescription
from kera.core.errors import RecordTooLarge
from kera.core.format.chunk import (
    ALIGNMENT_BYTES,
    ARROW_VERSION,
    HEADER_BYTES,
    LEAN_VERSION,
    Codec,
    chunk_bytes_of,
    encode_payload,
    padded,
)
from kera.core.format.lean import encode, is_lean
from kera.core.format.payload import encode_lean
from kera.core.format.record_batch import DECOMPRESSED_BYTES_MAX, is_readable
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.format.written_out import may_grow
from kera.core.native import accelerated

_KEYS = DEFAULT_SCHEMA.field("keys").type
_HEADERS = DEFAULT_SCHEMA.field("headers").type
_TIMESTAMP = DEFAULT_SCHEMA.field("timestamp").type
Timestamps: TypeAlias = "array[int] | npt.NDArray[np.int64]"
"""Microseconds since the Unix epoch."""
_FEW = 16
"""Up to this many times are converted one by one: numpy's calls would take longer."""


class Payload(NamedTuple):
    """The content of one chunk, and the fields of its header that describe it."""

    payload: pa.Buffer | bytes
    record_count: int
    min_timestamp_us: int
    max_timestamp_us: int
    schema_id: int
    """Schema id of the columns that it was made with: columns may be added to the stream later."""
    version: int = ARROW_VERSION
    """Version of the chunk format."""


def timestamps(times_s: Sequence[float], given_us: Mapping[int, int] | None) -> Timestamps:
    """Convert seconds to microseconds; `given_us` replaces some of them, by index."""
    if len(times_s) <= _FEW:
        few = array("q", [round(time_s * 1e6) for time_s in times_s])
        if given_us is not None:
            for index, time_us in given_us.items():
                few[index] = time_us
        return few
    made: npt.NDArray[np.int64] = np.rint(np.fromiter(times_s, np.float64, len(times_s)) * 1e6).astype(np.int64)
    if given_us is not None:
        made[list(given_us.keys())] = list(given_us.values())
    return made


def record_payloads(
    values: Sequence[bytes | None],
    timestamps_us: Timestamps,
    keys: Sequence[Sequence[bytes] | None] | None,
    headers: Sequence[Sequence[Header] | None] | None,
    stream: StreamDescription,
    chunk_bytes_max: int,
    *,
    lean: bool = False,
) -> Iterator[Payload]:
    """Yield payloads of chunks of about `chunk_bytes_max`; `keys` or `headers` is None if no record has any.

    `lean`: write version 2 of the format. Raises `RecordTooLarge` when a single record does not fit into a segment.
    """
    if lean and headers is None and stream.codec is Codec.NONE:
        made = encode_records(values, timestamps_us, keys, DECOMPRESSED_BYTES_MAX)
        size = HEADER_BYTES + padded(len(made)) if made is not None else 0
        if made is not None and size <= min(chunk_bytes_max, limit_of(stream, chunk_bytes_max)):
            ends = _ends(timestamps_us)
            yield Payload(made, len(values), *ends, stream.schema_id, LEAN_VERSION)
            return
    as_message = headers is None and stream.codec is Codec.NONE and not lean
    whole = _as_message(values, timestamps_us, keys) if as_message else None
    if whole is not None and HEADER_BYTES + padded(whole.size) <= min(
        chunk_bytes_max, limit_of(stream, chunk_bytes_max)
    ):
        yield Payload(whole, len(values), *_ends(timestamps_us), stream.schema_id)
    else:
        batch = records_to_batch(values, timestamps_us, keys, headers)
        yield from payloads(batch, stream, chunk_bytes_max, 0, lean=lean)


@accelerated()
def encode_records(
    values: Sequence[bytes | None],
    timestamps_us: Timestamps,
    keys: Sequence[Sequence[bytes] | None] | None,
    bytes_max: int,
) -> bytes | None:
    """Return a payload of format version 2, of records without headers; see `kera.core.format.lean.encode`."""
    return encode(records_to_batch(values, timestamps_us, keys, None), None, bytes_max=bytes_max)


def _as_message(values: Any, timestamps_us: Timestamps, keys: Any) -> pa.Buffer | None:
    try:
        return write_message(timestamps_us, values, keys)
    except (TypeError, OverflowError):
        return None  # a record has no value, or no keys while others have some; or a message cannot hold that much


def _ends(times: Timestamps) -> tuple[int, int]:
    if isinstance(times, array):
        return min(times), max(times)
    return int(np.minimum.reduce(times)), int(np.maximum.reduce(times))  # min() and max() would take twice as long


def records_to_batch(
    values: Sequence[bytes | None],
    timestamps_us: Sequence[int] | Timestamps,
    keys: Sequence[Sequence[bytes] | None] | None,
    headers: Sequence[Sequence[Header] | None] | None,
) -> pa.RecordBatch:
    """Make columns of the default schema from lists; `keys` or `headers` is None if no record has any."""
    count = len(values)
    return pa.RecordBatch.from_arrays(
        [
            pa.Array.from_buffers(_TIMESTAMP, count, [None, pa.py_buffer(np.asarray(timestamps_us, np.int64))]),
            null_column(count, _KEYS) if keys is None else pa.array(keys, _KEYS),
            pa.array(values, pa.binary()),
            null_column(count, _HEADERS) if headers is None else pa.array(headers, _HEADERS),
        ],
        schema=DEFAULT_SCHEMA,
    )


def check_rows(batch: pa.RecordBatch, stream: StreamDescription, *, lean: bool = False) -> int:
    """Return the length of the chunk that all rows together would be.

    Raises `RecordTooLarge` when a single row does not fit into a segment, or is more than readers take. Cheap: it looks
    at sizes only, unless there is a codec and a row of more than half a segment.
    """
    limit, chunk_bytes = stream.segment_bytes_min, chunk_bytes_of(batch)
    compressed = stream.codec is not Codec.NONE
    target = limit // 2 if compressed else limit
    if limit and chunk_bytes > target:
        for piece in _pieces(batch, chunk_bytes, target, limit, stream, lean=False):
            if compressed:
                _check_compressed(piece, limit, stream, lean=lean and is_lean(stream.schema))
    if may_grow(stream.schema):
        for _ in _readable(batch, stream):
            pass
    return chunk_bytes


def _check_compressed(batch: pa.RecordBatch, limit: int, stream: StreamDescription, *, lean: bool) -> None:
    """Raise `RecordTooLarge` for a row that is too large once it is compressed, though it would fit as it is."""
    rows = batch.num_rows
    if chunk_bytes_of(batch) <= limit // 2:  # no codec makes it twice as large
        return
    if rows == 1:
        for _ in _encoded(batch, limit, stream, 0, lean=lean):
            pass
    else:
        for half in (batch.slice(0, rows // 2), batch.slice(rows // 2)):
            _check_compressed(_solid(half), limit, stream, lean=lean)


def checked_size(batch: pa.RecordBatch, stream: StreamDescription, chunk_bytes_max: int, *, lean: bool) -> int:
    """Return the maximum length of the chunk that all rows together would be. Raises what `check_rows` does."""
    chunk_bytes = check_rows(batch, stream, lean=lean)
    if lean and chunk_bytes > chunk_bytes_max and is_lean(stream.schema):
        return size_of(batch, lean=True)
    return chunk_bytes


def size_of(batch: pa.RecordBatch, *, lean: bool) -> int:
    """Return the size of a batch's chunk without compression: exact for version 1, about the maximum for version 2."""
    return HEADER_BYTES + OVERHEAD_BYTES + lean_bytes_of(batch) if lean else chunk_bytes_of(batch)


def payloads(
    batch: pa.RecordBatch,
    stream: StreamDescription,
    chunk_bytes_max: int,
    now_us: int,
    chunk_bytes: int | None = None,
    *,
    lean: bool = False,
) -> Iterator[Payload]:
    """Yield `batch` as payloads of chunks of about `chunk_bytes_max`; `now_us` stands in for missing times.

    `chunk_bytes`: the length of a chunk of the whole batch, if it is known. `lean`: write version 2 of the format,
    where the schema permits it. Raises `RecordTooLarge` when a single row does not fit into a segment.
    """
    limit = limit_of(stream, chunk_bytes_max)
    target = min(chunk_bytes_max, limit)
    lean = lean and is_lean(stream.schema)
    size = size_of(batch, lean=lean) if chunk_bytes is None else chunk_bytes
    for piece in _pieces(batch, size, target, limit, stream, lean=lean):
        for readable in _readable(piece, stream) if may_grow(stream.schema) else (piece,):
            yield from _encoded(readable, limit, stream, now_us, lean=lean)


def _readable(batch: pa.RecordBatch, stream: StreamDescription) -> Iterator[pa.RecordBatch]:
    """Yield parts of `batch` that readers take: many values can share the same few bytes, and be gigabytes expanded."""
    rows = batch.num_rows
    if is_readable(batch, compressed=stream.codec is not Codec.NONE):
        yield batch
    elif rows <= 1:
        raise RecordTooLarge(
            f"stream {stream.name!r}: the values of a record are more than {DECOMPRESSED_BYTES_MAX} bytes, or as many"
            " values, when each is written out, which no reader takes; make several records of it",
            stream=stream.name,
            limit=DECOMPRESSED_BYTES_MAX,
        )
    else:
        yield from _readable(batch.slice(0, rows // 2), stream)
        yield from _readable(batch.slice(rows // 2), stream)


def limit_of(stream: StreamDescription, chunk_bytes_max: int) -> int:
    """Maximum length of a chunk."""
    return stream.segment_bytes_min or chunk_bytes_max


def _encoded(
    batch: pa.RecordBatch, limit: int, stream: StreamDescription, now_us: int, *, lean: bool
) -> Iterator[Payload]:
    payload: pa.Buffer | bytes | None = encode_lean(batch, stream.codec, stream.schema) if lean else None
    version = LEAN_VERSION
    if payload is None:
        payload, version = encode_payload(batch, stream.codec), ARROW_VERSION
    chunk_bytes = HEADER_BYTES + padded(len(payload))
    if chunk_bytes <= limit:
        low, high = time_range(batch, stream, now_us)
        yield Payload(payload, batch.num_rows, low, high, stream.schema_id, version)
        return
    # Data that cannot be compressed becomes somewhat larger when a codec is applied.
    if batch.num_rows == 1:
        raise too_large(chunk_bytes, limit, stream)
    half = batch.num_rows // 2
    yield from _encoded(batch.slice(0, half), limit, stream, now_us, lean=lean)
    yield from _encoded(batch.slice(half), limit, stream, now_us, lean=lean)


def _pieces(
    batch: pa.RecordBatch, size: int, target: int, limit: int, stream: StreamDescription, *, lean: bool
) -> Iterator[pa.RecordBatch]:
    rows = batch.num_rows
    if size <= target:
        yield batch
        return
    step = max(1, rows * target // size)
    for start in range(0, rows, step):
        piece = batch.slice(start, step)
        size = size_of(piece, lean=lean)
        if size > 2 * target:  # suspicious: larger rows than the others', or a hollow column
            piece = _solid(piece)
            size = size_of(piece, lean=lean)
        if size <= limit:
            yield piece
        elif piece.num_rows == 1:
            raise too_large(size, limit, stream)
        else:  # rows of very different sizes
            middle = piece.num_rows // 2
            for half in (piece.slice(0, middle), piece.slice(middle)):
                yield from _pieces(half, size_of(half, lean=lean), target, limit, stream, lean=lean)


def _solid(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return `batch` with its hollow columns copied, so that they are no longer hollow.

    A list column (or map) is hollow if all its lists are empty or null. Arrow's writer normally omits the part of a
    column outside a slice, but it writes the buffers of children without values at full length. So each slice of a
    batch would carry the offsets of the whole batch, and so does a column made by `pa.nulls`.
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


def too_large(size: int, limit: int, stream: StreamDescription) -> RecordTooLarge:
    """Return the error for a record that fits into no segment, or into no request."""
    return RecordTooLarge(
        f"record of {size} bytes does not fit into {room_in_words(limit, stream)}",
        stream=stream.name,
        record_bytes=size,
        limit=limit,
    )


def room_in_words(limit: int, stream: StreamDescription) -> str:
    """Describe the container that a record has to fit into, and what to do when it does not."""
    if stream.message_bytes_max and limit == stream.message_bytes_max & -ALIGNMENT_BYTES:
        return f"a request ({limit} bytes); split it, or set message_bytes_max higher, of the client and of brokers"
    return (
        f"a segment of stream {stream.name!r} ({limit} bytes); split it, or run brokers with a larger --segment-bytes"
    )


def times_of(batch: pa.RecordBatch, stream: StreamDescription) -> pa.Array | None:
    """Return the times of the rows; None if the stream has no column of times."""
    name = stream.timestamp_column if stream.typed else "timestamp"
    if name is None:
        return None
    times = batch.column(name)
    if times.type != _TIMESTAMP:
        times = pc.cast(times, pa.timestamp("us", tz=times.type.tz), safe=False)
    return times


def time_range(batch: pa.RecordBatch, stream: StreamDescription, now_us: int) -> tuple[int, int]:
    """Return the first and the last time of the rows; `now_us` for both if no row has a time."""
    times = times_of(batch, stream)
    if times is None:
        return now_us, now_us
    if not times.null_count:
        # Reading the buffer costs, for a small chunk, a fraction of min_max, and half of a view as an array.
        return _ends(np.frombuffer(times.buffers()[1], np.int64, len(times), 8 * times.offset))
    ends = pc.min_max(times)
    low, high = ends["min"].value, ends["max"].value
    return (now_us, now_us) if low is None else (low, high)
