"""A schema for payloads that tests write by hand."""

from __future__ import annotations

import pyarrow as pa

from kera.core.errors import CorruptChunk
from kera.core.format.lean.check import check
from kera.core.format.lean.kinds import Known, learn
from kera.core.format.lean.layout import Kind, Node, read_layout

TYPES = {
    Kind.NULL: pa.null(),
    Kind.BITS: pa.bool_(),
    Kind.FIXED_1: pa.uint8(),
    Kind.FIXED_2: pa.uint16(),
    Kind.FIXED_4: pa.uint32(),
    Kind.FIXED_8: pa.uint64(),
    Kind.FIXED_16: pa.decimal128(38),
    Kind.BINARY: pa.binary(),
    Kind.TEXT: pa.string(),
    Kind.LARGE_BINARY: pa.large_binary(),
    Kind.LARGE_TEXT: pa.large_string(),
}


def type_of(node: Node) -> pa.DataType:
    """The Arrow type of a node."""
    within = [type_of(each) for each in node.fields]
    match node.kind:
        case Kind.LIST:
            return pa.list_(within[0])
        case Kind.LARGE_LIST:
            return pa.large_list(within[0])
        case Kind.FIXED_LIST:
            return pa.list_(within[0], node.size)
        case Kind.STRUCT:
            return pa.struct([(str(at), each) for at, each in enumerate(within)])
        case Kind.FIXED:
            return pa.binary(node.size)
        case kind:
            return TYPES[kind]


def known_for(payload: bytes, records: int, *, compressed: bool = False, bytes_max: int) -> Known:
    """The known schema of a payload by its nodes; without columns where the nodes are invalid."""
    try:
        layout = read_layout(payload, records, compressed=compressed, body_bytes_max=bytes_max)
        columns = [(str(at), type_of(node)) for at, node in enumerate(layout.columns)]
    except (CorruptChunk, OverflowError):  # Arrow has no lists of a fixed size beyond 2^31
        columns = []
    return learn(pa.schema(columns))


def checked(payload: bytes, records: int, *, compressed: bool = False, bytes_max: int) -> None:
    """Check a payload with the schema of its nodes. Raises `CorruptChunk`."""
    known = known_for(payload, records, compressed=compressed, bytes_max=bytes_max)
    check(memoryview(payload), known, records, compressed=compressed, bytes_max=bytes_max)
