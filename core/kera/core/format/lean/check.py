"""Checks whether readers can trust a lean payload: its nodes, sizes, numbers, places and text, in one pass over it.

Readers then need not check that the nodes match the schema, that values lie where the nodes say, that text is UTF-8, or
that a few bytes do not claim more values than memory can hold.

Arrow aborts the process, with no error to catch, when an array breaks certain rules. A lean payload can break only two
of these: the entries of a map must have no nulls, and neither must their keys, whatever their bits are. `check_types`
refuses both. `check` also refuses a node of nulls whose type makes each null larger than memory, since Arrow would ask
for memory that does not exist; and null bits in a column that is not nullable, since writers leave the bits out where
there are no nulls. Nested fields are not checked for that, as Arrow allows anything below a null of a struct or a list.
"""

from __future__ import annotations

import codecs
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from kera.core.errors import CorruptChunk
from kera.core.format.lean.kinds import Known, bytes_of, kind_of, null_bytes, storage_of, within
from kera.core.format.lean.layout import (
    LARGE,
    LENGTH_BYTES,
    TEXTS,
    WITH_PLACES,
    Kind,
    Layout,
    Node,
    Places,
    Values,
    no_payload,
    read_layout,
)
from kera.core.native import accelerated

RECORDS_WITHOUT_BYTES = 1 << 16
"""Maximum of records in a payload whose columns take no bytes: all values of a column are null, or the same."""
_BITS = 8
_CONTINUED = 0x80
_FIRST_BITS = 0xC0


@accelerated()
def check(payload: memoryview, known: Known, records: int, *, compressed: bool, bytes_max: int) -> None:
    """Check a payload of `records` records; of a compressed one, check only what precedes the body.

    Raises `CorruptChunk` if it does not match the schema, or if it would take more than `bytes_max` when it is
    decompressed or when each value is written out (an uncompressed one may always take a byte for each bit of its
    body).
    """
    layout = check_sizes(payload, records, compressed=compressed, bytes_max=bytes_max)
    nulls_bytes = check_types(layout, known.schema)
    check_written(layout, nulls_bytes, compressed=compressed, bytes_max=bytes_max)
    if not compressed:
        check_body(payload[layout.body_at :], layout)


def check_sizes(payload: memoryview, records: int, *, compressed: bool, bytes_max: int) -> Layout:
    """Check the part before the body; see `check`."""
    layout = read_layout(payload, records, compressed=compressed, body_bytes_max=bytes_max)
    if records > max(RECORDS_WITHOUT_BYTES, _BITS * layout.body_bytes):
        raise no_payload(f"{layout.body_bytes} bytes that say to be {records} records")
    check_written(layout, 0, compressed=compressed, bytes_max=bytes_max)
    return layout


def check_written(layout: Layout, nulls_bytes: int, *, compressed: bool, bytes_max: int) -> None:
    """Check the size of the values when each is written out; `nulls_bytes`: the size that the schema adds for nulls."""
    written_bytes = layout.written_bytes + nulls_bytes
    room = bytes_max if compressed else max(bytes_max, _BITS * layout.body_bytes)
    if written_bytes > room:
        raise CorruptChunk(
            f"the values of a chunk with a body of {layout.body_bytes} bytes would become {written_bytes} bytes or more"
            f" when each is written out; at most {room} are taken (decompressed_bytes_max)",
            expanded_bytes=written_bytes,
            limit=room,
        )


def check_types(layout: Layout, schema: pa.Schema) -> int:
    """Check that the nodes match the schema. Return the size of nodes of nulls beyond a byte for each null.

    Raises `CorruptChunk`.
    """
    if len(layout.columns) != len(schema):
        raise no_payload(f"{len(layout.columns)} columns, the schema has {len(schema)}")
    for node, field in zip(layout.columns, schema, strict=True):
        if not (field.nullable or types.is_null(storage_of(field.type))):
            _refuse_nulls(node, f"values of column {field.name!r}, which is not nullable")
    return sum(_check_type(node, kind) for node, kind in zip(layout.columns, schema.types, strict=True))


