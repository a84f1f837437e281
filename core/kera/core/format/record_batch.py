"""The metadata of a chunk's payload: the number of records, whether it is compressed, and its size without compression.

    0            4                8                                    8 + metadata_bytes
    ┌────────────┬────────────────┬────────────────────────────────────┬──────────────────────────
    │ 0xFFFFFFFF │ metadata_bytes │ flatbuffer: Message → RecordBatch  │ body: the buffers
    └────────────┴────────────────┴────────────────────────────────────┴──────────────────────────

A payload is one Arrow IPC record-batch message. Its metadata are read here field by field, without Arrow and without
touching the body. That takes about two microseconds whatever the content, so a broker can check each chunk on arrival,
and a reader knows the size of a buffer before it decompresses it.

Promise: whatever the bytes are, the outcome is a `Shape` or `CorruptChunk`. `decode_payload` then has Arrow read it.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from kera.core.errors import CorruptChunk
from kera.core.format.chunk import HEADER_BYTES, PAYLOAD_BYTES_MAX, ChunkHeader
from kera.core.format.written_out import check_written_out, never_null_columns, shared_columns

DECOMPRESSED_BYTES_MAX = 128 << 20
"""Maximum of all buffers of one chunk together. A few kilobytes of compressed zeros can become a gigabyte."""

RECORDS_WITHOUT_BYTES = 1 << 16
"""Maximum of records in a batch whose columns take no bytes, as all are of type null. Other columns take at least a bit
for each record."""
BITS = 8
BUFFERS_MAX = 1 << 14
"""Maximum of buffers in a compressed batch, as each buffer is checked separately. A column has two or three."""

_PREFIX = struct.Struct("<iiI")
_I32, _U32, _I64, _U16 = (struct.Struct(f"<{code}").unpack_from for code in "iIqH")
# A vtable: its own size, the size of the table, then the offset of each field in the table. Trailing fields that have
# their default are left out.
_MESSAGE_VTABLE = struct.Struct("<HHHHHH").unpack_from  # version, header type, header, body length
_BATCH_VTABLE = struct.Struct("<HHHHH").unpack_from  # length, nodes, buffers
_WITH_BODY, _WITH_HEADER = 12, 10
_WITH_BUFFERS, _WITH_NODES, _WITH_LENGTH = 10, 8, 6
_RANGE = struct.Struct("<qq")
_METADATA_AT = 8
_CONTINUATION = -1
_RECORD_BATCH = 3
_COMPRESSION_AT = 10
"""The place in a record batch's vtable of the offset of its compression, if the vtable is long enough."""
_UNCOMPRESSED = -1
_FEW_FIELDS = 64
"""Up to this number of fields, their nodes are read one by one, as calls of numpy would take longer."""
_NODES = tuple(struct.Struct(f"<{2 * count}Q").unpack_from for count in range(_FEW_FIELDS + 1))
_LENGTH_BYTES = 8


class Shape(NamedTuple):
    """The metadata of a record batch."""

    records: int
    compressed: bool
    body_at: int
    """The offset of the body in the payload."""
    body_bytes: int
    buffers_at: int
    """The offset of the table of buffers in the payload; 0: there is no such table."""
    nodes_at: int
    """The offset of the table of nodes, which has the number of values of each field; 0: there is no such table."""


def shape_of(payload: Any) -> Shape:
    """Read the metadata of a payload. Raises `CorruptChunk` if it is not a record-batch message."""
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
        vtable_bytes, _, length_at, nodes_at, buffers_at = _BATCH_VTABLE(payload, batch_vtable)
        if vtable_bytes < _WITH_BUFFERS:
            nodes_at = nodes_at if vtable_bytes >= _WITH_NODES else 0
            buffers_at, length_at = 0, length_at if vtable_bytes >= _WITH_LENGTH else 0
        body_bytes = _I64(payload, table + body_bytes_at)[0] if body_bytes_at else 0
        records = _I64(payload, batch + length_at)[0] if length_at else 0
        compressed = vtable_bytes > _COMPRESSION_AT and _U16(payload, batch_vtable + _COMPRESSION_AT)[0] != 0
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
            raise _no_batch("its metadata do not describe a record batch")
        if buffers_at:
            buffers_at += batch + _U32(payload, batch + buffers_at)[0]
        if nodes_at:
            nodes_at += batch + _U32(payload, batch + nodes_at)[0]
    except (struct.error, IndexError) as error:
        raise _no_batch("its metadata point beyond it") from error
    return Shape(records, compressed, body_at, body_bytes, buffers_at, nodes_at)


def decompressed_bytes(payload: Any, shape: Shape) -> int:
    """Return the decompressed size of all buffers of a compressed batch, as the batch states it.

    Raises `CorruptChunk`.
    """
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


