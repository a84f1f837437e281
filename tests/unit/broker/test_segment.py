from typing import Any

import pytest

from kera.broker.log.arena import SlotContent
from kera.broker.log.entry import Entry, state_of
from kera.broker.log.scan import scan_segment
from kera.broker.log.segment import Segment, SegmentState
from kera.broker.records import ProducerRecord, SegmentAddress, SegmentRecord
from kera.core.base.ids import EntryId
from kera.core.errors import InternalError
from kera.core.format.chunk import HEADER_BYTES, verify_chunk
from tests.unit.broker.support import CHUNK_BYTES, Engine, Log, chunk

ADDRESS = SegmentAddress(7, 0, 2, 4, 1)
FIRST_RECORD = 11


@pytest.fixture
def segment(engine: Engine) -> Segment:
    """Has room for four chunks."""
    entry = Entry(EntryId(*ADDRESS[:3]), engine.index)
    return Segment.open(entry, ADDRESS, engine.arena.allocate(), FIRST_RECORD)


def append(
    segment: Segment, sequence: int = 0, size: int = CHUNK_BYTES, first_record: int = FIRST_RECORD, **fields: Any
) -> int:
    data = memoryview(chunk(sequence=sequence, size=size, **fields))
    return segment.append(data, verify_chunk(data), 9, first_record)


# --- appending ---------------------------------------------------------------------------------------------


def test_appended_chunks_follow_each_other_whole_and_with_their_place(segment: Segment) -> None:
    assert [append(segment, fill=b"a"), append(segment, size=512), append(segment, fill=b"c")] == [0, 1024, 1536]

    for offset in (0, 1024, 1536):
        header = verify_chunk(segment.slot.view, offset)
        assert (header.group_id, header.segment_id, header.entry, header.first_record, header.broker_epoch) == (
            4,
            1,
            2,
            11,
            9,
        )
    assert bytes(segment.slot.view[512:1024]) == b"a" * 512
    assert bytes(segment.slot.view[2048:2560]) == b"c" * 512
    assert segment.head == 2560
    assert segment.takes(4096 - 2560)
    assert not segment.takes(4096 - 2560 + 64)


def test_a_segment_knows_its_records_and_their_times(segment: Segment) -> None:
    append(segment, record_count=3, min_timestamp_us=-5, max_timestamp_us=7)
    append(segment, record_count=4, min_timestamp_us=2, max_timestamp_us=90)
    append(segment, record_count=1, min_timestamp_us=0, max_timestamp_us=1)

    assert (segment.record_count, segment.min_timestamp_us, segment.max_timestamp_us) == (8, -5, 90)


def test_an_append_to_a_full_segment_is_a_defect_and_writes_nothing(segment: Segment) -> None:
    append(segment, size=3840)
    before = bytes(segment.slot.view)
    with pytest.raises(InternalError, match="full segment"):
        append(segment, size=512)

    assert bytes(segment.slot.view) == before
    assert (segment.head, segment.record_count, list(segment.chunk_ends)) == (3840, 1, [3840])


def test_a_segment_can_be_filled_to_its_last_byte(segment: Segment) -> None:
    append(segment, size=4096)

    assert not segment.takes(64)


def test_an_append_to_a_closed_segment_is_a_defect(segment: Segment) -> None:
    segment.close()
    with pytest.raises(InternalError, match="closed"):
        append(segment)

    assert segment.head == 0


# --- boundaries --------------------------------------------------------------------------------------------


def test_only_starts_and_ends_of_chunks_are_boundaries(segment: Segment) -> None:
    assert [offset for offset in range(4097) if segment.is_boundary(offset)] == [0]
    append(segment)
    append(segment, size=512)

    assert [offset for offset in range(4097) if segment.is_boundary(offset)] == [0, 1024, 1536]


@pytest.mark.parametrize(
    ("start", "bytes_max", "end", "expected"),
    [
        (0, 4096, 2560, 2560),  # all of it
        (0, 2560, 2560, 2560),  # exactly the budget
        (0, 2559, 2560, 1536),  # the last chunk is too much
        (0, 1535, 2560, 1024),
        (0, 1023, 2560, 0),  # not even one
        (1024, 512, 2560, 1536),  # the budget counts from the start
        (1024, 511, 2560, 1024),
        (0, 4096, 1536, 1536),  # the end is nearer than the budget
        (0, 4096, 1535, 1024),
        (2560, 4096, 2560, 2560),
        (1024, -1, 2560, 1024),  # nothing is left of the budget
    ],
)
def test_a_budget_is_rounded_down_to_whole_chunks(
    segment: Segment, start: int, bytes_max: int, end: int, expected: int
) -> None:
    for size in (1024, 512, 1024):
        append(segment, size=size)

    assert segment.boundary_within(start, bytes_max, end) == expected


