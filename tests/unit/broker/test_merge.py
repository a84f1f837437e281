"""Merging headers of chunks into a log: they come in any order, more than once, and some are missing."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kera.broker.records import SegmentAddress
from kera.broker.recovery.merge import Merge, Origin, Recovered, digest_of, digests_of
from kera.core.base.ids import EntryId
from kera.core.format.chunk import ChunkHeader, read_header
from kera.core.format.header_table import as_headers, table
from tests.unit.broker.support import ADDRESS, CHUNK_BYTES, STREAM_ID, placed

ENTRY = EntryId(*ADDRESS[:3])
NEXT_SEGMENT = SegmentAddress(*ADDRESS[:4], segment_id=2)


def header(
    first_record: int,
    address: SegmentAddress = ADDRESS,
    *,
    records: int = 1,
    epoch: int = 9,
    durable_head: int = 0,
    content: int = 0,
) -> ChunkHeader:
    base = read_header(placed(address=address, first_record=first_record, durable_head=durable_head))
    return base._replace(record_count=records, broker_epoch=epoch, payload_crc32c=base.payload_crc32c ^ content)


def merged(
    *headers: ChunkHeader,
    closed: Sequence[ChunkHeader] = (),
    starts: dict[EntryId, int] | None = None,
    ends: dict[EntryId, int] | None = None,
) -> Recovered:
    merge = Merge(starts, ends)
    for each in headers:
        merge.add(table([each]), closed=False)
    merge.add(table(closed), closed=True)
    return merge.finish()


def ordinals(result: Recovered) -> list[int]:
    return [int(first) for run in result.runs for first in run.chunks["first_record"]]


def test_chunks_in_any_order_make_runs_in_the_order_of_the_log() -> None:
    chunks = [header(0), header(1), header(2, records=5), header(7, NEXT_SEGMENT), header(8, NEXT_SEGMENT)]
    result = merged(*reversed(chunks))
    assert [(run.address, len(run.chunks)) for run in result.runs] == [(ADDRESS, 3), (NEXT_SEGMENT, 2)]
    assert ordinals(result) == [0, 1, 2, 7, 8]
    assert result.cuts == []


def test_each_entry_has_its_own_ordinals() -> None:
    others = [SegmentAddress(*place, 1, 1) for place in ((STREAM_ID, 0, 1), (STREAM_ID, 1, 0), (STREAM_ID + 1, 0, 0))]
    result = merged(*(header(0, address) for address in (ADDRESS, *others)))
    assert [run.address for run in result.runs] == sorted([ADDRESS, *others])


def test_a_chunk_of_two_virtual_segments_is_taken_once() -> None:
    result = merged(header(0), header(0), header(1), closed=[header(0)])
    assert ordinals(result) == [0, 1]


def test_chunks_behind_the_first_hole_are_cut_and_reported() -> None:
    result = merged(header(0), header(1), header(3), header(4))
    assert ordinals(result) == [0, 1]
    (cut,) = result.cuts
    assert (cut.entry, cut.end_record, cut.chunks["first_record"].tolist()) == (ENTRY, 2, [3, 4])


def test_acknowledged_chunks_behind_a_hole_are_kept() -> None:
    result = merged(header(0), header(3, NEXT_SEGMENT), closed=[header(2, NEXT_SEGMENT)])
    assert ordinals(result) == [0, 2, 3]
    assert result.cuts == []


@pytest.mark.parametrize(
    ("end", "kept", "cut"),
    [
        pytest.param(9, [0, 5, 6, 8], [], id="behind-all-of-it"),
        pytest.param(8, [0, 5, 6, 8], [], id="where-the-last-hole-ends"),
        pytest.param(5, [0, 5, 6], [8], id="where-the-first-hole-ends"),
        pytest.param(4, [0], [5, 6, 8], id="in-a-hole"),
    ],
)
def test_chunks_behind_a_hole_are_kept_if_the_entry_is_known_to_go_on_there(
    end: int, kept: list[int], cut: list[int]
) -> None:
    result = merged(header(0), header(5), header(6), header(8), ends={ENTRY: end})
    assert ordinals(result) == kept
    assert [first for each in result.cuts for first in each.chunks["first_record"].tolist()] == cut


def test_a_chunk_at_the_known_end_is_taken_although_none_is_left_before_it() -> None:
    assert ordinals(merged(header(9), starts={ENTRY: 7}, ends={ENTRY: 9})) == [9]


def test_a_durable_head_behind_a_hole_proves_that_its_segment_was_acknowledged() -> None:
    result = merged(header(0), header(5, NEXT_SEGMENT), header(6, NEXT_SEGMENT, durable_head=CHUNK_BYTES), header(8))
    assert ordinals(result)[:3] == [0, 5, 6]


def test_a_durable_head_before_a_hole_proves_nothing_about_chunks_behind_it() -> None:
    result = merged(header(0), header(1), header(3, durable_head=CHUNK_BYTES))
    assert ordinals(result) == [0, 1]


def test_chunks_before_a_known_start_are_not_part_of_the_log() -> None:
    left_over, live = [header(0), header(1)], [header(7, NEXT_SEGMENT), header(8, NEXT_SEGMENT)]
    result = merged(*left_over, *live, starts={ENTRY: 7})
    assert ordinals(result) == [7, 8]
    assert result.cuts == []


def test_acknowledged_chunks_are_taken_although_they_begin_behind_a_known_start() -> None:
    result = merged(closed=[header(9)], starts={ENTRY: 7})
    assert ordinals(result) == [9]


def test_unacknowledged_chunks_that_begin_behind_a_known_start_are_cut() -> None:
    result = merged(header(9), starts={ENTRY: 7})
    assert ordinals(result) == []
    assert [(cut.end_record, len(cut.chunks)) for cut in result.cuts] == [(7, 1)]


def test_the_first_chunk_is_the_start_when_no_start_is_known() -> None:
    result = merged(header(9))
    assert ordinals(result) == [9]
    assert result.cuts == []


def test_an_entry_whose_chunks_were_all_removed_is_empty() -> None:
    result = merged(header(0), header(1), starts={ENTRY: 2})
    assert [len(removed) for removed in result.removed] == [2]
    assert replace(result, removed=[], sure={}) == Recovered()


@pytest.mark.parametrize("newer_first", [False, True])
def test_the_chunk_of_the_later_launch_wins_over_another_in_its_place(newer_first: bool) -> None:
    old, new = header(0, content=1), header(0, epoch=10)
    result = merged(*([new, old] if newer_first else [old, new]))
    assert [epoch for run in result.runs for epoch in run.chunks["broker_epoch"]] == [10]


def test_chunks_of_the_later_launch_win_over_overlapping_ones() -> None:
    old, new = [header(0), header(1, records=4), header(5)], [header(1, NEXT_SEGMENT, records=2, epoch=10)]
    result = merged(*old, *new)
    assert ordinals(result) == [0, 1]


def test_an_old_end_of_the_log_is_not_spliced_behind_a_new_one() -> None:
    new = [header(0), header(1, NEXT_SEGMENT, epoch=10), header(2, NEXT_SEGMENT, epoch=10)]
    result = merged(*new, header(3))
    assert ordinals(result) == [0, 1, 2]


def test_origins_name_the_source_of_each_chunk_and_other_sources_that_have_it() -> None:
    merge = Merge()
    merge.add(table([header(0), header(1)]), closed=False, source=4)
    merge.add(table([header(1), header(2, NEXT_SEGMENT)]), closed=False, source=7)
    merge.add(table([header(1, epoch=10, content=1)]), closed=False, source=8)
    assert merge.origins() == {
        Origin(4, ADDRESS, taken=True),  # the first chunk
        Origin(4, ADDRESS, taken=False),  # the second, which lost a conflict
        Origin(7, ADDRESS, taken=False),
        Origin(7, NEXT_SEGMENT, taken=True),
        Origin(8, ADDRESS, taken=True),
    }


def test_headers_added_after_a_result_count_in_the_next_one() -> None:
    merge = Merge()
    merge.add(table([header(0)]), closed=False)
    assert ordinals(merge.finish()) == [0]
    merge.add(table([header(1)]), closed=False)
    assert ordinals(merge.finish()) == [0, 1]


def test_digests_are_equal_one_by_one_and_in_a_table_and_differ_for_other_bytes() -> None:
    headers = [header(number, content=content) for number in range(4) for content in (0, 1, 1 << 31)]
    digests = digests_of(table(headers))
    assert digests.tolist() == [digest_of(each) for each in headers]
    assert len(np.unique(digests)) == len(headers)


def test_a_table_round_trips_its_headers() -> None:
    headers = [header(number) for number in range(3)]
    assert as_headers(table(headers)) == headers
