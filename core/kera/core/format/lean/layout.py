"""The layout of a lean payload: nodes, and the places of their buffers.

    0              2                    (6)                        body_at: a multiple of 8
    ┌──────────────┬────────────────────┬──────────────────────────┬──────────────────────────────────────────────
    │ u16          │ u32 body_bytes,    │ nodes                    │ body: buffers in the order of the nodes, each
    │ nodes_bytes  │ only if compressed │ (nodes_bytes), then zeros│ aligned to what it is made of; one frame if
    └──────────────┴────────────────────┴──────────────────────────┴─compressed────────────────────────────────────

A node stands for a field: a column, or a field nested in it. Nodes are in the order of the schema, depth first. A node
begins with a byte for the kind of its values and their encoding,

    bit 0      5          6          8
    ┌──────────┬──────────┬──────────┐
    │ kind     │ validity │ encoding │
    └──────────┴──────────┴──────────┘

followed by details that depend on kind and encoding. The number of values is not written: a column has as many as the
chunk has records, the elements of lists as many as the lists say, and the fields of a struct as many as the struct.

| kind | behind the byte | buffers |
|---|---|---|
| NULL | | none: all values are null, whatever the field's type is; nested fields have no nodes |
| BITS | ONE: a byte, 0 or 1 | a bit for each value |
| FIXED_1 … FIXED_16 | ONE: the value. DELTAS: the least value, and a byte: bytes of a delta | values |
| FIXED | varint: bytes of a value | values |
| BINARY, TEXT, LARGE_BINARY, LARGE_TEXT | varint: bytes of all values together | places, bytes |
| LIST, LARGE_LIST | varint: values of all lists together; then the node of the elements | places |
| FIXED_LIST | varint: values of each; then the node | none |
| STRUCT | varint: number of fields; then their nodes | none |

With `VALIDITY` the first buffer has a bit for each value, 1 if it is not null. Encodings of values: PLAIN, ONE (all are
equal), DELTAS (differences to the least value, modulo 2^n). Encodings of places: OFFSETS (as in Arrow: from 0 to the
sum, 4 bytes each, 8 in large kinds), SAME (all values have the same length), LENGTHS_1 and LENGTHS_2 (the length of
each value, in 1 or 2 bytes). A varint has 7 bits in a byte, the lowest first, as in Protocol Buffers.

Promise: whatever the bytes are, the outcome of `read_layout` is a `Layout` whose buffers lie within the body and do
not overlap, or `CorruptChunk`. It does not look into the buffers.
"""

from __future__ import annotations

import enum
import struct
from typing import Any, NamedTuple

from kera.core.errors import CorruptChunk


class Kind(enum.IntEnum):
    """The kind of a node's values; the numbers are part of the format."""

    NULL = 0
    BITS = 1
    FIXED_1 = 2
    FIXED_2 = 3
    FIXED_4 = 4
    FIXED_8 = 5
    FIXED_16 = 6
    FIXED = 7
    BINARY = 8
    TEXT = 9
    LARGE_BINARY = 10
    LARGE_TEXT = 11
    LIST = 12
    LARGE_LIST = 13
    FIXED_LIST = 14
    STRUCT = 15


class Values(enum.IntEnum):
    """How values are written; the numbers are part of the format."""

    PLAIN = 0
    ONE = 1
    DELTAS = 2


class Places(enum.IntEnum):
    """How the places of values are written; the numbers are part of the format."""

    OFFSETS = 0
    SAME = 1
    LENGTHS_1 = 2
    LENGTHS_2 = 3


KIND_MASK = 0x1F
VALIDITY = 0x20
ENCODING_SHIFT = 6
ALIGNMENT_BYTES = 8
NODES_BYTES_MAX = (1 << 16) - 1
VALUES_MAX = 1 << 40
"""Maximum of values in a node: a larger number is refused before it is used in a multiplication."""
DEPTH_MAX = 64
"""Maximum depth of nested nodes."""

DELTA_WIDTHS = (1, 2, 4)
WIDTHS = {
    Kind.FIXED_1: 1,
    Kind.FIXED_2: 2,
    Kind.FIXED_4: 4,
    Kind.FIXED_8: 8,
    Kind.FIXED_16: 16,
}
WITH_DELTAS = frozenset({Kind.FIXED_4, Kind.FIXED_8})
TEXTS = frozenset({Kind.TEXT, Kind.LARGE_TEXT})
BYTES = frozenset({Kind.BINARY, Kind.TEXT, Kind.LARGE_BINARY, Kind.LARGE_TEXT})
LISTS = frozenset({Kind.LIST, Kind.LARGE_LIST})
NESTED = LISTS | {Kind.FIXED_LIST, Kind.STRUCT}
LARGE = frozenset({Kind.LARGE_BINARY, Kind.LARGE_TEXT, Kind.LARGE_LIST})
WITH_PLACES = BYTES | LISTS
_SMALL_MAX = (1 << 31) - 1
"""Maximum of an offset of 4 bytes."""
LENGTH_BYTES = {Places.LENGTHS_1: 1, Places.LENGTHS_2: 2}
_KINDS = tuple(Kind)
_VARINT_BYTES_MAX = 9

