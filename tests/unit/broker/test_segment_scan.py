"""A scan of the bytes of a segment: chunks, holes, torn tails, and leftovers of other segments."""

from typing import Any

import pytest

from kera.broker.log.scan import SegmentScan, scan_segment
from kera.broker.records import Hole
from tests.unit.broker.support import ADDRESS, CHUNK_BYTES, SLOT_BYTES, chunk, placed

OTHER = ADDRESS._replace(group_id=2)


def filled(*chunks: bytes, capacity: int = SLOT_BYTES, rest: bytes = b"") -> memoryview:
    """The memory of a segment; `rest` is behind the chunks."""
    content = bytearray(b"".join(chunks) + rest)
    return memoryview(content + bytes(capacity - len(content)))


def flip(view: memoryview, *offsets: int) -> memoryview:
    for offset in offsets:
        view[offset] ^= 1
    return view


def scan(view: memoryview, **options: Any) -> SegmentScan:
    """Scan the segment that all tests here are about, and check what must hold for each scan."""
    found = scan_segment(view, **({"address": ADDRESS} | options))
    ends = list(found.chunk_ends)
    assert ends == sorted(set(ends))
    assert found.end == (ends[-1] if ends else 0)
    assert {hole.end for hole in found.holes} <= set(ends)
    assert len(ends) == len(found.headers) + len(found.holes)
    return found


def sequences(found: SegmentScan) -> list[int]:
    return [header.sequence for header in found.headers]


def spans(found: SegmentScan) -> list[tuple[int, int]]:
    return [(hole.start, hole.end) for hole in found.holes]


@pytest.mark.parametrize("length", [None, 3 * CHUNK_BYTES])
def test_a_chunk_of_an_unknown_version_is_distinguished_from_damage(length: int | None) -> None:
    known, unknown = placed(0), placed(1, version=9)

    assert scan(filled(known, unknown, placed(2)), length=length).unknown_version == 9
    assert scan(flip(filled(known, unknown, placed(2)), CHUNK_BYTES + 9), length=length).unknown_version == 0
    assert scan(flip(filled(known, placed(1), placed(2)), CHUNK_BYTES + 4), length=length).unknown_version == 0


# --- whole segments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_all_chunks_of_a_segment_are_found_and_nothing_behind_them(count: int) -> None:
    found = scan(filled(*(placed(n) for n in range(count))))

    assert sequences(found) == list(range(count))
    assert list(found.chunk_ends) == [CHUNK_BYTES * n for n in range(1, count + 1)]
    assert (found.end, found.holes, found.torn_bytes, found.record_count) == (CHUNK_BYTES * count, [], 0, count)


def test_the_first_whole_chunk_gives_the_address_of_an_unknown_segment() -> None:
    found = scan(filled(placed(0, OTHER), placed(1, ADDRESS)), address=None)

    assert found.address == OTHER
    assert sequences(found) == [0]


def test_a_segment_without_a_chunk_has_no_address() -> None:
    assert scan(filled(rest=b"abc"), address=None).address is None


def test_chunks_that_no_broker_has_placed_do_not_count() -> None:
    found = scan(filled(chunk(1, 0)), address=None)

    assert (found.headers, found.address, found.torn_bytes > 0) == ([], None, True)


# --- leftovers of another segment --------------------------------------------------------------------------


def test_chunks_of_the_segment_that_was_here_before_are_ignored() -> None:
    found = scan(filled(placed(0), placed(1), placed(7, OTHER), placed(8, OTHER)))

    assert sequences(found) == [0, 1]
    assert (found.end, found.holes) == (2 * CHUNK_BYTES, [])


@pytest.mark.parametrize(
    "change", [{"stream_id": 8}, {"streamlet_id": 1}, {"entry": 1}, {"group_id": 2}, {"segment_id": 2}]
)
def test_a_chunk_belongs_to_a_segment_only_if_all_of_its_address_matches(change: dict[str, int]) -> None:
    assert sequences(scan(filled(placed(0), placed(1, ADDRESS._replace(**change))))) == [0]


def test_old_chunks_between_new_ones_are_a_hole_below_the_durable_head() -> None:
    found = scan(filled(placed(0), placed(7, OTHER), placed(2, durable_head=2 * CHUNK_BYTES)))

    assert sequences(found) == [0, 2]
    assert spans(found) == [(CHUNK_BYTES, 2 * CHUNK_BYTES)]
    assert "another segment" in found.holes[0].reason


# --- holes and torn tails ----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 40, 90, 130, CHUNK_BYTES - 1])
def test_damage_before_a_durable_head_is_a_hole_of_exactly_the_chunk(at: int) -> None:
    """Whatever is hit: magic, header, placement, payload, padding."""
    view = filled(placed(0), placed(1), placed(2), placed(3, durable_head=3 * CHUNK_BYTES))
    found = scan(flip(view, CHUNK_BYTES + at))

    assert sequences(found) == [0, 2, 3]
    assert spans(found) == [(CHUNK_BYTES, 2 * CHUNK_BYTES)]
    assert (found.end, found.torn_bytes) == (SLOT_BYTES, 0)


