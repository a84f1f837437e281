"""Checks of the buffers of a lean payload."""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
import pytest

from kera.core.errors import CorruptChunk
from kera.core.format.lean.check import RECORDS_WITHOUT_BYTES, check
from kera.core.format.lean.kinds import learn
from kera.core.format.lean.layout import ENCODING_SHIFT, Kind, Places, Values, put_prefix, put_varint
from tests.unit.core.format.lean import support

pytestmark = pytest.mark.usefixtures("either_core")

BYTES_MAX = 1 << 20
SAME, LENGTHS_1, LENGTHS_2 = (each << ENCODING_SHIFT for each in (Places.SAME, Places.LENGTHS_1, Places.LENGTHS_2))
ONE = Values.ONE << ENCODING_SHIFT


def checked(nodes: bytes, body: bytes, records: int) -> None:
    whole = put_prefix(nodes, 0, compressed=False) + body
    support.checked(whole, records, bytes_max=BYTES_MAX)


def offsets(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}i", *numbers)


def test_valid_payloads_pass() -> None:
    checked(bytes([Kind.TEXT, 4]), offsets(0, 1, 1, 4) + "aé!".encode(), 3)
    checked(bytes([Kind.TEXT | LENGTHS_1, 4]), bytes([1, 0, 3]) + "aé!".encode(), 3)
    checked(bytes([Kind.BINARY | LENGTHS_2, 4]), struct.pack("<3H", 1, 0, 3) + b"\xff" * 4, 3)
    checked(bytes([Kind.TEXT | SAME, 6]), "éàü".encode(), 3)
    checked(bytes([Kind.BITS | ONE, 1]), b"", 3)
    checked(bytes([Kind.TEXT | SAME, 0]), b"", 3)
    checked(bytes([Kind.TEXT, 0]), offsets(0), 0)


@pytest.mark.parametrize(
    ("nodes", "body", "says"),
    [
        (bytes([Kind.BINARY, 4]), offsets(1, 1, 1, 4) + b"abcd", "offsets"),
        (bytes([Kind.BINARY, 4]), offsets(0, 3, 1, 4) + b"abcd", "offsets"),
        (bytes([Kind.BINARY, 4]), offsets(0, 1, 1, 5) + b"abcd", "offsets"),
        (bytes([Kind.BINARY, 4]), offsets(0, -1, 1, 4) + b"abcd", "offsets"),
        (bytes([Kind.BINARY, 4]), offsets(0, 1, 1, 3) + b"abcd", "offsets"),
        (bytes([Kind.BINARY | LENGTHS_1, 4]), bytes([1, 0, 4]) + b"abcd", "lengths with the sum 5 instead of 4"),
        (bytes([Kind.LIST | LENGTHS_1, 4, Kind.NULL]), bytes([1, 0, 2]), "lengths with the sum 3 instead of 4"),
        (bytes([Kind.TEXT, 4]), offsets(0, 1, 1, 4) + b"a\xff\xffb", "not UTF-8"),
        (bytes([Kind.TEXT, 4]), offsets(0, 2, 2, 4) + "aé!".encode(), "within a character"),
        (bytes([Kind.TEXT | LENGTHS_1, 4]), bytes([2, 1, 1]) + "aé!".encode(), "within a character"),
        (bytes([Kind.TEXT | SAME, 6]), "aéàb".encode(), "within a character"),
        (bytes([Kind.BITS | ONE, 2]), b"", "a bit that is 2"),
    ],
)
def test_invalid_buffers_are_refused(nodes: bytes, body: bytes, says: str) -> None:
    with pytest.raises(CorruptChunk, match=says):
        checked(nodes, body, 3)


def test_a_payload_of_few_bytes_with_too_many_records_is_refused() -> None:
    checked(bytes([Kind.NULL]), b"", RECORDS_WITHOUT_BYTES)
    with pytest.raises(CorruptChunk, match="0 bytes that say to be 65537 records"):
        checked(bytes([Kind.NULL]), b"", RECORDS_WITHOUT_BYTES + 1)


def test_a_payload_of_few_bytes_with_too_many_values_is_refused() -> None:
    same = bytes([Kind.FIXED_LIST]) + put_varint(100) + bytes([Kind.FIXED_8 | ONE]) + bytes(8)
    checked(same, b"", BYTES_MAX // 801)
    with pytest.raises(CorruptChunk, match="written out; at most 1048576 are taken"):
        checked(same, b"", BYTES_MAX // 801 + 1)


def test_many_values_that_have_their_own_bytes_pass() -> None:
    count = BYTES_MAX
    checked(bytes([Kind.BITS]), np.zeros(count // 8, np.uint8).tobytes(), count)


def test_sizes_beyond_64_bits_are_refused_and_do_not_overflow() -> None:
    """2^24 - 1 nulls of 2^40 bytes each, and then the rest up to 2^64, in columns of a few bytes."""
    records, columns = (1 << 24) - 1, 1 << 13
    huge = pa.list_(pa.list_(pa.int8(), 1 << 20), (1 << 20) - 1)
    schema = pa.schema([("huge", huge), ("bits", pa.bool_())] + [(str(at), pa.large_binary()) for at in range(columns)])
    nodes = bytes([Kind.NULL, Kind.BITS]) + bytes([Kind.LARGE_BINARY | SAME, 0]) * columns
    payload = put_prefix(nodes, 0, compressed=False) + bytes(1 << 21)
    with pytest.raises(CorruptChunk, match="when each is written out"):
        check(memoryview(payload), learn(schema), records, compressed=False, bytes_max=1 << 27)
