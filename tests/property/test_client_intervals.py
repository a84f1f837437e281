"""Intervals of a streamlet: a reader that follows positions meets each group once, at its broker."""

from hypothesis import given
from hypothesis import strategies as st

from kera.client.cluster.intervals import cuts, merged_bounds, start_of_group
from kera.client.types import Assignment, EntryBounds, Interval
from kera.core.base.ids import Position

ASSIGNMENTS = st.builds(
    lambda firsts, brokers: Assignment(
        brokers[len(firsts) - 1],
        1,
        1,
        tuple(Interval(first, broker) for first, broker in zip(sorted(firsts), brokers, strict=False)),
    ),
    st.sets(st.integers(1, 30), min_size=1, max_size=6),
    st.lists(st.integers(1, 3), min_size=6, max_size=6),
)
POSITIONS = st.builds(Position, st.integers(1, 35), st.integers(1, 2), st.integers(0, 3))


def holder(assignment: Assignment, group_id: int) -> int:
    """The broker of a group by definition, one interval after the other."""
    found = assignment.intervals[0].broker_id
    for interval in assignment.intervals:
        if interval.first_group_id <= group_id:
            found = interval.broker_id
    return found


@given(ASSIGNMENTS, POSITIONS)
def test_a_position_belongs_to_the_last_interval_that_begins_before_it(
    assignment: Assignment, position: Position
) -> None:
    assert assignment.broker_at(position) == holder(assignment, position.group_id)
    assert assignment.broker_at(position) in assignment.broker_ids
    assert assignment.broker_ids[-1] == assignment.broker_id


@given(ASSIGNMENTS, POSITIONS)
def test_cuts_cover_exactly_the_groups_before_a_position(assignment: Assignment, position: Position) -> None:
    found = cuts(assignment, position)
    assert found[assignment.broker_at(position)] == position
    for group_id in range(assignment.intervals[0].first_group_id, 40):
        broker_id = holder(assignment, group_id)
        start = start_of_group(group_id)
        cut_away = broker_id in found and start < found[broker_id]
        assert cut_away == (start < position)


@given(ASSIGNMENTS, st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), unique_by=lambda each: each[0]))
def test_merged_bounds_equal_those_of_the_whole_log(assignment: Assignment, groups: list[tuple[int, int]]) -> None:
    """Groups with a number of records of one byte each, at the brokers of the intervals."""
    groups = sorted(each for each in groups if each[0] >= assignment.intervals[0].first_group_id)
    ordinals = {group_id: sum(count for other, count in groups if other < group_id) for group_id in range(50)}
    intervals = tuple(each._replace(first_records=(ordinals[each.first_group_id],)) for each in assignment.intervals)
    assignment = Assignment(assignment.broker_id, 1, 1, intervals)
    parts = {}
    for broker_id in assignment.broker_ids:
        here = [(group_id, count) for group_id, count in groups if holder(assignment, group_id) == broker_id]
        parts[broker_id] = EntryBounds(
            start=start_of_group(here[0][0]) if here else Position(0, 0, 0),
            end=Position(here[-1][0], 1, here[-1][1]) if here else Position(0, 0, 0),
            first_record=ordinals[here[0][0]] if here else 0,
            next_record=ordinals[here[-1][0]] + here[-1][1] if here else 0,
            length_bytes=sum(count for _, count in here),
        )
    found = merged_bounds(assignment, 0, parts)
    total = sum(count for _, count in groups)
    assert (found.length_bytes, found.next_record) == (total, total)
    assert found.first_record == (0 if groups else total)
    assert assignment.broker_at(found.end) == assignment.broker_id
    if groups:
        assert found.start == start_of_group(groups[0][0])
        last = Position(groups[-1][0], 1, groups[-1][1])
        if len(parts) > 1:  # otherwise the broker's own bounds count
            last = max(last, start_of_group(intervals[-1].first_group_id))
        assert found.end == last
