"""What a chunk's payload says of itself: how many records, whether compressed, how large that would become.

    0            4                8                                    8 + metadata_bytes
    ┌────────────┬────────────────┬────────────────────────────────────┬──────────────────────────
    │ 0xFFFFFFFF │ metadata_bytes │ flatbuffer: Message → RecordBatch  │ body: the buffers
    └────────────┴────────────────┴────────────────────────────────────┴──────────────────────────

A payload is one Arrow IPC record-batch message. Its metadata are read here field by field, without Arrow and without
touching the body: that takes some two microseconds, whatever is in it, so a broker can look at each chunk at its door,
and a reader knows what a buffer will take before it is decompressed.

Promise: whatever the bytes are, the outcome is a `Shape` or `CorruptChunk`. `decode_payload` then has Arrow read it.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from kera.core.chunk import HEADER_BYTES, ChunkHeader
from kera.core.errors import CorruptChunk

DECOMPRESSED_BYTES_MAX = 128 << 20
"""Of all buffers of one chunk together. A few kilobytes of zeros can say that they are a gigabyte."""

RECORDS_WITHOUT_BYTES = 1 << 16
"""Of a batch whose columns take none: all of them are of type null. Others take a bit for each record, at least."""
BITS = 8
BUFFERS_MAX = 1 << 14
"""Of a compressed batch: each is looked at by itself. A column has two or three."""

_PREFIX = struct.Struct("<iiI")
_I32, _U32, _I64, _U16 = (struct.Struct(f"<{code}").unpack_from for code in "iIqH")
# A vtable: its own size, the table's, then where in the table each field is. What is at the end and has its default is
# not in it.
_MESSAGE_VTABLE = struct.Struct("<HHHHHH").unpack_from  # version, header type, header, body length
_BATCH_VTABLE = struct.Struct("<HHHHH").unpack_from  # length, nodes, buffers
_WITH_BODY, _WITH_HEADER = 12, 10
_WITH_BUFFERS, _WITH_LENGTH = 10, 6
_RANGE = struct.Struct("<qq")
_METADATA_AT = 8
_CONTINUATION = -1
_RECORD_BATCH = 3
_COMPRESSION_AT, _VIEWS_AT = 10, 12
"""Where in its vtable a record batch has the offsets of its compression, and of how many buffers columns of views have,
if the vtable is so long."""
_UNCOMPRESSED = -1
_INLINE_BYTES = 12
"""Of a view: longer values are in another buffer."""
_LENGTH_BYTES = 8


class Shape(NamedTuple):
    """What the metadata of a record batch say."""

    records: int
    compressed: bool
    body_at: int
    """Where in the payload the body begins."""
    body_bytes: int
    buffers_at: int
    """Where in the payload the table of buffers is; 0: there is none."""
    views: bool
    """Some columns are of views: each value says in which of several buffers it is."""


def shape_of(payload: Any) -> Shape:
    """Read the metadata of a payload. Raises `CorruptChunk` if it is no record-batch message."""
    try:
        continuation, metadata_bytes, root = _PREFIX.unpack_from(payload, 0)
        body_at = _METADATA_AT + metadata_bytes
        table = _METADATA_AT + root
        vtable = table - _I32(payload, table)[0]
        vtable_bytes, _, _, type_at, header_at, body_bytes_at = _MESSAGE_VTABLE(payload, vtable)
        if vtable_bytes < _WITH_BODY:
            body_bytes_at, header_at = 0, header_at if vtable_bytes >= _WITH_HEADER else 0
        batch = table + header_at + _U32(payload, table + header_at)[0]
        batch_vtable = batch - _I32(payload, batch)[0]
        vtable_bytes, _, length_at, _, buffers_at = _BATCH_VTABLE(payload, batch_vtable)
        if vtable_bytes < _WITH_BUFFERS:
            buffers_at, length_at = 0, length_at if vtable_bytes >= _WITH_LENGTH else 0
        body_bytes = _I64(payload, table + body_bytes_at)[0] if body_bytes_at else 0
        records = _I64(payload, batch + length_at)[0] if length_at else 0
        compressed = vtable_bytes > _COMPRESSION_AT and _U16(payload, batch_vtable + _COMPRESSION_AT)[0] != 0
        views = vtable_bytes > _VIEWS_AT and _U16(payload, batch_vtable + _VIEWS_AT)[0] != 0
        if (
            continuation != _CONTINUATION
            or not type_at
            or payload[table + type_at] != _RECORD_BATCH
            or not header_at
            or min(vtable, batch_vtable) < _METADATA_AT
            or not _METADATA_AT < body_at <= len(payload)
            or not 0 <= body_bytes <= len(payload) - body_at
            or records < 0
        ):
            raise _no_batch("its metadata are none of a record batch")
        if buffers_at:
            buffers_at += batch + _U32(payload, batch + buffers_at)[0]
    except (struct.error, IndexError) as error:
        raise _no_batch("its metadata point beyond it") from error
    return Shape(records, compressed, body_at, body_bytes, buffers_at, views)


def decompressed_bytes(payload: Any, shape: Shape) -> int:
    """What the buffers of a compressed batch say to become, in sum. Raises `CorruptChunk`."""
    if not shape.buffers_at:
        return 0
    total = 0
    try:
        (count,) = _U32(payload, shape.buffers_at)
        if count > BUFFERS_MAX:
            raise _no_batch(f"it has {count} buffers; at most {BUFFERS_MAX} are taken")
        table = payload[shape.buffers_at + 4 : shape.buffers_at + 4 + count * _RANGE.size]
        for offset, length in _RANGE.iter_unpack(table):
            if not 0 <= offset <= shape.body_bytes or not 0 <= length <= shape.body_bytes - offset:
                raise _no_batch(f"a buffer of {length} bytes at {offset}, in a body of {shape.body_bytes}")
            if length:
                size = _I64(payload, shape.body_at + offset)[0]
                if size < _UNCOMPRESSED:
                    raise _no_batch(f"a buffer that says to become {size} bytes")
                total += length - _LENGTH_BYTES if size == _UNCOMPRESSED else size
    except struct.error as error:
        raise _no_batch("its table of buffers points beyond it") from error
    return total


def check_size(payload: Any, shape: Shape, limit: int = DECOMPRESSED_BYTES_MAX) -> None:
    """Raise `CorruptChunk` if a batch has more records than its bytes can be, or would take more than `limit` bytes."""
    bits = BITS * (limit if shape.compressed else shape.body_bytes)
    if shape.records > max(RECORDS_WITHOUT_BYTES, bits):
        raise _no_batch(f"it says that {shape.body_bytes} bytes are {shape.records} records")
    if shape.compressed and (size := decompressed_bytes(payload, shape)) > limit:
        raise CorruptChunk(
            f"{len(payload)} bytes of chunk payload would become {size} when they are decompressed; at most {limit} are"
            " taken (decompressed_bytes_max)",
            decompressed_bytes=size,
            limit=limit,
        )


def decode_payload(
    payload: Any,
    schema: pa.Schema,
    *,
    records: int | None = None,
    decompressed_bytes_max: int = DECOMPRESSED_BYTES_MAX,
    trusted: bool = False,
) -> pa.RecordBatch:
    """The record batch in a chunk's payload, in place: unless it is compressed, its columns are `payload`'s memory.

    Whatever the bytes are, no column reaches out of its buffers, and text is text: a checksum only says that they are
    what somebody has written. Raises `CorruptChunk` when they are no record batch of `schema`, another number of
    `records`, or would take more than `decompressed_bytes_max`. `trusted`: only the number of records is looked at, and
    none of this is promised of a payload that no honest writer has made.
    """
    try:
        batch = (
            pa.ipc.read_record_batch(payload, schema)
            if trusted
            else _validated(payload, schema, decompressed_bytes_max)
        )
    except (pa.ArrowException, OSError, EOFError, ValueError, OverflowError) as error:
        raise CorruptChunk(f"chunk payload is no Arrow record batch of the expected schema: {error}") from error
    if records is not None and batch.num_rows != records:
        raise CorruptChunk(
            f"chunk header says {records} records, and its record batch has {batch.num_rows}",
            record_count=records,
            rows=batch.num_rows,
        )
    return batch


def _validated(payload: Any, schema: pa.Schema, decompressed_bytes_max: int) -> pa.RecordBatch:
    shape = shape_of(memoryview(payload))
    check_size(memoryview(payload), shape, decompressed_bytes_max)
    batch = pa.ipc.read_record_batch(payload, schema)
    batch.validate(full=True)
    if shape.views:
        for column in batch.columns:
            _check_views(column)
    return batch


def _check_views(column: pa.Array) -> None:
    """Raise `CorruptChunk` if a view reaches out of its buffers, also that of a null.

    Arrow does not look at those when it validates, and does when it casts.
    """
    kind = column.type
    if pa.types.is_struct(kind):
        for at in range(kind.num_fields):
            _check_views(column.field(at))
    elif pa.types.is_nested(kind):
        if not pa.types.is_union(kind):
            _check_views(column.values)
    elif pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        _, views, *data = column.buffers()
        rows = np.frombuffer(views, np.int32, 4 * len(column), 16 * column.offset).reshape(-1, 4)
        lengths = rows[:, 0].astype(np.int64)
        far = rows[lengths > _INLINE_BYTES]
        sizes = np.array([0 if buffer is None else buffer.size for buffer in data], np.int64)
        known = (far[:, 2] >= 0) & (far[:, 2] < len(sizes)) & (far[:, 3] >= 0)
        if (lengths < 0).any() or not known.all() or (far[:, 3].astype(np.int64) + far[:, 0] > sizes[far[:, 2]]).any():
            raise _no_batch("a view that reaches out of its buffers")


def check_payload(chunk: memoryview, at: int, header: ChunkHeader) -> None:
    """Check the payload of the chunk at `at` against its header, whose checksums were verified.

    Raises `CorruptChunk` if it is no record batch, or another number of records than the header says, compressed
    without saying so, or too large when decompressed.
    """
    payload_at = at + HEADER_BYTES
    payload = chunk[payload_at : payload_at + header.payload_bytes]
    shape = shape_of(payload)
    if shape.records == header.record_count and shape.compressed == (header.codec != 0):
        check_size(payload, shape)
        return
    names = {"stream_id": header.stream_id, "streamlet_id": header.streamlet_id, "sequence": header.sequence}
    if shape.records != header.record_count:
        raise CorruptChunk(
            f"chunk header says {header.record_count} records, and its record batch has {shape.records} (stream"
            f" {header.stream_id}, streamlet {header.streamlet_id}, sequence {header.sequence})",
            record_count=header.record_count,
            rows=shape.records,
            **names,
        )
    raise CorruptChunk(
        f"chunk header has codec {header.codec}, and its record batch is {'' if shape.compressed else 'not '}compressed"
        f" (stream {header.stream_id}, streamlet {header.streamlet_id}, sequence {header.sequence})",
        codec=header.codec,
        **names,
    )


def _no_batch(why: str) -> CorruptChunk:
    return CorruptChunk(f"chunk payload is no Arrow record batch: {why}")
