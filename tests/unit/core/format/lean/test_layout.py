"""Nodes and the places of their buffers."""

from __future__ import annotations

import pytest

from kera.core.errors import CorruptChunk
from kera.core.format.lean.layout import (
    DEPTH_MAX,
    ENCODING_SHIFT,
    VALIDITY,
    Kind,
    Place,
    Places,
    Values,
    put_prefix,
    put_varint,
    read_layout,
)
from tests.unit.core.format.lean.support import checked

pytestmark = pytest.mark.usefixtures("either_core")

BYTES_MAX = 1 << 20
SAME, ONE, DELTAS = (each << ENCODING_SHIFT for each in (Places.SAME, Values.ONE, Values.DELTAS))


def payload(nodes: bytes, body: bytes = b"") -> bytes:
    return put_prefix(nodes, 0, compressed=False) + body


def test_each_buffer_follows_the_previous_one_where_its_numbers_are_aligned() -> None:
    nodes = bytes([Kind.FIXED_1, Kind.FIXED_8 | VALIDITY, Kind.BINARY | SAME]) + put_varint(6)
    body_bytes = 8 + 24 + 6

    layout = read_layout(payload(nodes, bytes(body_bytes)), 3, compressed=False, body_bytes_max=BYTES_MAX)

    assert (layout.body_at, layout.body_bytes) == (8, body_bytes)
    first, second, third = layout.columns
    assert first.values == Place(0, 3)
    assert (second.validity, second.values) == (Place(3, 1), Place(8, 24))
    assert (third.values, third.data, third.size) == (Place(0, 0), Place(32, 6), 6)
    assert layout.written_bytes == 3 + 24 + (4 * 4 + 6)


def test_the_node_within_a_list_has_the_values_of_all_lists_together() -> None:
    nodes = bytes([Kind.LIST | SAME, 6, Kind.FIXED_2 | ONE, 7, 0])
    layout = read_layout(payload(nodes), 3, compressed=False, body_bytes_max=BYTES_MAX)
    (column,) = layout.columns
    (within,) = column.fields
    assert (within.length, within.inline) == (6, b"\x07\0")


def test_a_compressed_body_has_only_a_size_and_its_limit_holds() -> None:
    whole = put_prefix(bytes([Kind.FIXED_4]), 12, compressed=True) + b"anything"
    layout = read_layout(whole, 3, compressed=True, body_bytes_max=12)
    assert (layout.body_at, layout.body_bytes) == (8, 12)
    with pytest.raises(CorruptChunk, match="would become 12 when they are decompressed; at most 11"):
        read_layout(whole, 3, compressed=True, body_bytes_max=11)


@pytest.mark.parametrize(
    ("nodes", "body_bytes", "says"),
    [
        (bytes([Kind.FIXED_8]), 23, "a body of 24 bytes, it has 23"),
        (bytes([Kind.FIXED_8]), 25, "a body of 24 bytes, it has 25"),
        (bytes([16]), 0, "kind 16"),
        (bytes([Kind.NULL | VALIDITY]), 1, "nulls with an encoding"),
        (bytes([Kind.NULL | ONE]), 0, "nulls with an encoding"),
        (bytes([Kind.FIXED_8 | ONE, 1]), 0, "cut short"),
        (bytes([Kind.FIXED_8 | 3 << ENCODING_SHIFT]), 0, "FIXED_8 with encoding 3"),
        (bytes([Kind.FIXED_2 | DELTAS, 0, 0, 1]), 3, "FIXED_2 with encoding 2"),
        (bytes([Kind.FIXED_4 | DELTAS, 0, 0, 0, 0, 4]), 12, "deltas of 4 bytes for values of 4"),
        (bytes([Kind.FIXED_8 | DELTAS, *bytes(8), 3]), 9, "deltas of 3 bytes"),
        (bytes([Kind.FIXED | ONE, 3]), 3, "FIXED with encoding 1"),
        (bytes([Kind.BINARY | SAME, 7]), 7, "3 values of the same length, 7 together"),
        (bytes([Kind.BINARY]) + put_varint(1 << 31), 0, "BINARY of 2147483648 values"),
        (bytes([Kind.LARGE_BINARY]) + put_varint(1 << 41), 0, "too large"),
        (bytes([Kind.LARGE_BINARY, *[0xFF] * 12]), 0, "too large"),
        (bytes([Kind.LIST | SAME, 3]), 0, "cut short"),
        (bytes([Kind.STRUCT | ONE, 1, Kind.NULL]), 0, "STRUCT with encoding 1"),
        (bytes([Kind.STRUCT, 9]), 0, "a struct of 9 fields"),
        (bytes([Kind.STRUCT, 2, Kind.NULL]), 0, "cut short"),
        (bytes([Kind.FIXED_LIST]) + put_varint(1 << 40) + bytes([Kind.NULL]), 0, "values"),
        (bytes([Kind.FIXED_LIST, 1] * (DEPTH_MAX + 2)), 0, f"more than {DEPTH_MAX} nodes within"),
    ],
)
def test_an_invalid_layout_is_refused(nodes: bytes, body_bytes: int, says: str) -> None:
    whole = payload(nodes, bytes(body_bytes))
    with pytest.raises(CorruptChunk, match=says):
        read_layout(whole, 3, compressed=False, body_bytes_max=BYTES_MAX)
    with pytest.raises(CorruptChunk, match=says):
        checked(whole, 3, bytes_max=BYTES_MAX)


@pytest.mark.parametrize("size", range(8))
def test_a_payload_that_is_cut_short_is_refused(size: int) -> None:
    whole = payload(bytes([Kind.FIXED_1]), b"abc")
    with pytest.raises(CorruptChunk):
        read_layout(whole[:size], 3, compressed=False, body_bytes_max=BYTES_MAX)
    with pytest.raises(CorruptChunk):
        checked(whole[:size], 3, bytes_max=BYTES_MAX)


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 1 << 20, (1 << 40) - 1])
def test_a_varint_is_encoded_as_in_protocol_buffers(number: int) -> None:
    found = put_varint(number)
    assert sum((byte & 0x7F) << 7 * at for at, byte in enumerate(found)) == number
    assert [byte >> 7 for byte in found] == [1] * (len(found) - 1) + [0]
