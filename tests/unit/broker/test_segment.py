from typing import Any

import pytest

from kera.broker.arena import Arena
from kera.broker.segment import Group, Segment
from kera.core.chunk import Placement, verify_chunk
from kera.core.errors import InternalError
from tests.unit.broker.support import CHUNK_BYTES, chunk

PLACEMENT = Placement(group_id=4, segment_id=1, entry=2, first_record=11, broker_epoch=9)


@pytest.fixture
def segment(arena: Arena) -> Segment:
    """Has room for four chunks."""
    return Segment(1, arena.allocate())


def append(segment: Segment, size: int = CHUNK_BYTES, **fields: Any) -> int:
    data = memoryview(chunk(size=size, **fields))
    return segment.append(data, verify_chunk(data), PLACEMENT)


# --- appending ---------------------------------------------------------------------------------------------


def test_chunks_follow_each_other_and_are_whole_and_placed(segment: Segment) -> None:
    assert [append(segment, fill=b"a"), append(segment, size=128), append(segment, fill=b"c")] == [0, 256, 384]

    for offset in (0, 256, 384):
        header = verify_chunk(segment.slot.view, offset)
        assert (header.group_id, header.segment_id, header.entry, header.first_record, header.broker_epoch) == PLACEMENT
    assert bytes(segment.slot.view[128:256]) == b"a" * 128
    assert bytes(segment.slot.view[512:640]) == b"c" * 128
    assert (segment.head, segment.free_bytes) == (640, 1024 - 640)


def test_a_segment_knows_its_records_and_their_times(segment: Segment) -> None:
    append(segment, record_count=3, min_timestamp_us=-5, max_timestamp_us=7)
    append(segment, record_count=4, min_timestamp_us=2, max_timestamp_us=90)
    append(segment, record_count=1, min_timestamp_us=0, max_timestamp_us=1)

    assert (segment.record_count, segment.min_timestamp_us, segment.max_timestamp_us) == (8, -5, 90)


def test_an_append_to_a_full_segment_is_a_defect_and_writes_nothing(segment: Segment) -> None:
    append(segment, size=960)
    before = bytes(segment.slot.view)
    with pytest.raises(InternalError, match="full segment"):
        append(segment, size=128)

    assert bytes(segment.slot.view) == before
    assert (segment.head, segment.record_count, list(segment.chunk_ends)) == (960, 1, [960])


def test_a_segment_can_be_filled_to_its_last_byte(segment: Segment) -> None:
    append(segment, size=1024)

    assert segment.free_bytes == 0


def test_an_append_to_a_closed_segment_is_a_defect(segment: Segment) -> None:
    segment.closed = True
    with pytest.raises(InternalError, match="closed"):
        append(segment)

    assert segment.head == 0


# --- boundaries --------------------------------------------------------------------------------------------


def test_only_starts_and_ends_of_chunks_are_boundaries(segment: Segment) -> None:
    assert [offset for offset in range(1025) if segment.is_boundary(offset)] == [0]
    append(segment)
    append(segment, size=128)

    assert [offset for offset in range(1025) if segment.is_boundary(offset)] == [0, 256, 384]


@pytest.mark.parametrize(
    ("start", "bytes_max", "end", "expected"),
    [
        (0, 1024, 640, 640),  # all of it
        (0, 640, 640, 640),  # exactly the budget
        (0, 639, 640, 384),  # the last chunk is too much
        (0, 383, 640, 256),
        (0, 255, 640, 0),  # not even one
        (256, 128, 640, 384),  # the budget counts from the start
        (256, 127, 640, 256),
        (0, 1024, 384, 384),  # the end is nearer than the budget
        (0, 1024, 383, 256),
        (640, 1024, 640, 640),
        (256, -1, 640, 256),  # nothing is left of the budget
    ],
)
def test_whole_chunks_within_a_budget(segment: Segment, start: int, bytes_max: int, end: int, expected: int) -> None:
    for size in (256, 128, 256):
        append(segment, size=size)

    assert segment.boundary_within(start, bytes_max, end) == expected


def test_the_end_of_a_chunk_is_found_from_its_start(segment: Segment) -> None:
    for size in (256, 128, 256):
        append(segment, size=size)

    assert [segment.chunk_end_after(start) for start in (0, 256, 384)] == [256, 384, 640]
    assert segment.header_at(256).payload_bytes == 0


# --- heads -------------------------------------------------------------------------------------------------


def test_an_append_is_not_readable_until_the_durable_head_moves(segment: Segment) -> None:
    append(segment)
    append(segment)
    assert (segment.durable_head, segment.head) == (0, 512)

    segment.advance_durable_head(256)

    assert (segment.durable_head, segment.head) == (256, 512)


@pytest.mark.parametrize("to", [0, 255, 513])
def test_a_durable_head_that_goes_back_or_passes_the_head_is_a_defect(segment: Segment, to: int) -> None:
    append(segment)
    append(segment)
    segment.advance_durable_head(256)
    with pytest.raises(InternalError, match="durable head"):
        segment.advance_durable_head(to)

    assert segment.durable_head == 256


# --- groups ------------------------------------------------------------------------------------------------


def test_segment_ids_grow_by_one_from_one_and_only_the_last_segment_is_open(arena: Arena) -> None:
    group = Group(5, entry=1)
    segments = [group.add_segment(arena.allocate()) for _ in range(3)]

    assert [segment.segment_id for segment in group.segments] == [1, 2, 3]
    assert group.segments == segments
    assert [segment.closed for segment in segments] == [True, True, False]
    assert (group.group_id, group.entry, group.closed) == (5, 1, False)


def test_a_closed_group_has_no_open_segment_and_takes_no_other(arena: Arena) -> None:
    group = Group(5, entry=0)
    segment = group.add_segment(arena.allocate())
    group.close()
    with pytest.raises(InternalError, match="closed group"):
        group.add_segment(arena.allocate())

    assert group.closed
    assert segment.closed
    assert group.segments == [segment]


def test_a_group_without_segments_can_be_closed() -> None:
    group = Group(5, entry=0)
    group.close()

    assert group.closed


def test_a_retired_group_frees_the_slots_of_all_its_segments(arena: Arena) -> None:
    group = Group(5, entry=0)
    for _ in range(3):
        group.add_segment(arena.allocate())
    assert arena.free_slots == 5
    group.retire()

    assert arena.free_slots == 8
