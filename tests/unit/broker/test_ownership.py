"""Ownership: which groups of a streamlet are at which broker."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kera.broker.log.intervals import (
    NO_END,
    Interval,
    held_streamlets,
    holding,
    interval_after,
    interval_before,
    interval_of,
    records_elsewhere,
)
from kera.core.base.ids import Position
from kera.v1 import common_pb2
from tests.unit.broker.support import stream_info


def assignment(owner: int, *intervals: tuple[int, int, list[int]]) -> common_pb2.StreamletAssignment:
    return common_pb2.StreamletAssignment(
        broker_id=owner,
        broker_epoch=7,
        intervals=[
            common_pb2.GroupInterval(first_group_id=first, broker_id=broker, first_records=records)
            for first, broker, records in intervals
        ],
    )


THREE = assignment(1, (1, 1, []), (8, 2, [100, 0]), (13, 1, [150, 20]))


def test_without_intervals_the_owner_has_all_groups() -> None:
    held = holding(assignment(1), 1)

    assert (held.intervals, held.owned, held.broker_epoch) == ((Interval(0),), True, 7)
    assert not held.inherits
    assert holding(assignment(1), 2)[:2] == ((), False)


def test_an_interval_ends_where_the_next_one_begins_and_the_last_is_open() -> None:
    first, last = holding(THREE, 1).intervals

    assert (first.first_group_id, first.end_group_id, first.leads, first.closed) == (1, 8, True, True)
    assert (first.first_record(1), first.end_record(0), first.end_record(1)) == (0, 100, 0)
    assert (first.following, last.start) == (Position(8, 1, 0), Position(13, 1, 0))
    assert (last.end_group_id, last.leads, last.closed, last.inherits) == (NO_END, False, False, True)
    assert (last.first_record(0), last.first_record(1)) == (150, 20)


def test_a_broker_with_only_older_intervals_does_not_own_the_streamlet() -> None:
    held = holding(THREE, 2)

    assert [interval[:2] for interval in held.intervals] == [(8, 13)]
    assert not held.owned
    assert not held.inherits
    assert not held.intervals[0].leads


def test_an_assigned_broker_without_the_last_interval_does_not_own_the_streamlet() -> None:
    """A map that contradicts itself does not allow writing."""
    assert not holding(assignment(1, (1, 1, []), (5, 2, [])), 1).owned


def test_the_leading_interval_has_the_oldest_groups_wherever_it_begins() -> None:
    held = holding(assignment(1, (5, 1, [3])), 1)

    assert interval_of(held.intervals, 0) == interval_of(held.intervals, 2) == held.intervals[0]
    assert held.inherits
    assert interval_of(holding(THREE, 2).intervals, 0) is None


def test_a_broker_holds_streamlets_of_which_it_has_any_interval() -> None:
    info = stream_info(9, owners=(1, 2, 3))
    info.assignments[2].CopyFrom(THREE)
    info.assignments[2].streamlet_id = 2

    assert held_streamlets([info], 2) == {(9, 1), (9, 2)}
    assert held_streamlets([info], 1) == {(9, 0), (9, 2)}


@st.composite
def maps(draw: st.DrawFn) -> common_pb2.StreamletAssignment:
    """A streamlet with 2 entries that went from broker to broker."""
    brokers = draw(st.lists(st.integers(1, 3), min_size=1, max_size=8))
    first, records = draw(st.integers(1, 4)), [0, 0]
    rows = []
    for broker in brokers:
        rows.append((first, broker, list(records)))
        groups = draw(st.integers(0, 3))
        first += groups
        records = [record + draw(st.integers(0, 9)) for record in records] if groups else records
    return assignment(brokers[-1], *rows)


@given(maps(), st.integers(0, 30))
def test_every_group_is_at_exactly_one_broker(made: common_pb2.StreamletAssignment, group_id: int) -> None:
    """The plain rule: a group is in the last interval that begins at or before it, or else in the first one."""
    rows = list(made.intervals)
    beginning = [number for number, row in enumerate(rows) if row.first_group_id <= group_id]
    expected = beginning[-1] if beginning and group_id else 0
    found = {broker: interval_of(holding(made, broker).intervals, group_id) for broker in (1, 2, 3)}
    having = [broker for broker, interval in found.items() if interval is not None]

    assert having == [rows[expected].broker_id]
    interval = found[having[0]]
    assert interval is not None
    assert (interval.first_group_id, list(interval.first_records)) == (
        rows[expected].first_group_id,
        list(rows[expected].first_records),
    )


@given(maps())
def test_exactly_one_broker_owns_a_streamlet(made: common_pb2.StreamletAssignment) -> None:
    owners = [broker for broker in (1, 2, 3) if holding(made, broker).owned]

    assert owners == [made.broker_id]
    assert not holding(made, owners[0]).intervals[-1].closed


@given(maps(), st.integers(1, 3), st.integers(0, 1))
def test_records_elsewhere_are_those_of_the_intervals_between(
    made: common_pb2.StreamletAssignment, broker: int, entry: int
) -> None:
    rows = list(made.intervals)
    intervals = holding(made, broker).intervals
    mine = [number for number, row in enumerate(rows) if row.broker_id == broker]
    expected = (
        sum(
            rows[number + 1].first_records[entry] - rows[number].first_records[entry]
            for number in range(mine[0], mine[-1])
            if rows[number].broker_id != broker
        )
        if mine
        else 0
    )

    assert records_elsewhere(intervals, entry, 0, NO_END) == expected


def test_records_elsewhere_are_counted_only_between_start_and_end() -> None:
    """An entry may end in an interval where it has no records: then its records end with the interval before."""
    here, later = Interval(1, 2, end_records=(10,)), Interval(3, first_records=(30,), leads=False)
    assert [records_elsewhere((here, later), 0, 5, end) for end in (10, 15, 30, 40)] == [0, 5, 20, 20]
    assert records_elsewhere((here, later), 0, 12, 14) == 2


@given(maps(), st.integers(1, 3), st.integers(0, 30))
def test_neighbours_of_a_group_are_on_its_two_sides(
    made: common_pb2.StreamletAssignment, broker: int, group_id: int
) -> None:
    intervals = holding(made, broker).intervals
    before, after = interval_before(intervals, group_id), interval_after(intervals, group_id)

    assert before is None or before.end_group_id <= group_id
    assert after is None or after.first_group_id > group_id
    assert all(one.end_group_id <= other.first_group_id for one, other in pairwise(intervals))
