"""Changes of intervals of groups. ``tests/property/test_intervals.py`` checks that none of them loses a group."""

from kera.coordinator.cluster.intervals import (
    broker_ids_of,
    broker_of_group,
    emptied,
    index_of_group,
    intervals_of,
    moved,
    taken_over,
)
from kera.v1.common_pb2 import GroupInterval, StreamletAssignment


def assignment(*intervals: tuple[int, int], epoch: int = 1) -> StreamletAssignment:
    """Broker and first group of each interval."""
    return StreamletAssignment(
        broker_id=intervals[-1][0],
        broker_epoch=epoch,
        first_group_id=1,
        intervals=[
            GroupInterval(broker_id=broker_id, first_group_id=first, first_records=[first * 10])
            for broker_id, first in (intervals if len(intervals) > 1 else ())
        ],
    )


def places(of: StreamletAssignment) -> list[tuple[int, int]]:
    return [(one.broker_id, one.first_group_id) for one in of.intervals]


def test_all_groups_of_an_unmoved_streamlet_are_at_its_owner() -> None:
    new = assignment((1, 1))

    assert [(one.broker_id, one.first_group_id) for one in intervals_of(new)] == [(1, 1)]
    assert [broker_of_group(new, group) for group in (0, 1, 1000)] == [1, 1, 1]
    assert broker_ids_of(new) == {1}


def test_groups_are_found_in_their_interval_and_the_oldest_in_the_first() -> None:
    three = assignment((1, 3), (2, 57), (3, 90))

    assert [broker_of_group(three, group) for group in (0, 1, 3, 56, 57, 89, 90, 1000)] == [1, 1, 1, 1, 2, 2, 3, 3]
    assert [index_of_group(three, group) for group in (0, 57, 90)] == [0, 1, 2]
    assert broker_ids_of(three) == {1, 2, 3}


def test_a_move_begins_an_interval_with_its_first_records() -> None:
    before = assignment((1, 1))

    after = moved(before, 2, 9, next_group_id=57, first_records=[100, 200])

    assert (after.broker_id, after.broker_epoch, after.first_group_id) == (2, 9, 57)
    assert places(after) == [(1, 1), (2, 57)]
    assert [list(one.first_records) for one in after.intervals] == [[], [100, 200]]
    assert places(before) == []  # the old assignment is unchanged


def test_an_owner_that_wrote_nothing_leaves_no_interval() -> None:
    assert places(moved(assignment((1, 1), (2, 57)), 3, 9, next_group_id=57, first_records=[])) == [(1, 1), (3, 57)]
    assert places(moved(assignment((1, 1), (2, 57)), 1, 9, next_group_id=57, first_records=[])) == []
    assert places(moved(assignment((1, 1)), 2, 9, next_group_id=1, first_records=[])) == []


def test_intervals_of_a_lost_broker_go_to_its_successor_and_join() -> None:
    lost = assignment((1, 1), (2, 57), (1, 90))

    assert places(taken_over(lost, 1, 3, 9, next_group_id=99)) == [(3, 1), (2, 57), (3, 90)]
    assert places(taken_over(lost, 1, 2, 9, next_group_id=99)) == []
    owned = taken_over(assignment((1, 1), (2, 57)), 1, 2, 9, next_group_id=99)
    assert (places(owned), owned.broker_id, owned.broker_epoch, owned.first_group_id) == ([], 2, 9, 99)


def test_an_emptied_interval_is_removed() -> None:
    four = assignment((1, 1), (2, 57), (1, 90), (3, 100))

    assert places(emptied(four, 1, 1, 57)) == [(2, 57), (1, 90), (3, 100)]
    assert places(emptied(four, 2, 57, 90)) == [(1, 1), (3, 100)]
    assert places(emptied(assignment((1, 1), (2, 57)), 1, 1, 57)) == []
    for nothing in ((3, 100, 1 << 64), (2, 58, 90), (1, 57, 90)):  # the owner's; a missing one; another broker's
        assert emptied(four, *nothing) == four


def test_an_earlier_report_does_not_empty_an_interval_that_has_been_joined_since() -> None:
    joined = emptied(assignment((1, 1), (2, 57), (1, 90), (3, 100)), 2, 57, 90)

    assert places(joined) == [(1, 1), (3, 100)]
    assert emptied(joined, 1, 1, 57) == joined
    assert places(emptied(joined, 1, 1, 100)) == []
