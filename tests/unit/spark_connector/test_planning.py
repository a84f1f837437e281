"""Micro-batches follow each other without gap or overlap, and ends never go back."""

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.core.errors import InvalidArgument
from kera.core.ids import EntryId, Position
from kera.spark_connector.offsets import EARLIEST_PLACES, LATEST_PLACES, EntryOffset, Places, StreamOffsets
from kera.spark_connector.planning import advance, cap, ends, forwarded, partitions, resolve, shares, starts


class Entry(NamedTuple):
    start: Position
    end: Position
    first_record: int
    next_record: int


def entry(records: int, *, first: int = 0, group: int = 1) -> Entry:
    """An entry with `records` records of 64 bytes."""
    return Entry(Position(group, 1, first * 64), Position(group, 1, (first + records) * 64), first, first + records)


def at(record: int, group: int = 1) -> EntryOffset:
    return EntryOffset(Position(group, 1, record * 64), record)


def offsets(*rows: tuple[EntryOffset, ...]) -> StreamOffsets:
    return StreamOffsets("flights", 7, dict(enumerate(rows)))


BOUNDS = {0: [entry(10), entry(0)], 1: [entry(5, first=3), entry(7)]}


def test_earliest_and_latest_are_the_bounds() -> None:
    assert resolve("startingOffsets", EARLIEST_PLACES, BOUNDS, {}) == starts(BOUNDS)
    assert resolve("startingOffsets", LATEST_PLACES, BOUNDS, {}) == ends(BOUNDS)


def test_a_place_for_a_streamlet_is_for_all_its_entries_and_a_list_is_one_for_each() -> None:
    position = Position(1, 1, 128)
    places = Places(streamlets={0: "latest", 1: ("earliest", position)})

    resolved = resolve("startingOffsets", places, BOUNDS, {((1, 1), position): 2})

    assert resolved == {0: (at(10), at(0)), 1: (at(3), EntryOffset(position, 2))}


@pytest.mark.parametrize("streamlets", [{0: "latest"}, {0: "latest", 1: "latest", 2: "latest"}, {}])
def test_each_streamlet_must_be_named(streamlets: dict[int, object]) -> None:
    with pytest.raises(InvalidArgument, match="must name each streamlet"):
        resolve("startingOffsets", Places(streamlets=streamlets), BOUNDS, {})  # type: ignore[arg-type]


def test_a_list_must_have_one_place_per_entry() -> None:
    with pytest.raises(InvalidArgument, match="has 2 entries, 1 places are given"):
        resolve("startingOffsets", Places(streamlets={0: ("latest",), 1: "latest"}), BOUNDS, {})


def test_an_end_never_goes_back_in_any_entry() -> None:
    start = {0: (at(8), at(2))}

    assert advance(start, {0: (at(5), at(6))}) == {0: (at(8), at(6))}


def test_the_start_stays_where_only_the_name_of_the_place_has_changed() -> None:
    end_of_segment = EntryOffset(Position(1, 1, 640), 10)
    start_of_next = EntryOffset(Position(1, 2, 0), 10)

    assert advance({0: (end_of_segment,)}, {0: (start_of_next,)}) == {0: (end_of_segment,)}


def test_a_place_in_groups_that_were_let_go_empty_moves_on_to_what_is_there() -> None:
    bounds = {0: [entry(10, first=4, group=3), entry(5, first=4, group=3)]}
    read_all = EntryOffset(Position(1, 2, 640), 4)
    read_less = EntryOffset(Position(1, 2, 320), 2)

    moved = forwarded(offsets((read_all, read_less)), bounds)

    assert moved == offsets((at(4, group=3), read_less)), (
        "two records of the second entry are lost, and reading says so"
    )
    assert forwarded(moved, {0: [entry(10, group=3), entry(10, group=3)]}) == moved
    assert forwarded(moved, {}) == moved


def test_available_now_reads_no_further_than_its_target() -> None:
    assert cap({0: (at(9), at(1))}, {0: (at(5), at(4))}) == {0: (at(5), at(1))}


def test_each_entry_with_records_becomes_a_partition() -> None:
    planned = partitions(offsets((at(0), at(4)), (at(2), at(0))), offsets((at(9), at(4)), (at(3), at(0))), typed=True)

    assert [(part.entry, part.start, part.end, part.records) for part in planned] == [
        (EntryId(7, 0, 0), at(0).position, at(9).position, 9),
        (EntryId(7, 1, 0), at(2).position, at(3).position, 1),
    ]


def test_shares_follow_what_waits_and_leave_no_entry_out() -> None:
    start, end = offsets((at(0), at(0)), (at(0),)), offsets((at(900), at(0)), (at(100),))

    assert shares(start, end, 100) == {(0, 0): 90, (0, 1): 0, (1, 0): 10}
    assert shares(start, end, 1) == {(0, 0): 1, (0, 1): 0, (1, 0): 1}
    assert shares(start, end, 1000) == {(0, 0): 900, (0, 1): 0, (1, 0): 100}


def test_an_entry_that_lost_its_ordinals_with_its_broker_is_still_read() -> None:
    start, end = offsets((at(900),)), offsets((at(5, group=2),))

    assert shares(start, end, 10) == {(0, 0): 1}


heads = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=30)


@given(heads, st.integers(1, 40))
def test_micro_batches_cover_a_stream_exactly_whatever_the_brokers_say(
    says: list[tuple[int, int]], records_max: int
) -> None:
    """A dumb model: every record that a partition covers is put on a list; none may be missing or come twice."""
    start = offsets((at(0), at(0)))
    seen: dict[int, list[int]] = {0: [], 1: []}
    for head in says:
        end = StreamOffsets("flights", 7, advance(start.streamlets, {0: (at(head[0]), at(head[1]))}))
        share = shares(start, end, records_max)
        end = offsets(
            tuple(
                at(min(stop.record, begin.record + share[0, index]))
                for index, (begin, stop) in enumerate(zip(start.streamlets[0], end.streamlets[0], strict=True))
            )
        )
        for part in partitions(start, end, typed=False):
            seen[part.entry.entry] += range(part.start.offset // 64, part.end.offset // 64)
        start = end

    for index, records in seen.items():
        assert records == list(range(len(records)))
        assert len(records) <= max(head[index] for head in says)
