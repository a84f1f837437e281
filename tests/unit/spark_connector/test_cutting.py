"""Partitions cover their ranges exactly once, each lies at one broker, and their number follows the options."""

import pickle
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.client import Interval, SegmentBounds
from kera.core.base.ids import EntryId, Position
from kera.spark_connector.planning import Cutting, EntryRange, Now, Piece, cut, ranges, to_ask
from kera.spark_connector.planning import cutting as cutting_module
from kera.spark_connector.planning.cutting import CUT_BYTES_MIN
from kera.spark_connector.planning.offsets import EntryName, EntryOffset
from kera.spark_connector.reading.partition import KeraPartition
from tests.unit.spark_connector.worlds import (
    RECORD_BYTES,
    Log,
    assigned,
    at,
    entry,
    named,
    now_of,
    offsets,
    stream_now,
)

NODES = {1: "node-a", 2: "node-b"}


def world(*logs: Log) -> Now:
    """A stream with one entry per streamlet."""
    return now_of(
        stream_now(
            {number: [log.bounds] for number, log in enumerate(logs)},
            assignments={number: log.assignment for number, log in enumerate(logs)},
            nodes=NODES,
        )
    )


def whole(now: Now) -> list[EntryRange]:
    return [
        EntryRange(
            named(streamlet),
            EntryOffset(there.start, there.first_record),
            EntryOffset(there.end, there.next_record),
            there.length_bytes,
        )
        for streamlet, (there,) in now["flights"].bounds.items()
        if there.start < there.end
    ]


def pieces(logs: list[Log], cutting: Cutting, found: list[EntryRange] | None = None) -> list[Piece]:
    """Run both passes, with segments for exactly the ranges that need a request."""
    now = world(*logs)
    found = whole(now) if found is None else found
    asked = to_ask(found, now, cutting)
    segments = {item.entry: logs[item.entry.streamlet].between(item.start, item.end) for item in asked}
    return cut(found, now, segments, cutting, fail_on_data_loss=True)


def spans(planned: list[Piece]) -> list[tuple[Position, Position]]:
    return [(piece.start, piece.end) for piece in planned]


def group(number: int, *segments: int, broker: int = 1) -> list[tuple[int, int, list[int]]]:
    """A group whose segments have these numbers of records."""
    return [(number, broker, [records]) for records in segments]


def test_each_entry_with_records_becomes_a_partition() -> None:
    now = now_of(
        stream_now({0: [entry(9), entry(4)], 1: [entry(3), entry(0)]}, assignments={0: assigned(2)}, nodes=NODES)
    )
    found = ranges(offsets((at(0), at(4)), (at(2), at(0))), offsets((at(9), at(4)), (at(3), at(0))), now)

    assert to_ask(found, now, Cutting(parallelism=8)) == []
    assert cut(found, now, {}, Cutting(parallelism=8), fail_on_data_loss=False) == [
        Piece(
            stream="flights",
            entry=EntryId(7, 0, 0),
            start=at(0).position,
            end=at(9).position,
            first_record=0,
            records=9,
            length_bytes=9 * RECORD_BYTES,
            typed=True,
            broker_id=2,
            node_id="node-b",
            fail_on_data_loss=False,
        ),
        Piece("flights", EntryId(7, 1, 0), at(2).position, at(3).position, 2, 1, RECORD_BYTES, True, 0, "", False),
    ]


def test_a_partition_survives_pickling() -> None:
    (piece,) = pieces([Log(group(1, 5))], Cutting())

    travelled = pickle.loads(pickle.dumps(KeraPartition(piece)))

    assert travelled.piece == piece


def test_an_entry_without_a_start_offset_is_not_read() -> None:
    now = now_of(stream_now({0: [entry(9)], 1: [entry(9)]}))

    assert ranges(offsets((at(0),)), offsets((at(9),), (at(9),)), now) == [EntryRange(named(), at(0), at(9), 576)]


# --- brokers ------------------------------------------------------------------------------------------------


def test_a_range_over_several_brokers_is_cut_only_where_the_broker_changes() -> None:
    log = Log([*group(1, 5, 5), *group(2, 5), *group(3, 5, broker=2), *group(4, 5)])

    planned = pieces([log], Cutting())

    assert [(piece.broker_id, piece.node_id, piece.records) for piece in planned] == [
        (1, "node-a", 15),
        (2, "node-b", 5),
        (1, "node-a", 5),
    ]


