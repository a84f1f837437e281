"""Discovery: which groups a streamlet has, and to which entries they belong."""

import pytest

from kera.broker.log.read_plan import group_entry
from kera.broker.log.streamlet import Streamlet
from kera.broker.serving.thesis_api import GivenGroups
from kera.core.base.ids import Position
from kera.core.base.turns import at_once
from kera.core.errors import DataLost, UnknownGroup
from tests.unit.broker.support import Engine, Log


@pytest.fixture
def streamlet(engine: Engine) -> Streamlet:
    """Groups 10 to 14 of two entries, one segment each."""
    log = Log(engine, entries=2, group_segments=1, first_group_id=10)
    for producer in (1, 2, 1, 1, 2):
        log.append(producer, size=4096)
    return log.streamlet


def test_the_available_groups_are_an_interval(streamlet: Streamlet, engine: Engine) -> None:
    assert streamlet.available_groups() == (10, 14)
    assert Log(engine).streamlet.available_groups() == (0, 0)


def test_the_entry_of_a_group_is_found_by_the_id_of_the_group(streamlet: Streamlet) -> None:
    assert [group_entry(streamlet, group_id).index for group_id in (10, 11, 12, 13, 14)] == [1, 0, 1, 1, 0]


def test_a_group_that_never_existed_is_unknown(streamlet: Streamlet) -> None:
    with pytest.raises(UnknownGroup) as raised:
        group_entry(streamlet, 15)

    assert raised.value.attributes == {"streamlet_id": 0, "group_id": 15}


def test_a_group_of_an_earlier_launch_is_lost(streamlet: Streamlet) -> None:
    with pytest.raises(DataLost) as raised:
        group_entry(streamlet, 9)

    assert raised.value.attributes == {"streamlet_id": 0, "lost_from": [9, 1, 0], "available_from": [10, 1, 0]}


def removed(streamlet: Streamlet, entry: int, start: Position) -> None:
    """Let an entry start at `start`."""
    lane = streamlet.entries[entry]
    streamlet._memory.segments.close_all()  # type: ignore[attr-defined]
    lane.start, lane.start_record = start, 1
    streamlet._memory.removals.collect(lane)  # type: ignore[attr-defined]


def test_a_removed_group_is_lost(streamlet: Streamlet, engine: Engine) -> None:
    removed(streamlet, 1, Position(12, 1, 0))
    engine.run()
    with pytest.raises(DataLost) as raised:
        group_entry(streamlet, 10)

    assert streamlet.available_groups() == (11, 14)
    assert raised.value.attributes["available_from"] == [11, 1, 0]


def test_a_removed_group_is_lost_also_if_another_entry_has_older_ones(streamlet: Streamlet, engine: Engine) -> None:
    removed(streamlet, 0, Position(14, 1, 0))
    engine.run()
    assert streamlet.available_groups() == (10, 14)

    with pytest.raises(DataLost):
        group_entry(streamlet, 11)


def test_a_dropped_streamlet_has_no_groups(streamlet: Streamlet) -> None:
    streamlet.drop()

    assert streamlet.available_groups() == (0, 0)
    assert at_once(GivenGroups().next(streamlet, "a", 9)) == []
