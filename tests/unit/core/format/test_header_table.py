"""A table of headers has the same content as the single headers."""

import pytest

from kera.core.errors import CorruptChunk
from kera.core.format.chunk import HEADER_BYTES, Placement, place_chunk, read_header, verify_header
from kera.core.format.header_table import (
    as_headers,
    chunk_bytes,
    column,
    differs_from_before,
    end_records,
    parted,
    table,
    verify_headers,
)
from tests.unit.broker.support import ADDRESS, placed

pytestmark = pytest.mark.usefixtures("either_core")

CHUNKS = [placed(number, ADDRESS, first_record=7 * number, size=192 + 64 * number) for number in range(4)]
BUFFER = b"".join(each[:HEADER_BYTES] for each in CHUNKS)


def test_a_table_has_the_fields_of_each_header() -> None:
    headers = [verify_header(each) for each in CHUNKS]
    found = verify_headers(memoryview(BUFFER))

    assert as_headers(found) == headers == as_headers(table(headers))
    assert chunk_bytes(found).tolist() == [each.chunk_bytes for each in headers] == [len(each) for each in CHUNKS]
    assert end_records(found).tolist() == [each.first_record + each.record_count for each in headers]
    assert column(found, "sequence").tolist() == [each.sequence for each in headers]


def test_an_empty_buffer_is_an_empty_table() -> None:
    assert as_headers(verify_headers(memoryview(b""))) == as_headers(table()) == []


def test_a_header_without_a_placement_passes_in_a_table_too() -> None:
    data = bytearray(BUFFER)
    data[HEADER_BYTES + 88 : 2 * HEADER_BYTES] = bytes(40)

    assert as_headers(verify_headers(memoryview(data)))[1] == verify_header(data, HEADER_BYTES)


def test_a_flipped_bit_in_a_table_gives_the_error_of_the_single_header() -> None:
    for bit in range(0, 8 * HEADER_BYTES, 3):
        data = bytearray(BUFFER)
        data[2 * HEADER_BYTES + bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptChunk) as alone:
            verify_header(data, 2 * HEADER_BYTES)
        with pytest.raises(CorruptChunk) as caught:
            verify_headers(memoryview(data))

        expected = (alone.value.message, alone.value.attributes)
        assert (caught.value.message, caught.value.attributes) == expected, bit
        assert caught.value.attributes["offset"] == 2 * HEADER_BYTES, bit


def test_a_header_that_is_cut_short_is_refused_with_its_offset() -> None:
    with pytest.raises(CorruptChunk) as caught:
        verify_headers(memoryview(BUFFER)[:-1])
    assert caught.value.attributes["offset"] == 3 * HEADER_BYTES


def test_a_table_is_split_where_fields_change() -> None:
    data = bytearray(CHUNKS[0][:HEADER_BYTES] * 5)
    for row, (group, segment) in enumerate([(1, 1), (1, 1), (1, 2), (2, 2), (2, 2)]):
        place_chunk(data, row * HEADER_BYTES, Placement(group, segment, 0, row, 9))
    found = verify_headers(memoryview(data))

    parts = parted(found, differs_from_before(found, "group_id", "segment_id"))
    assert [column(part, "first_record").tolist() for part in parts] == [[0, 1], [2], [3, 4]]
    assert [read_header(part.tobytes()).first_record for part in parts] == [0, 2, 3]
