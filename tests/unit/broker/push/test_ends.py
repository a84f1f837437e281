"""Ends of push lanes: a lane ends once, without the other lanes, with the reason and the position to go on from."""

from typing import Any

import pytest

from kera.broker.log.read_plan import ReadPlan, plan_read
from kera.broker.log.streamlet import Streamlet
from kera.broker.serving import push as push_module
from kera.core.base.ids import Position
from kera.v1 import push_pb2
from tests.unit.broker.moving_support import assign
from tests.unit.broker.push_support import PushNode, Reader, lane
from tests.unit.broker.support import BROKER_ID, CHUNK_BYTES, STREAM_ID, Engine, stream_info


@pytest.mark.parametrize("stop", [Position(1, 1, 2048), Position(1, 1, 4096), Position(1, 2, 0), Position(1, 2, 1024)])
def test_a_lane_ends_at_its_end_position(node: PushNode, reader: Reader, stop: Position) -> None:
    node.append(7)
    reader.subscribe(lane(end=stop))
    node.run()
    expected = (stop.segment_id - 1) * 4 + stop.offset // CHUNK_BYTES

    assert reader.sequences == {1: list(range(expected))}
    reason, code, following = reader.end()
    assert (reason, code) == ("REACHED", "")
    assert following >= stop
    node.append(1)
    node.run()
    assert len(reader.sequences[1]) == expected


def test_a_lane_that_starts_at_its_end_ends_at_once(node: PushNode, reader: Reader) -> None:
    node.append(2)
    here = Position(1, 1, 2048)
    reader.subscribe(lane(1, here, here), lane(2, Position(1, 1, 0), Position(1, 1, 0)))
    node.run()

    assert reader.runs == []
    assert reader.end(1) == ("REACHED", "", here)
    assert reader.end(2)[0] == "REACHED"


def test_the_number_of_an_ended_lane_can_be_reused(node: PushNode, reader: Reader) -> None:
    node.append(1)
    reader.subscribe(lane(end=Position(1, 1, 1024)))
    node.run()
    assert reader.ends.pop(1).reason == push_pb2.PushEnd.REACHED
    node.append(1)
    reader.subscribe(lane(start=Position(1, 1, 1024)))
    node.run()

    assert reader.sequences == {1: [0, 1]}
    assert node.totals.subscriptions == 1


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        (lane(stream_id=99), "unknown_stream"),
        (lane(streamlet=3), "streamlet_out_of_range"),
        (lane(streamlet=2), "not_owner"),
        (lane(entry=2), "invalid_cursor"),
        (lane(start=Position(1, 0, 0)), "invalid_cursor"),
        (lane(start=Position(1, 1, 64)), "invalid_cursor"),
        (lane(start=Position(1, 1, 0), end=Position(1, 1, 64)), "invalid_cursor"),
        (lane(start=Position(1, 1, 0), end=Position(1, 1, 3072)), "invalid_cursor"),
        (lane(start=Position(1, 1, 0), end=Position(9, 1, 0)), "invalid_cursor"),
    ],
)
def test_an_unreadable_lane_fails_alone(node: PushNode, reader: Reader, wanted: push_pb2.PushLane, code: str) -> None:
    node.append(2)
    reader.subscribe(lane(2), wanted, lane(3))
    node.run()

    assert reader.end()[:2] == ("FAILED", code)
    assert reader.ends[1].next == wanted.start
    assert reader.sequences == {2: [0, 1], 3: [0, 1]}
    assert list(reader.ends) == [1]
    assert node.totals.ends["failed"] == 1


def test_a_lane_that_meets_a_loss_fails_with_the_limits_of_the_loss(engine: Engine) -> None:
    info = stream_info()
    info.assignments[0].first_group_id = 100
    node = PushNode(engine, info)
    reader = Reader(node)
    node.append(1)
    reader.subscribe(lane(start=Position(4, 1, 0)))
    node.run()

    assert reader.end() == ("FAILED", "data_lost", Position(4, 1, 0))
    assert reader.ends[1].error.attributes["available_from"] == "[100, 1, 0]"


def test_a_defect_fails_its_own_lane_only(node: PushNode, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(streamlet: Streamlet, index: int, *rest: Any, **options: Any) -> ReadPlan:
        if index == 0:
            raise RuntimeError("a defect")
        return plan_read(streamlet, index, *rest, **options)

    monkeypatch.setattr(push_module, "plan_read", broken)
    node.append(2)
    node.append(1, producer=1)
    reader.subscribe(lane(1), lane(2, entry=1))
    node.run()

    assert reader.end()[:2] == ("FAILED", "internal")
    assert reader.sequences == {2: [0]}
    assert node.engine.arena.leased_slots == 1


def test_a_lane_of_a_dropped_stream_fails(node: PushNode, reader: Reader) -> None:
    node.append(1)
    reader.subscribe(lane())
    node.run()
    node.engine.streams.drop(STREAM_ID)
    node.run()

    assert reader.sequences == {1: [0]}
    assert reader.end() == ("FAILED", "unknown_stream", Position(1, 1, 1024))


def test_a_lane_of_a_moved_streamlet_ends_where_the_new_owner_begins(engine: Engine) -> None:
    info = stream_info()
    node = PushNode(engine, info)
    follows, stops, ends_there = Reader(node), Reader(node), Reader(node)
    node.append(3)
    follows.subscribe(lane())
    node.run()
    assert follows.ends == {}
    engine.streams.open(assign(info, 4, [(1, BROKER_ID, []), (2, 4, [3])]), BROKER_ID)
    node.run()
    stops.subscribe(lane(end=Position(2, 1, 1024)))
    ends_there.subscribe(lane(1, end=Position(2, 1, 0)), lane(2, end=Position(1, 1, 3072)), lane(3, Position(2, 1, 0)))
    node.run()

    assert follows.end() == stops.end() == ("MOVED", "", Position(2, 1, 0))
    assert ends_there.end(1) == ("REACHED", "", Position(2, 1, 0))
    assert ends_there.end(2) == ("REACHED", "", Position(1, 1, 3072))
    assert ends_there.end(3)[:2] == ("FAILED", "not_owner")
    assert follows.sequences == stops.sequences == {1: [0, 1, 2]}
    assert ends_there.sequences == {1: [0, 1, 2], 2: [0, 1, 2]}


def test_a_cancelled_lane_ends_at_once_and_gets_no_more_runs(node: PushNode, reader: Reader) -> None:
    node.append(1)
    reader.subscribe(lane(1), lane(2))
    node.run()
    node.append(1)
    reader.cancel(1, 7)
    assert reader.end() == ("CANCELLED", "", Position(1, 1, 1024))
    node.run()

    assert reader.sequences == {1: [0], 2: [0, 1]}
    assert list(reader.ends) == [1], "of a lane that is not there, nothing is said: its end may be on its way"
