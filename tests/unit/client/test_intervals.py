"""Intervals: which broker has which positions of an entry, and bounds merged over brokers."""

import pytest

from kera.client.cluster.intervals import check_part, cuts, merged_bounds, start_of_group
from kera.client.types import Assignment, EntryBounds, Interval, StreamDescription
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import NotOwner
from kera.v1 import broker_pb2, common_pb2
from tests.unit.client.support import description, stream_info

WHOLE = Assignment(3, 9, 1)
MOVED = Assignment(2, 9, 1, (Interval(1, 1), Interval(5, 2, (100,)), Interval(8, 3, (150,)), Interval(9, 2, (170,))))


@pytest.mark.parametrize(
    ("group_id", "broker_id"), [(0, 1), (1, 1), (4, 1), (5, 2), (7, 2), (8, 3), (9, 2), (1 << 40, 2)]
)
def test_a_position_belongs_to_the_broker_of_its_group(group_id: int, broker_id: int) -> None:
    assert MOVED.broker_at(Position(group_id, 3, 640)) == broker_id
    assert WHOLE.broker_at(Position(group_id, 3, 640)) == 3


def test_a_position_before_the_oldest_interval_belongs_to_its_broker() -> None:
    assert Assignment(2, 9, 1, (Interval(5, 1), Interval(8, 2))).broker_at(Position(2, 1, 0)) == 1


def test_each_broker_of_a_streamlet_is_listed_once() -> None:
    assert MOVED.broker_ids == (1, 3, 2)
    assert WHOLE.broker_ids == (3,)


def test_a_description_finds_the_broker_of_a_position() -> None:
    info = stream_info()
    for first_group_id, broker_id in ((1, 1), (5, 3)):
        info.assignments[0].intervals.add(first_group_id=first_group_id, broker_id=broker_id, first_records=[7])
    stream = StreamDescription.from_message(info, [common_pb2.BrokerInfo(broker_id=number) for number in (1, 3)])
    assert stream.assignments[0].intervals == (Interval(1, 1, (7,)), Interval(5, 3, (7,)))
    found = [stream.broker_of(0, position) for position in (EARLIEST, Position(4, 1, 0), Position(5, 1, 0), None)]
    assert [broker.broker_id for broker in found if broker] == [1, 1, 3, 3]


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"stream_id": 7}, {"stream_id": 8}),
        ({"assignments_version": 1}, {"assignments_version": 2}),
        ({"assignments_version": 2, "config_version": 1}, {"assignments_version": 2, "config_version": 2}),
        ({"stream_id": 7, "assignments_version": 5}, {"stream_id": 8, "assignments_version": 1}),
    ],
)
def test_versions_decide_which_of_two_descriptions_is_older(older: dict[str, int], newer: dict[str, int]) -> None:
    def made(fields: dict[str, int]) -> StreamDescription:
        info = stream_info(stream_id=fields.get("stream_id", 7))
        info.assignments_version = fields.get("assignments_version", 0)
        info.config_version = fields.get("config_version", 0)
        return StreamDescription.from_message(info)

    assert made(older).is_older_than(made(newer))
    assert not made(newer).is_older_than(made(older))
    assert not made(older).is_older_than(made(older))


def test_the_bounds_of_a_streamlet_at_one_broker_are_that_brokers() -> None:
    bounds = EntryBounds(Position(1, 1, 0), Position(3, 1, 64), 0, 40, 4096)
    assert merged_bounds(WHOLE, 0, {3: bounds}) == bounds
    assert merged_bounds(description().assignments[0], 0, {3: bounds}) == bounds


def test_merged_bounds_reach_from_the_oldest_record_to_the_owners_end() -> None:
    nothing = EntryBounds(EARLIEST, EARLIEST, 0, 0, 0)
    one = EntryBounds(Position(2, 1, 0), Position(4, 1, 64), 60, 100, 400)
    three = EntryBounds(Position(8, 1, 0), Position(8, 2, 64), 150, 170, 200)
    two = EntryBounds(Position(5, 1, 0), Position(9, 1, 64), 100, 180, 600)
    assert merged_bounds(MOVED, 0, {1: one, 2: two, 3: three}) == EntryBounds(
        Position(2, 1, 0), Position(9, 1, 64), 60, 180, 1200
    )
    assert merged_bounds(MOVED, 0, {1: nothing, 2: two, 3: three}).start == Position(5, 1, 0)
    # The owner has no records yet: the end is where it will begin.
    assert merged_bounds(MOVED, 0, {1: one, 2: nothing, 3: three}) == EntryBounds(
        Position(2, 1, 0), Position(9, 1, 0), 60, 170, 600
    )
    # Or the owner has only records from before the streamlet moved away.
    earlier = EntryBounds(Position(5, 1, 0), Position(7, 1, 64), 100, 150, 300)
    assert merged_bounds(MOVED, 0, {1: one, 2: earlier, 3: three}).end == Position(9, 1, 0)
    # No broker has records any more.
    assert merged_bounds(MOVED, 0, {1: nothing, 2: nothing, 3: nothing}) == EntryBounds(
        Position(9, 1, 0), Position(9, 1, 0), 170, 170, 0
    )


def test_the_end_of_a_streamlet_from_a_broker_that_is_not_its_owner_is_refused() -> None:
    for info in (broker_pb2.StreamletInfo(), broker_pb2.StreamletInfo(owned=True)):
        check_part(MOVED, 2, info)  # an older broker does not say whether it owns the streamlet
    check_part(MOVED, 1, broker_pb2.StreamletInfo(owned=False))  # broker 1 is not asked as the owner
    with pytest.raises(NotOwner):
        check_part(MOVED, 2, broker_pb2.StreamletInfo(owned=False))


def test_the_start_of_a_streamlet_from_a_broker_that_does_not_lead_is_refused() -> None:
    """The oldest groups have a new broker that does not know of them yet: its answer would hide them."""
    whole = Assignment(2, 7, 1)
    check_part(whole, 2, broker_pb2.StreamletInfo(owned=True, leads=True))
    check_part(whole, 2, broker_pb2.StreamletInfo(owned=True))  # this answer does not say
    check_part(MOVED, 2, broker_pb2.StreamletInfo(owned=True, leads=False))  # broker 1 has the oldest groups
    for assignment, broker_id in ((whole, 2), (MOVED, 1)):
        with pytest.raises(NotOwner, match="yet to hear"):
            check_part(assignment, broker_id, broker_pb2.StreamletInfo(owned=True, leads=False))


def test_cuts_cover_all_intervals_before_a_position() -> None:
    here = Position(8, 1, 64)
    assert cuts(WHOLE, here) == {3: here}
    assert cuts(MOVED, here) == {1: start_of_group(5), 2: start_of_group(8), 3: here}
    assert list(cuts(MOVED, here))[-1] == 3
    end = Position(9, 2, 0)
    assert cuts(MOVED, end) == {1: start_of_group(5), 3: start_of_group(9), 2: end}
    assert cuts(MOVED, Position(4, 1, 0)) == {1: Position(4, 1, 0)}
    assert cuts(MOVED, EARLIEST) == {1: EARLIEST}