_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")


class Place(NamedTuple):
    """A buffer within the body."""

    at: int
    bytes: int


NOWHERE = Place(0, 0)


class Node(NamedTuple):
    """A field with its buffers."""

    kind: Kind
    encoding: int
    length: int
    """The number of values."""
    validity: Place | None
    values: Place
    """The buffer of the values (BITS and FIXED kinds), or of their offsets or lengths (kinds with places)."""
    data: Place
    """The bytes of all values together, for BINARY and similar kinds."""
    inline: bytes
    """The value behind the node's byte: the single one (ONE), or the least one (DELTAS)."""
    size: int
    """FIXED: bytes of a value. Kinds with places: bytes of all values together. FIXED_LIST: values of each. DELTAS:
    bytes of a delta."""
    fields: tuple[Node, ...]
    written_bytes: int
    """Size with every value written out, without `fields`; at least a byte for each value."""


class Layout(NamedTuple):
    """A payload's nodes."""

    body_at: int
    """The offset of the body in the payload."""
    body_bytes: int
    """Size of the body without compression."""
    columns: tuple[Node, ...]
    written_bytes: int
    """Maximum size of all columns as Arrow arrays."""


def put_varint(number: int) -> bytes:
    """Return `number` as a varint."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def body_at_of(nodes_bytes: int, *, compressed: bool) -> int:
    """Return the offset of the body in a payload."""
    return (_U16.size + (_U32.size if compressed else 0) + nodes_bytes + ALIGNMENT_BYTES - 1) & -ALIGNMENT_BYTES


def put_prefix(nodes: bytes, body_bytes: int, *, compressed: bool) -> bytes:
    """Return the part of a payload before its body."""
    size = _U32.pack(body_bytes) if compressed else b""
    found = _U16.pack(len(nodes)) + size + nodes
    return found.ljust(body_at_of(len(nodes), compressed=compressed), b"\0")


def aligned(at: int, width: int) -> int:
    """Return `at` rounded up to the alignment of items of `width` bytes."""
    step = min(width, ALIGNMENT_BYTES)
    return (at + step - 1) & -step


def read_layout(payload: Any, records: int, *, compressed: bool, body_bytes_max: int) -> Layout:
    """Return the layout of a payload of `records` records. Raises `CorruptChunk`.

    `body_bytes_max`: the maximum size that a compressed body may state for its decompressed bytes.
    """
    size = len(payload)
    try:
        (nodes_bytes,) = _U16.unpack_from(payload, 0)
        body_bytes = _U32.unpack_from(payload, _U16.size)[0] if compressed else 0
    except struct.error as error:
        raise no_payload("it is cut short") from error
    body_at = body_at_of(nodes_bytes, compressed=compressed)
    if body_at > size:
        raise no_payload(f"nodes of {nodes_bytes} bytes, in {size}")
    if not compressed:
        body_bytes = size - body_at
    elif body_bytes > body_bytes_max:
        raise CorruptChunk(
            f"{size} bytes of chunk payload would become {body_bytes} when they are decompressed; at most"
            f" {body_bytes_max} are taken (decompressed_bytes_max)",
            decompressed_bytes=body_bytes,
            limit=body_bytes_max,
        )
    start = _U16.size + (_U32.size if compressed else 0)
    reader = _Reader(bytes(payload[start : start + nodes_bytes]))
    columns = []
    while not reader.done:
        columns.append(reader.node(records, 0))
    if reader.end != body_bytes:
        raise no_payload(f"its nodes need a body of {reader.end} bytes, it has {body_bytes}")
    return Layout(body_at, body_bytes, tuple(columns), reader.written_bytes)


class _Reader:
    """Goes through the nodes once, and assigns each of them its place in the body."""

    def __init__(self, nodes: bytes) -> None:
        self._nodes = nodes
        self._at = 0
        self.end = 0
        """The end of the buffers of the nodes read so far."""
        self.written_bytes = 0

    @property
    def done(self) -> bool:
        """Whether there is no further node."""
        return self._at >= len(self._nodes)

    def node(self, count: int, depth: int) -> Node:
        """Read the next node, with the nodes within it."""
        if depth > DEPTH_MAX:
            raise no_payload(f"more than {DEPTH_MAX} nodes within each other")
        if count > VALUES_MAX:
            raise no_payload(f"a node of {count} values")
        (first,) = self._take(1)
        number, encoding = first & KIND_MASK, first >> ENCODING_SHIFT
        if number >= len(_KINDS):
            raise no_payload(f"a node of kind {number}")
        kind = _KINDS[number]
        validity = self._place(-(-count // 8), 1) if first & VALIDITY else None
        if kind is Kind.NULL and (encoding or validity is not None):
            raise no_payload("nulls with an encoding")
        if kind in WITH_PLACES:
            return self._with_places(kind, encoding, count, validity, depth)
        if kind in (Kind.FIXED_LIST, Kind.STRUCT):
            return self._with_fields(kind, encoding, count, validity, depth)
        return self._fixed(kind, encoding, count, validity)

    def _fixed(self, kind: Kind, encoding: int, count: int, validity: Place | None) -> Node:
        values, inline, size = NOWHERE, b"", WIDTHS.get(kind, 1)
        if kind is Kind.FIXED:
            size = self._varint()
        written_bytes = count * max(size, 1)
        if kind is Kind.NULL:
            pass
        elif encoding == Values.PLAIN:
            width = -(-count // 8) if kind is Kind.BITS else count * size
            values = self._place(width, 1 if kind in (Kind.BITS, Kind.FIXED) else size)
        elif encoding == Values.ONE and kind is not Kind.FIXED:
            inline = self._take(size)
        elif encoding == Values.DELTAS and kind in WITH_DELTAS:
            inline = self._take(size)
            (size,) = self._take(1)
            if size not in DELTA_WIDTHS or size >= len(inline):
                raise no_payload(f"deltas of {size} bytes for values of {len(inline)}")
            values = self._place(count * size, size)
        else:
            raise no_payload(f"{kind.name} with encoding {encoding}")
        return self._counted(Node(kind, encoding, count, validity, values, NOWHERE, inline, size, (), written_bytes))

    def _with_places(self, kind: Kind, encoding: int, count: int, validity: Place | None, depth: int) -> Node:
        total = self._varint()
        offset_bytes = 8 if kind in LARGE else 4
        if kind not in LARGE and total > _SMALL_MAX:
            raise no_payload(f"{kind.name} of {total} values")
        values = NOWHERE
        if encoding == Places.SAME:
            if total % count if count else total:
                raise no_payload(f"{count} values of the same length, {total} together")
        elif encoding == Places.OFFSETS:
            values = self._place((count + 1) * offset_bytes, offset_bytes)
        else:
            width = LENGTH_BYTES[Places(encoding)]
            values = self._place(count * width, width)
        written_bytes = (count + 1) * offset_bytes
        if kind in BYTES:
            data = self._place(total, 1)
            return self._counted(
                Node(kind, encoding, count, validity, values, data, b"", total, (), written_bytes + total)
            )
        node = Node(kind, encoding, count, validity, values, NOWHERE, b"", total, (), written_bytes)
        self._counted(node)
        return node._replace(fields=(self.node(total, depth + 1),))

    def _with_fields(self, kind: Kind, encoding: int, count: int, validity: Place | None, depth: int) -> Node:
        if encoding:
            raise no_payload(f"{kind.name} with encoding {encoding}")
        size = self._varint()
        node = self._counted(Node(kind, 0, count, validity, NOWHERE, NOWHERE, b"", size, (), count))
        if kind is Kind.FIXED_LIST:
            return node._replace(fields=(self.node(count * size, depth + 1),))
        if size > len(self._nodes):
            raise no_payload(f"a struct of {size} fields")
        return node._replace(fields=tuple(self.node(count, depth + 1) for _ in range(size)))

    def _counted(self, node: Node) -> Node:
        self.written_bytes += node.written_bytes
        return node

    def _take(self, size: int) -> bytes:
        found = self._nodes[self._at : self._at + size]
        if len(found) != size:
            raise no_payload("its nodes are cut short")
        self._at += size
        return found

    def _varint(self) -> int:
        number = 0
        for at in range(_VARINT_BYTES_MAX):
            (byte,) = self._take(1)
            number |= (byte & 0x7F) << 7 * at
            if byte < 0x80:
                if number > VALUES_MAX:
                    break
                return number
        raise no_payload("a number that is too large")

    def _place(self, size: int, width: int) -> Place:
        at = aligned(self.end, width)
        self.end = at + size
        return Place(at, size)


def no_payload(why: str) -> CorruptChunk:
    """Return the error for an invalid payload."""
    return CorruptChunk(f"chunk payload is not a valid lean one: {why}")