def test_a_range_at_one_broker_is_cut_without_a_request() -> None:
    log = Log([*group(1, 5), *group(2, 5, broker=2), *group(3, 5, broker=2)])
    now = world(log)
    found = [EntryRange(named(), at(5, 2)._replace(position=Position(2, 1, 0)), whole(now)[0].end, 0)]

    assert to_ask(found, now, Cutting()) == []
    (piece,) = cut(found, now, {}, Cutting(), fail_on_data_loss=True)
    assert piece.broker_id == 2


def test_a_range_with_another_broker_in_the_middle_needs_a_request() -> None:
    now = now_of(
        stream_now({0: [entry(9)]}, assignments={0: assigned(1, Interval(1, 1), Interval(3, 2), Interval(5, 1))})
    )
    inside = [EntryRange(named(), at(0, 2), at(9, 6), 0)]

    assert to_ask(inside, now, Cutting()) == inside
    assert to_ask([EntryRange(named(), at(0, 5), at(9, 6), 0)], now, Cutting()) == []


def test_records_are_counted_per_segment_when_ordinals_begin_anew() -> None:
    log = Log([*group(1, 5), *group(2, 5)])
    anew = log.segments[1]._replace(first_record=0, next_record=3, broker_id=2)
    now = now_of(stream_now({0: [entry(9)]}))
    found = [EntryRange(named(), EntryOffset(Position(1, 1, 64), 1), EntryOffset(anew.end, 3), 0)]
    first = log.segments[0]._replace(start=Position(1, 1, 64), first_record=1)

    lower = [found[0]._replace(start=EntryOffset(Position(1, 1, 256), 4))]
    assert to_ask(lower, now, Cutting()) == lower
    planned = cut(found, now, {named(): [first, anew]}, Cutting(), fail_on_data_loss=True)

    assert [piece.records for piece in planned] == [4, 3]


# --- by default ---------------------------------------------------------------------------------------------

MUCH = CUT_BYTES_MIN // RECORD_BYTES
"""The records of the smallest part that cutting makes."""


