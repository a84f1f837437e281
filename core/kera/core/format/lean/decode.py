"""Lean payloads as record batches: buffers that are PLAIN are used in place, the others are written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types

from kera.core.errors import CorruptChunk
from kera.core.format.lean.check import check, check_body, check_sizes, check_types, check_written, numbers
from kera.core.format.lean.kinds import Known, known_of, storage_of
from kera.core.format.lean.layout import (
    BYTES,
    LARGE,
    WITH_PLACES,
    Kind,
    Node,
    Place,
    Places,
    Values,
    no_payload,
    read_layout,
)
from kera.core.native import native

import_batch = pa.RecordBatch._import_from_c  # noqa: SLF001 - pyarrow documents it for the C data interface


def decode(
    payload: pa.Buffer,
    schema: pa.Schema,
    *,
    records: int,
    codec: str | None,
    bytes_max: int,
    trusted: bool,
) -> pa.RecordBatch:
    """Return the record batch in a payload. Raises `CorruptChunk` if it is not a payload of `schema`.

    `codec` is Arrow's name of the codec of the body. `trusted`: check only what is needed to find the buffers, for a
    payload that has passed `check`, or comes from an honest writer.
    """
    if codec is None and native is not None:
        batch = _by_native(payload, schema, records, bytes_max, trusted=trusted)
        if batch is not None:
            return batch
    view, compressed = memoryview(payload), codec is not None
    if trusted:
        layout = read_layout(view, records, compressed=compressed, body_bytes_max=bytes_max)
    else:
        layout = check_sizes(view, records, compressed=compressed, bytes_max=bytes_max)
    # Also if the payload is trusted: Arrow aborts the process for some payloads that do not match the schema.
    check_written(layout, check_types(layout, schema), compressed=compressed, bytes_max=bytes_max)
    body = payload.slice(layout.body_at)
    if codec is not None:
        body = _decompressed(body, codec, layout.body_bytes)
    if not trusted:
        check_body(memoryview(body), layout)
    try:  # in a trusted payload, Arrow itself may detect an error
        columns = [_array(node, field.type, body) for node, field in zip(layout.columns, schema, strict=True)]
        batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    except pa.ArrowException as error:
        raise _none_of_schema(error) from error
    if not trusted:
        validate(batch, known_of(schema))
    return batch


def _by_native(
    payload: pa.Buffer, schema: pa.Schema, records: int, bytes_max: int, *, trusted: bool
) -> pa.RecordBatch | None:
    """Decode the payload in the native core; None: Python has to do it. Raises `CorruptChunk`."""
    known = known_of(schema)
    if known.type is None:
        return None
    if not trusted:
        check(memoryview(payload), known, records, compressed=False, bytes_max=bytes_max)
    batch = native.decode_in_place(payload, known.type, schema, records, bytes_max, import_batch)  # type: ignore[union-attr]
    if batch is not None and not trusted:
        validate(batch, known)
    return batch


def validate(batch: pa.RecordBatch, known: Known) -> None:
    """Check the rest, which depends on the schema: whether decimals fit their precision, and times lie within a day.

    Values below a null of a list or struct are checked, too, since a reader that flattens the column sees them. Raises
    `CorruptChunk`.
    """
    try:
        for index in known.ruled:
            column = batch.column(index)
            if column.null_count < len(column) or _has_values_below(column):
                column.validate(full=True)
    except pa.ArrowException as error:
        raise _none_of_schema(error) from error


def _has_values_below(column: pa.Array) -> bool:
    """Return whether a column of nulls has nested values: structs do, and lists with elements."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    return types.is_struct(column.type) or (hasattr(column, "values") and len(column.values) > 0)


def _none_of_schema(error: pa.ArrowException) -> CorruptChunk:
    return no_payload(f"its values do not fit the schema: {error}")


def _decompressed(body: pa.Buffer, codec: str, size: int) -> pa.Buffer:
    """Decompress `body` as a stream, as `pa.decompress` would fill up a short LZ4 frame with arbitrary memory."""
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), codec) as stream:
            found, more = stream.read_buffer(size), stream.read(1)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise no_payload(f"its body cannot be decompressed: {error}") from error
    if more or found.size != size:
        raise no_payload(f"a body of {'more' if more else found.size} bytes where {size} were announced")
    return found


def written_bytes(payload: pa.Buffer, schema: pa.Schema, records: int) -> int:
    """Return the size of the values when each is written out; the payload must be uncompressed and decodable."""
    layout = read_layout(memoryview(payload), records, compressed=False, body_bytes_max=0)
    return layout.written_bytes + check_types(layout, schema)


def _array(node: Node, kind: pa.DataType, body: pa.Buffer) -> pa.Array:
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _array(node, storage_of(kind), body))
    if node.kind is Kind.NULL:
        return pa.nulls(node.length, kind)
    children, buffers = _children(node, kind, body), [_buffer(body, node.validity)]
    if node.kind in WITH_PLACES:
        buffers.append(_offsets(node, body))
        if node.kind in BYTES:
            buffers.append(_buffer(body, node.data))
    elif node.kind not in (Kind.STRUCT, Kind.FIXED_LIST):
        buffers.append(_values(node, body))
    nulls = 0 if node.validity is None else -1
    return pa.Array.from_buffers(kind, node.length, buffers, nulls, 0, children)


def _children(node: Node, kind: pa.DataType, body: pa.Buffer) -> list[pa.Array] | None:
    if node.kind is Kind.STRUCT:
        return [_array(each, kind.field(at).type, body) for at, each in enumerate(node.fields)]
    if not node.fields:
        return None
    (within,) = node.fields
    if types.is_map(kind):
        return [_array(within, pa.struct([kind.key_field, kind.item_field]), body)]
    return [_array(within, kind.value_type, body)]


def _values(node: Node, body: pa.Buffer) -> pa.Buffer:
    if node.encoding == Values.PLAIN:
        return _buffer(body, node.values)
    if node.encoding == Values.ONE:
        if node.kind is Kind.BITS:
            return pa.py_buffer((b"\xff" if node.inline[0] else b"\0") * -(-node.length // 8))
        return pa.py_buffer(node.inline * node.length)
    width = len(node.inline)
    least = np.frombuffer(node.inline, f"<u{width}")
    deltas = np.frombuffer(body, f"<u{node.size}", node.length, node.values.at)
    return pa.py_buffer(deltas.astype(f"<u{width}") + least)


def _offsets(node: Node, body: pa.Buffer) -> pa.Buffer:
    if node.encoding == Places.OFFSETS:
        return _buffer(body, node.values)
    found: Any = np.zeros(node.length + 1, "<i8" if node.kind in LARGE else "<i4")
    if node.encoding != Places.SAME:
        np.cumsum(numbers(memoryview(body), node), out=found[1:])
    elif node.size:
        found[:] = np.arange(0, node.size + 1, node.size // node.length)
    return pa.py_buffer(found)


def _buffer(body: pa.Buffer, place: Place | None) -> Any:
    return None if place is None else body.slice(place.at, place.bytes)
