"""Bounds of a streamlet's groups, also while chunks are appended.

The streamlets here have two segments of four chunks in a group.
"""

from collections.abc import Generator
from typing import TypeVar

from kera.broker.log.bounds import GroupBounds, group_bounds, list_groups, removed_before
from kera.broker.log.intervals import Holding, Interval
from kera.core.base.ids import Position
from tests.unit.broker.support import Engine, Log

T = TypeVar("T")
MANY = 100


def result_of(steps: Generator[None, None, T]) -> T:
    """The result of the steps, once they have ended."""
    try:
        while True:
            next(steps)
    except StopIteration as stopped:
        found: T = stopped.value
        return found


def told(groups: list[GroupBounds]) -> list[tuple[int, int, int, int, bool]]:
    return [(each.group_id, each.entry, each.first_record, each.next_record, each.closed) for each in groups]


def test_groups_of_all_entries_are_listed_in_the_order_of_their_ids(engine: Engine) -> None:
    log = Log(engine, entries=2)
    for producer, count in ((0, 9), (1, 3)):
        log.append_many(count, producer, record_count=1)

    groups, complete = result_of(list_groups(log.streamlet, 0, MANY))

    assert told(groups) == [(1, 0, 0, 8, True), (2, 0, 8, 9, False), (3, 1, 0, 3, False)]
    assert complete


def test_a_group_that_fills_during_the_scan_is_not_reported_as_closed(log: Log) -> None:
    log.append_many(7, record_count=1)
    steps = group_bounds(log.streamlet, log.entry, 1)
    next(steps)
    next(steps)  # after the second segment
    log.append_many(2, record_count=1)

    bounds = result_of(steps)

    assert bounds is not None
    assert told([bounds]) == [(1, 0, 0, 7, False)]
    again = result_of(group_bounds(log.streamlet, log.entry, 1))
    assert again is not None
    assert told([again]) == [(1, 0, 0, 8, True)]


def test_a_group_opened_during_a_listing_is_in_the_next_one(engine: Engine) -> None:
    """Its entry had no group left to list, and the other entry has a later group by then."""
    log = Log(engine, entries=2)
    log.append_many(8, 1, record_count=1)
    log.append_many(3, 0, record_count=1)
    steps = list_groups(log.streamlet, 1, MANY)
    next(steps)
    log.append_many(1, 1, record_count=1)
    log.append_many(6, 0, record_count=1)
    assert log.streamlet.next_group_id == 5

    groups, complete = result_of(steps)

    assert [each.group_id for each in groups] == [2]
    assert complete
    rest, _ = result_of(list_groups(log.streamlet, 2, MANY))
    assert told(rest) == [(3, 1, 8, 9, False), (4, 0, 8, 9, False)]


def test_a_group_removed_during_a_listing_does_not_end_the_list(log: Log) -> None:
    log.append_many(9, record_count=1)
    steps = list_groups(log.streamlet, 0, MANY)
    next(steps)
    log.entry.move_start(Position(2, 1, 0), 8)

    groups, complete = result_of(steps)

    assert (told(groups), complete) == ([(2, 0, 8, 9, False)], True)


def test_an_open_group_is_listed_although_all_its_records_were_removed(engine: Engine) -> None:
    """Otherwise a reader that had seen the group behind it would miss its later records."""
    log = Log(engine, entries=2)
    log.append_many(1, 0, record_count=1)
    log.append_many(2, 1, record_count=1)
    first = log.streamlet.entries[0]
    first.move_start(first.end, 1)

    groups, complete = result_of(list_groups(log.streamlet, 0, MANY))
    assert told(groups) == [(1, 0, 1, 1, False), (2, 1, 0, 2, False)]
    assert groups[0].start == groups[0].end == first.end
    assert complete

    log.append_many(1, 0, record_count=1)
    groups, _ = result_of(list_groups(log.streamlet, 0, MANY))
    assert told(groups) == [(1, 0, 1, 2, False), (2, 1, 0, 2, False)]


def test_the_removed_part_ends_where_another_brokers_interval_begins(log: Log) -> None:
    """The streamlet was elsewhere from group 3 on, and came back with group 7."""
    older = Interval(0, 3, (), (8,))
    newer = Interval(7, first_records=(14,), leads=False)
    log.streamlet.hold(Holding((older, newer), broker_epoch=1))
    assert removed_before(log.streamlet, log.entry) is None

    for start, place in (
        ((Position(2, 1, 0), 4), (Position(2, 1, 0), 4)),
        ((Position(7, 1, 0), 14), (Position(3, 1, 0), 8)),
        ((Position(7, 2, 0), 18), (Position(7, 2, 0), 18)),
    ):
        log.entry.start, log.entry.start_record = start
        assert removed_before(log.streamlet, log.entry) == place


def test_an_older_interval_without_records_has_no_removed_part(log: Log) -> None:
    older = Interval(0, 3, (), (0,))
    newer = Interval(7, first_records=(14,), leads=False)
    log.streamlet.hold(Holding((older, newer), broker_epoch=1))
    log.entry.start, log.entry.start_record = Position(7, 1, 0), 14
    assert removed_before(log.streamlet, log.entry) is None