def test_by_default_a_small_entry_is_never_cut() -> None:
    logs = [Log([*group(1, MUCH // 4, MUCH // 4), *group(2, MUCH // 4)])]

    assert len(pieces(logs, Cutting(parallelism=64))) == 1


def test_by_default_a_large_entry_is_cut_at_groups_into_about_as_many_parts_as_the_parallelism() -> None:
    logs = [Log([segment for number in range(1, 41) for segment in group(number, MUCH // 8, MUCH // 8)])]

    planned = pieces(logs, Cutting(parallelism=4))

    assert [piece.records for piece in planned] == [MUCH // 4 * 10] * 4
    assert all(piece.start.segment_id == 1 for piece in planned)


def test_by_default_only_the_large_entry_among_small_ones_is_cut() -> None:
    large = Log([segment for number in range(1, 9) for segment in group(number, MUCH)])
    small = Log([*group(1, MUCH // 2), *group(2, MUCH // 2)])

    planned = pieces([small, large, small], Cutting(parallelism=4))

    assert [piece.entry.streamlet_id for piece in planned] == [0, 1, 1, 1, 2]


def test_by_default_as_many_entries_as_the_parallelism_stay_whole() -> None:
    log = Log([segment for number in range(1, 5) for segment in group(number, MUCH)])

    assert len(pieces([log] * 4, Cutting(parallelism=4))) == 4
    assert len(pieces([log] * 2, Cutting(parallelism=4))) == 4


def test_by_default_an_entry_is_cut_from_one_and_a_half_parts_on() -> None:
    one_and_a_half = Log([*group(1, MUCH), *group(2, MUCH // 2)])
    less = Log([*group(1, MUCH), *group(2, MUCH // 2 - 1)])

    assert [piece.records for piece in pieces([one_and_a_half], Cutting(parallelism=64))] == [MUCH, MUCH // 2]
    assert len(pieces([less], Cutting(parallelism=64))) == 1


def test_by_default_a_single_group_is_not_cut_and_needs_no_request() -> None:
    log = Log(group(1, MUCH, MUCH, MUCH, MUCH))
    now = world(log)

    assert to_ask(whole(now), now, Cutting(parallelism=4)) == []
    assert len(pieces([log], Cutting(parallelism=4))) == 1


# --- minPartitions ------------------------------------------------------------------------------------------


def test_the_largest_ranges_are_cut_first() -> None:
    logs = [Log([*group(1, 10), *group(2, 10)]), Log([*group(1, 50), *group(2, 50), *group(3, 50), *group(4, 50)])]

    planned = pieces(logs, Cutting(partitions_min=5))

    assert [(piece.entry.streamlet_id, piece.records) for piece in planned] == [(0, 20), *[(1, 50)] * 4]


def test_the_end_of_a_group_is_preferred_unless_it_leaves_too_little() -> None:
    fair = Log([*group(1, 10, 10, 10), *group(2, 10, 10)])
    assert spans(pieces([fair], Cutting(partitions_min=2)))[1][0] == Position(2, 1, 0)

    unfair = Log([*group(1, 10), *group(2, 10, 10, 10, 10, 10)])
    assert [piece.records for piece in pieces([unfair], Cutting(partitions_min=2))] == [30, 30]


def test_segments_are_cut_apart_until_nothing_can_be_cut() -> None:
    logs = [Log([*group(1, 5, 5), *group(2, 5)]), Log(group(1, 5))]

    assert len(pieces(logs, Cutting(partitions_min=3))) == 3
    assert [piece.records for piece in pieces(logs, Cutting(partitions_min=100))] == [5, 5, 5, 5]


def test_as_many_ranges_as_min_partitions_are_not_cut_and_need_no_request() -> None:
    logs = [Log([*group(1, MUCH), *group(2, MUCH)])] * 3
    now = world(*logs)

    assert to_ask(whole(now), now, Cutting(partitions_min=3, parallelism=64)) == []
    assert len(pieces(logs, Cutting(partitions_min=3, parallelism=64))) == 3


# --- maxRecordsPerPartition ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records_max", "sizes"),
    [
        (1000, [190]),
        (100, [100, 90]),
        (60, [60, 40, 60, 30]),
        (30, [30, 30, 10, 30, 30, 30, 30]),
        (1, [30, 30, 10, 30, 30, 30, 30]),
    ],
)
def test_partitions_have_at_most_the_configured_records_or_one_segment(records_max: int, sizes: list[int]) -> None:
    log = Log([*group(1, 30, 30), *group(2, 10), *group(3, 30), *group(4, 30, 30, 30)])

    assert [piece.records for piece in pieces([log], Cutting(records_max=records_max))] == sizes


def test_a_group_that_is_small_enough_is_not_cut_to_fill_a_partition() -> None:
    log = Log([*group(1, 40), *group(2, 30, 30)])

    assert [piece.records for piece in pieces([log], Cutting(records_max=70))] == [40, 60]


def test_small_ranges_and_ranges_in_one_segment_need_no_request() -> None:
    now = world(Log([*group(1, 30), *group(2, 30)]), Log(group(1, 500)))

    assert to_ask(whole(now), now, Cutting(records_max=60)) == []


def test_min_partitions_and_max_records_per_partition_apply_together() -> None:
    log = Log([*group(1, 30, 30), *group(2, 30, 30)])

    assert len(pieces([log], Cutting(partitions_min=2, records_max=90))) == 2
    assert len(pieces([log], Cutting(partitions_min=1, records_max=30))) == 4
    assert len(pieces([log], Cutting(partitions_min=3, records_max=60))) == 3


# --- gaps ---------------------------------------------------------------------------------------------------


def test_a_gap_between_segments_counts_as_records_of_a_partition() -> None:
    log = Log([*group(1, 10, 10), *group(2, 10), *group(3, 10, broker=2)])
    first, missing, third, last = log.segments
    now = world(log)

    for there in ([first, third, last], [first, missing, last], [missing, third, last], [first, missing, third]):
        planned = cut(whole(now), now, {named(): there}, Cutting(partitions_min=9), fail_on_data_loss=True)
        assert sum(piece.records for piece in planned) == 40
        assert planned[0].start == log.bounds.start
        assert planned[-1].end == log.bounds.end
    (joined, _) = cut(
        whole(now), now, {named(): [first, third, last]}, Cutting(partitions_min=9), fail_on_data_loss=True
    )
    assert (joined.start, joined.end) == (first.start, third.end), "a task reads over the gap, and sees that it is one"


def test_a_partition_ends_where_the_next_one_begins() -> None:
    first, second = pieces([Log([*group(1, 10), *group(4, 10)])], Cutting(partitions_min=2))

    assert first.end == second.start == Position(4, 1, 0), "or nobody would notice that groups 2 and 3 are lost"


def test_without_options_a_large_micro_batch_is_cut_at_the_ends_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting_module, "CUT_BYTES_STABLE", 20 * RECORD_BYTES)
    planned = pieces([Log([*group(1, 10, 10), *group(2, 10, 10), *group(3, 5, 5)])], Cutting(stable=True))

    assert [piece.records for piece in planned] == [20, 20, 10]


# --- any cuts -----------------------------------------------------------------------------------------------

chunks = st.lists(st.integers(1, 50), min_size=1, max_size=4)
groups = st.lists(st.tuples(st.sampled_from([1, 2]), st.lists(chunks, min_size=1, max_size=4)), min_size=1, max_size=6)
logs = groups.map(
    lambda made: Log([(number + 1, broker, of) for number, (broker, each) in enumerate(made) for of in each])
)
cuttings = st.builds(
    Cutting, st.none() | st.integers(1, 40), st.none() | st.integers(1, 200), parallelism=st.integers(1, 16)
)


@st.composite
def reads(draw: st.DrawFn) -> tuple[list[Log], list[EntryRange]]:
    """Some entries, and a range of chunks in each."""
    drawn = draw(st.lists(logs, min_size=1, max_size=4))
    found = []
    for number, log in enumerate(drawn):
        start, end = sorted(draw(st.tuples(*[st.sampled_from(log.boundaries)] * 2)))
        if start.record < end.record:
            found.append(
                EntryRange(named(number), start, end, (end.record - start.record) * draw(st.integers(0, 2**22)))
            )
    return drawn, found


@given(reads(), cuttings)
def test_partitions_cover_ranges_exactly_once(read: tuple[list[Log], list[EntryRange]], cutting: Cutting) -> None:
    logs, found = read
    planned = pieces(logs, cutting, found)

    for item in found:
        log = logs[item.entry.streamlet]
        mine = [piece for piece in planned if piece.entry.streamlet_id == item.entry.streamlet]
        given_out = [log.records_of(piece.start, piece.end) for piece in mine]
        assert [record for records in given_out for record in records] == list(
            range(item.start.record, item.end.record)
        )
        assert [len(records) for records in given_out] == [piece.records for piece in mine]
        assert (mine[0].start, mine[-1].end) == (item.start.position, item.end.position)
        for piece in mine:
            holders = {there.broker_id for there in log.segments if overlap(piece, there)}
            assert holders == {piece.broker_id}
            assert piece.node_id == NODES[piece.broker_id]


def overlap(piece: Piece, there: SegmentBounds) -> bool:
    return max(piece.start, there.start) < min(piece.end, there.end)


@given(reads(), st.integers(1, 40), st.integers(1, 200))
def test_options_are_met_as_far_as_segments_allow(
    read: tuple[list[Log], list[EntryRange]], partitions_min: int, records_max: int
) -> None:
    logs, found = read
    segments: dict[EntryName, int] = {
        item.entry: len(logs[item.entry.streamlet].between(item.start, item.end)) for item in found
    }

    enough = pieces(logs, Cutting(partitions_min=partitions_min), found)
    assert len(enough) >= min(partitions_min, sum(segments.values()))

    for piece in pieces(logs, Cutting(records_max=records_max), found):
        in_one_segment = sum(overlap(piece, there) for there in logs[piece.entry.streamlet_id].segments) == 1
        assert piece.records <= records_max or in_one_segment


@given(reads(), cuttings, st.integers(0, 2**30), st.integers(1, 16), st.randoms(use_true_random=False))
def test_a_replanned_micro_batch_is_cut_in_the_same_way(
    read: tuple[list[Log], list[EntryRange]], cutting: Cutting, estimate: int, parallelism: int, random: Random
) -> None:
    logs, found = read
    once = pieces(logs, replace(cutting, stable=True), found)
    brokers = [random.choice([1, 2]) for _ in range(8)]
    moved = [Log([(number, brokers[number], of) for number, _, of in log.layout]) for log in logs]
    guessed = [  # the size of a range within one segment is exact
        item if item.start.position[:2] == item.end.position[:2] else item._replace(length_bytes=estimate)
        for item in found
    ]

    again = pieces(moved, replace(cutting, stable=True, parallelism=parallelism), guessed)

    assert [(piece.entry, piece.start, piece.end, piece.records) for piece in again] == [
        (piece.entry, piece.start, piece.end, piece.records) for piece in once
    ]