def values_of(payload: Any, shape: Shape) -> int:
    """Return how many values all fields claim to have together, nested ones included.

    A negative number counts as a large one. Raises `CorruptChunk`.
    """
    if not shape.nodes_at:
        return 0
    try:
        count: int = _U32(payload, shape.nodes_at)[0]
        if count <= _FEW_FIELDS:
            return sum(_NODES[count](payload, shape.nodes_at + 4)[::2])
        lengths = np.frombuffer(payload, "<u8", 2 * count, shape.nodes_at + 4)[::2]
    except (struct.error, ValueError) as error:
        raise _no_batch("its table of fields points beyond it") from error
    return int(np.minimum(lengths, PAYLOAD_BYTES_MAX).sum())


def room_of(shape: Shape, limit: int) -> int:
    """Return how many bytes a batch's values may take when each is written out, and so how many values it may have.

    A batch whose values do not share bytes never takes more: its smallest value is a bit, which counts as a byte.
    """
    return limit if shape.compressed else max(limit, BITS * shape.body_bytes)


def check_size(payload: Any, shape: Shape, limit: int = DECOMPRESSED_BYTES_MAX) -> None:
    """Raise `CorruptChunk` if a batch has more records or values than its bytes can hold, or takes more than `limit`.

    This goes by the metadata; `check_written_out` checks the values themselves.
    """
    bits = BITS * (limit if shape.compressed else shape.body_bytes)
    if shape.records > max(RECORDS_WITHOUT_BYTES, bits):
        raise _no_batch(f"it says that {shape.body_bytes} bytes are {shape.records} records")
    if (values := values_of(payload, shape)) > (room := room_of(shape, limit)):
        raise CorruptChunk(
            f"{len(payload)} bytes of chunk payload say to be {values} values; at most {room} are taken"
            " (decompressed_bytes_max)",
            values=values,
            limit=room,
        )
    if shape.compressed and (size := decompressed_bytes(payload, shape)) > limit:
        raise CorruptChunk(
            f"{len(payload)} bytes of chunk payload would become {size} when they are decompressed; at most {limit} are"
            " taken (decompressed_bytes_max)",
            decompressed_bytes=size,
            limit=limit,
        )


def is_readable(batch: pa.RecordBatch, *, compressed: bool) -> bool:
    """Return whether readers with the default settings accept a chunk of `batch`, whose schema `may_grow`."""
    payload = batch.serialize()
    shape = shape_of(memoryview(payload))._replace(compressed=compressed)
    room = room_of(shape, DECOMPRESSED_BYTES_MAX)
    if values_of(memoryview(payload), shape) > room:
        return False
    try:
        # The batch as it is sent, since `batch` may be a slice of larger arrays.
        check_written_out(pa.ipc.read_record_batch(payload, batch.schema), room)
    except CorruptChunk:
        return False
    return True


def decode_payload(
    payload: Any,
    schema: pa.Schema,
    *,
    records: int | None = None,
    decompressed_bytes_max: int = DECOMPRESSED_BYTES_MAX,
    trusted: bool = False,
) -> pa.RecordBatch:
    """Return the record batch in a chunk's payload; unless it is compressed, its columns are `payload`'s memory.

    Whatever the bytes are, no column reaches beyond its buffers, and text is valid: a checksum only shows that the
    bytes are what some program has written. Raises `CorruptChunk` if they are not a record batch of `schema`, have
    another number of `records`, or would take more than `decompressed_bytes_max`, also when each value is written out
    (`room_of`). `trusted`: check only the number of records, so that none of this holds if a dishonest program has
    written the payload.
    """
    try:
        batch = (
            pa.ipc.read_record_batch(payload, schema)
            if trusted
            else _validated(payload, schema, decompressed_bytes_max)
        )
    except (pa.ArrowException, OSError, EOFError, ValueError, OverflowError) as error:
        raise CorruptChunk(f"chunk payload is not an Arrow record batch of the expected schema: {error}") from error
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
    if shared_columns(schema):
        batch.validate()
        # Before the full validation, which would take as long on gigabytes of values as writing them out.
        check_written_out(batch, room_of(shape, decompressed_bytes_max))
    batch.validate(full=True)
    for at in never_null_columns(schema):
        if batch.column(at).null_count:
            raise _no_batch(f"it has nulls in column {schema.field(at).name!r}, which is not nullable")
    return batch


def check_payload(chunk: memoryview, at: int, header: ChunkHeader) -> None:
    """Check the payload of the chunk at `at` against its header, whose checksums were verified.

    Raises `CorruptChunk` if it is not a record batch, if its number of records or its compression is not what the
    header says, or if it is too large when decompressed.
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
    return CorruptChunk(f"chunk payload is not an Arrow record batch: {why}")