def test_damage_behind_all_durable_heads_is_a_torn_tail_with_all_behind_it() -> None:
    view = filled(placed(0), placed(1), placed(2, durable_head=CHUNK_BYTES), placed(3, durable_head=CHUNK_BYTES))
    found = scan(flip(view, CHUNK_BYTES + 200))

    assert sequences(found) == [0]
    assert (found.end, found.holes, found.torn_bytes) == (CHUNK_BYTES, [], 3 * CHUNK_BYTES)


def test_damage_on_both_sides_of_the_durable_head_is_a_hole_and_a_torn_tail() -> None:
    view = filled(placed(0), placed(1), placed(2, durable_head=2 * CHUNK_BYTES), placed(3), placed(4), capacity=8192)
    found = scan(flip(view, 200, 3 * CHUNK_BYTES + 200))

    assert sequences(found) == [1, 2]
    assert spans(found) == [(0, CHUNK_BYTES)]
    assert (found.end, found.torn_bytes) == (3 * CHUNK_BYTES, 2 * CHUNK_BYTES)


@pytest.mark.parametrize("cut", [1, 127, 128, 700, CHUNK_BYTES - 1])
def test_a_partly_written_last_chunk_is_a_torn_tail(cut: int) -> None:
    found = scan(filled(placed(0), rest=placed(1)[:cut]))

    assert sequences(found) == [0]
    assert (found.end, found.holes) == (CHUNK_BYTES, [])
    assert 0 < found.torn_bytes <= cut


def test_two_damaged_chunks_side_by_side_are_one_hole() -> None:
    view = filled(placed(0), placed(1), placed(2), placed(3, durable_head=3 * CHUNK_BYTES))
    found = scan(flip(view, CHUNK_BYTES, 2 * CHUNK_BYTES))

    assert spans(found) == [(CHUNK_BYTES, 3 * CHUNK_BYTES)]
    assert sequences(found) == [0, 3]


def test_a_damaged_payload_beside_a_damaged_header_hides_no_chunk_behind_them() -> None:
    view = filled(placed(0), placed(1), placed(2), placed(3, durable_head=3 * CHUNK_BYTES))
    found = scan(flip(view, 0, CHUNK_BYTES + 300))

    assert sequences(found) == [2, 3]
    assert spans(found)[-1][1] == 2 * CHUNK_BYTES


def test_an_unfinished_file_is_trusted_only_up_to_its_first_damage() -> None:
    view = filled(placed(0), placed(1), placed(2, durable_head=2 * CHUNK_BYTES))
    found = scan(flip(view, CHUNK_BYTES + 200), finished=False)

    assert sequences(found) == [0]
    assert (found.end, found.holes, found.torn_bytes) == (CHUNK_BYTES, [], 2 * CHUNK_BYTES)


# --- a length that is known --------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(3))
def test_damage_up_to_a_known_length_is_a_hole(index: int) -> None:
    view = filled(placed(0), placed(1), placed(2), placed(7, OTHER))
    found = scan(flip(view, CHUNK_BYTES * index + 200), length=3 * CHUNK_BYTES)

    assert sequences(found) == [n for n in range(3) if n != index]
    assert spans(found) == [(CHUNK_BYTES * index, CHUNK_BYTES * (index + 1))]
    assert (found.end, found.torn_bytes) == (3 * CHUNK_BYTES, 0)


def test_missing_bytes_up_to_a_known_length_are_a_hole() -> None:
    found = scan(filled(placed(0)), length=3 * CHUNK_BYTES)

    assert found.holes == [Hole(CHUNK_BYTES, 3 * CHUNK_BYTES, found.holes[0].reason)]
    assert found.end == 3 * CHUNK_BYTES


def test_chunks_behind_a_known_length_do_not_count() -> None:
    found = scan(filled(placed(0), placed(1)), length=CHUNK_BYTES)

    assert (sequences(found), found.end) == ([0], CHUNK_BYTES)


def test_a_chunk_that_reaches_over_a_known_length_is_a_hole() -> None:
    found = scan(filled(placed(0), placed(1)), length=CHUNK_BYTES + 512)

    assert spans(found) == [(CHUNK_BYTES, CHUNK_BYTES + 512)]


def test_a_segment_of_known_length_0_has_no_holes() -> None:
    found = scan(filled(), length=0)

    assert (found.end, found.holes, found.headers) == (0, [], [])


@pytest.mark.parametrize("size", [0, 1, 63, 64, 127, 128, 200])
def test_memory_too_small_for_a_chunk_has_no_chunks(size: int) -> None:
    found = scan(memoryview(bytearray(placed(0)[:size])))

    assert (found.end, found.headers) == (0, [])