def test_the_end_of_a_chunk_is_found_from_its_start(segment: Segment) -> None:
    for size in (1024, 512, 1024):
        append(segment, size=size)

    assert [segment.chunk_end_after(start) for start in (0, 1024, 1536)] == [1024, 1536, 2560]
    assert segment.header_at(1024).payload_bytes == 512 - HEADER_BYTES


# --- heads -------------------------------------------------------------------------------------------------


def test_an_append_is_not_readable_until_the_durable_head_moves(segment: Segment) -> None:
    append(segment)
    append(segment)
    assert (segment.durable_head, segment.head) == (0, 2048)

    segment.advance_durable_head(1024)

    assert (segment.durable_head, segment.head) == (1024, 2048)


@pytest.mark.parametrize("to", [0, 1023, 2049])
def test_a_durable_head_that_goes_back_or_passes_the_head_is_a_defect(segment: Segment, to: int) -> None:
    append(segment)
    append(segment)
    segment.advance_durable_head(1024)
    with pytest.raises(InternalError, match="durable head"):
        segment.advance_durable_head(to)

    assert segment.durable_head == 1024


# --- its slot ----------------------------------------------------------------------------------------------


def test_the_row_of_the_slot_has_the_address_and_heads_of_the_segment(segment: Segment) -> None:
    append(segment)
    append(segment)
    segment.advance_durable_head(1024)
    assert segment.slot.content == SlotContent(*ADDRESS, 11, 2048, 1024, closed=False)

    segment.close()

    assert segment.slot.content == SlotContent(*ADDRESS, 11, 2048, 1024, closed=True)


def test_a_chunk_has_the_durable_head_at_the_time_of_its_append(segment: Segment) -> None:
    append(segment)
    append(segment)
    segment.advance_durable_head(1024)
    append(segment)

    assert [segment.header_at(offset).durable_head for offset in (0, 1024, 2048)] == [0, 0, 1024]


def test_a_segment_found_in_a_slot_is_the_one_that_was_left_there(segment: Segment) -> None:
    append(segment, 0, record_count=3, created_us=7)
    append(segment, 0, record_count=4, created_us=6, producer=2, first_record=14)
    segment.advance_durable_head(1024)
    segment.close()
    content = segment.slot.content
    assert content is not None
    found = Segment.found(segment.entry, segment.slot, content, scan_segment(segment.slot.view, address=ADDRESS))

    assert (found.key, found.head, found.durable_head, found.closed) == ((4, 1), 2048, 1024, True)
    assert found.chunk_ends == segment.chunk_ends
    assert found.producers == {1: ProducerRecord(0, 1), 2: ProducerRecord(0, 1)}
    assert found.record() == segment.record()


def test_the_records_of_a_damaged_chunk_keep_their_numbers(segment: Segment) -> None:
    for sequence in range(3):
        append(segment, sequence, record_count=10, first_record=11 + 10 * sequence)
    segment.slot.view[1024 + 200] ^= 1
    content = segment.slot.content
    assert content is not None
    found = Segment.found(
        segment.entry, segment.slot, content, scan_segment(segment.slot.view, address=ADDRESS, length=3072)
    )

    assert (found.first_record, found.record_count, found.head) == (11, 30, 3072)
    assert [found.hole_at(offset) == found.holes[0] for offset in (0, 1024, 2047, 2048)] == [True, True, True, False]


def test_the_record_of_an_open_segment_promises_no_length(segment: Segment) -> None:
    append(segment)
    assert (segment.record().open, segment.record().length) == (True, 0)
    segment.close()

    assert (segment.record().open, segment.record().length) == (False, 1024)


# --- states ------------------------------------------------------------------------------------------------


def test_a_segment_goes_through_the_states_of_the_thesis(log: Log) -> None:
    entry, memory = log.entry, log.engine.memory
    log.append_many(5)
    first, second = entry.tail
    assert [state_of(segment) for segment in (first, second)] == [SegmentState.GROUP, SegmentState.HEAD]

    entry.readers[1] = (1, 2)
    assert state_of(first) == SegmentState.PROCESSED

    log.engine.run()
    log.engine.fill_memory()
    memory.slots.allocate().retire()
    assert isinstance(entry.find((1, 1)), SegmentRecord), "closed: on disk only"

    memory.loads.load(entry, (1, 1))
    (job,) = memory.plan()
    loading = entry.resident[1, 1]
    assert state_of(loading) == SegmentState.LOADING

    log.engine.perform(job)
    assert state_of(loading) == SegmentState.PROCESSED
    entry.readers.clear()
    assert state_of(loading) == SegmentState.GROUP
