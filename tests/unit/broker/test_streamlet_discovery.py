"""Discovery of groups: the operations of thesis tables 6.1 and 6.2 on one streamlet."""

import pytest

from kera.broker.log.read_plan import group_entry
from kera.broker.log.streamlet import Streamlet
from kera.core.errors import DataLost, UnknownGroup
from kera.core.ids import Position
from tests.unit.broker.support import Engine, Log


@pytest.fixture
def streamlet(engine: Engine) -> Streamlet:
    """Groups 10 to 14 of two entries, one segment each."""
    log = Log(engine, entries=2, group_segments=1, first_group_id=10)
    for producer in (1, 2, 1, 1, 2):
        log.append(producer, size=4096)
    return log.streamlet


def given(streamlet: Streamlet, consumer_group: str, groups_max: int) -> list[int]:
    return [group_id for group_id, _ in streamlet.next_groups(consumer_group, groups_max)]


def test_each_group_is_given_to_an_consumer_group_once_in_order(streamlet: Streamlet) -> None:
    assert [given(streamlet, "a", 2) for _ in range(4)] == [[10, 11], [12, 13], [14], []]


def test_consumer_groups_do_not_take_groups_from_each_other(streamlet: Streamlet) -> None:
    assert given(streamlet, "a", 3) == [10, 11, 12]
    assert given(streamlet, "b", 9) == [10, 11, 12, 13, 14]
    assert given(streamlet, "a", 9) == [13, 14]


def test_a_group_that_is_opened_later_is_given_then(engine: Engine) -> None:
    log = Log(engine, group_segments=1)
    log.append(size=4096)
    assert given(log.streamlet, "a", 9) == [1]
    assert given(log.streamlet, "a", 9) == []
    log.append(size=4096)

    assert given(log.streamlet, "a", 9) == [2]


def test_groups_say_whose_entry_they_are_of(streamlet: Streamlet) -> None:
    groups = streamlet.next_groups("a", 9)

    assert [(entry.index, streamlet.is_active(group_id, entry)) for group_id, entry in groups] == [
        (1, False),
        (0, False),
        (1, False),
        (1, True),
        (0, True),
    ]


def test_the_groups_that_are_there_are_an_interval(streamlet: Streamlet, engine: Engine) -> None:
    assert streamlet.available_groups() == (10, 14)
    assert Log(engine).streamlet.available_groups() == (0, 0)


def test_a_group_is_found_by_its_id(streamlet: Streamlet) -> None:
    assert [group_entry(streamlet, group_id).index for group_id in (10, 11, 12, 13, 14)] == [1, 0, 1, 1, 0]


def test_a_group_that_was_never_there_is_unknown(streamlet: Streamlet) -> None:
    with pytest.raises(UnknownGroup) as raised:
        group_entry(streamlet, 15)

    assert raised.value.attributes == {"streamlet_id": 0, "group_id": 15}


def test_a_group_of_an_earlier_launch_is_lost(streamlet: Streamlet) -> None:
    with pytest.raises(DataLost) as raised:
        group_entry(streamlet, 9)

    assert raised.value.attributes == {"streamlet_id": 0, "lost_from": [9, 1, 0], "available_from": [10, 1, 0]}


def removed(streamlet: Streamlet, entry: int, start: Position) -> None:
    """Let an entry start there."""
    lane = streamlet.entries[entry]
    streamlet._memory.close_all()  # type: ignore[attr-defined]
    lane.start, lane.start_record = start, 1
    streamlet._memory.collect(lane)  # type: ignore[attr-defined]


def test_a_group_that_was_removed_is_lost(streamlet: Streamlet, engine: Engine) -> None:
    removed(streamlet, 1, Position(12, 1, 0))
    engine.run()
    with pytest.raises(DataLost) as raised:
        group_entry(streamlet, 10)

    assert streamlet.available_groups() == (11, 14)
    assert raised.value.attributes["available_from"] == [11, 1, 0]


def test_a_group_that_was_removed_is_lost_also_if_older_ones_of_another_entry_are_there(
    streamlet: Streamlet, engine: Engine
) -> None:
    removed(streamlet, 0, Position(14, 1, 0))
    engine.run()
    assert streamlet.available_groups() == (10, 14)

    with pytest.raises(DataLost):
        group_entry(streamlet, 11)


def test_a_dropped_streamlet_has_no_groups(streamlet: Streamlet) -> None:
    streamlet.drop()

    assert streamlet.available_groups() == (0, 0)
    assert given(streamlet, "a", 9) == []