def _check_type(node: Node, kind: pa.DataType) -> int:
    kind = storage_of(kind)
    if node.kind is Kind.NULL:
        return node.length * (null_bytes(kind) - 1)
    if node.kind is not kind_of(kind) or (
        (node.kind is Kind.FIXED and node.size != bytes_of(kind))
        or (node.kind is Kind.FIXED_LIST and node.size != kind.list_size)
        or (node.kind is Kind.STRUCT and len(node.fields) != kind.num_fields)
    ):
        raise no_payload(f"a node of kind {node.kind.name} where the schema has {kind}")
    beyond = sum(map(_check_type, node.fields, within(kind))) if node.fields else 0
    if types.is_map(kind):
        (entries,) = node.fields
        _refuse_nulls(entries, f"keys or entries of {kind}")
        if entries.fields and not types.is_null(storage_of(kind.key_type)):
            _refuse_nulls(entries.fields[0], f"keys or entries of {kind}")
    return beyond


def _refuse_nulls(node: Node, what: str) -> None:
    if (node.kind is Kind.NULL and node.length) or node.validity is not None:
        raise no_payload(f"nulls among the {what}")


def check_body(body: memoryview, layout: Layout) -> None:
    """Check the content of the buffers. Raises `CorruptChunk`."""
    for node in layout.columns:
        _check_node(body, node)


def _check_node(body: memoryview, node: Node) -> None:
    if node.kind is Kind.BITS and node.encoding == Values.ONE and node.inline[0] > 1:
        raise no_payload(f"a bit that is {node.inline[0]}")
    if node.kind in WITH_PLACES:
        _check_places(body, node)
    for each in node.fields:
        _check_node(body, each)


def _check_places(body: memoryview, node: Node) -> None:
    starts = starts_of(body, node)
    if starts is None:
        length = node.size // node.length if node.length else 0
        starts = np.arange(0, node.size, length) if node.kind in TEXTS and length else np.zeros(0, np.int64)
    if node.kind in TEXTS:
        _check_text(body, node, starts)


def starts_of(body: memoryview, node: Node) -> npt.NDArray[np.int64] | None:
    """Return where each value of a node with places begins; None if all have the same length. Raises `CorruptChunk`."""
    if node.encoding == Places.SAME:
        return None
    if node.encoding == Places.OFFSETS:
        offsets = numbers(body, node)
        if offsets[0] or offsets[-1] != node.size or (np.diff(offsets) < 0).any():
            raise no_payload("offsets that do not go from 0 to the end")
        return offsets[:-1]
    ends = np.cumsum(numbers(body, node))
    total = int(ends[-1]) if len(ends) else 0
    if total != node.size:
        raise no_payload(f"lengths with the sum {total} instead of {node.size}")
    return np.concatenate([np.zeros(1, np.int64), ends])[:-1]


def numbers(body: memoryview, node: Node) -> npt.NDArray[np.int64]:
    """Return the offsets or lengths of a node unchecked."""
    if node.encoding == Places.OFFSETS:
        dtype, count = ("<i8" if node.kind in LARGE else "<i4"), node.length + 1
    else:
        dtype, count = f"<u{LENGTH_BYTES[Places(node.encoding)]}", node.length
    return np.frombuffer(body, dtype, count, node.values.at).astype(np.int64)


def _check_text(body: memoryview, node: Node, starts: npt.NDArray[Any]) -> None:
    data = body[node.data.at : node.data.at + node.data.bytes]
    try:
        codecs.utf_8_decode(data, "strict", True)  # noqa: FBT003 - the function takes no names
    except UnicodeDecodeError as error:
        raise no_payload("text that is not UTF-8") from error
    first = np.frombuffer(data, np.uint8)[starts[starts < len(data)]]
    if ((first & _FIRST_BITS) == _CONTINUED).any():
        raise no_payload("text that begins within a character")
