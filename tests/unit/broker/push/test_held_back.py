"""Readers of a group are told of chunks in rounds, for as long as a latency constraint leaves time."""

from typing import Any

import pytest

from kera.broker.latency.holding import Hold, Holds
from kera.broker.serving.push import Push
from tests.unit.broker.push_support import PushNode, Reader, lane
from tests.unit.broker.support import BROKER_ID, CHUNK_BYTES, STREAM_ID, Engine, stream_info

WAIT_S = 0.1


class Timer:
    """Stands in for the event loop's."""

    def __init__(self) -> None:
        self.in_s: list[float] = []
        self.call: Any = None

    def listen(self, call: Any) -> None:
        self.call = call

    def set_in(self, seconds: float) -> None:
        self.in_s.append(seconds)


class HeldNode(PushNode):
    """One stream has a constraint."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, stream_info(owners=(BROKER_ID, BROKER_ID), entries=2), stream_info(STREAM_ID + 1))
        self.timer = Timer()
        self.holds = Holds(self.loop.time, lambda: 5 + round(self.loop.time() * 1e6))  # chunks are created at 5
        self.push = Push(
            engine.streams, engine.arena, engine.memory, self.totals, self.loop, holds=self.holds,
            hold_timer=self.timer,  # type: ignore[arg-type]
        )  # fmt: skip
        self.allow(WAIT_S)

    def allow(self, wait_s: float, way_s: float = 10.0) -> None:
        self.holds.set(STREAM_ID, Hold(round(wait_s * 1e6), round(way_s * 1e6)))

    def wait(self, seconds: float) -> None:
        self.loop.advance(seconds)
        self.timer.call()
        self.run()


@pytest.fixture
def node(engine: Engine) -> HeldNode:
    return HeldNode(engine)


@pytest.fixture
def reader(node: HeldNode) -> Reader:
    """It has read a chunk of each of two lanes."""
    made = Reader(node)
    node.append()
    node.append(streamlet_id=1)
    made.subscribe(lane(1), lane(2, streamlet=1))
    node.run()
    made.messages.clear()
    made.runs.clear()
    made.sequences.clear()
    return made


def test_what_is_appended_meanwhile_is_told_in_one_message(node: HeldNode, reader: Reader) -> None:
    node.append()
    node.run()
    node.loop.advance(WAIT_S / 2)
    node.append(2)
    node.append(streamlet_id=1)
    node.run()
    assert reader.messages == []
    assert node.timer.in_s[0] == pytest.approx(WAIT_S)
    node.wait(WAIT_S / 2)
    assert [run.length_bytes for run in reader.runs] == [3 * CHUNK_BYTES]
    assert node.timer.in_s[-1] == pytest.approx(WAIT_S / 2), "of the other lane"
    node.wait(WAIT_S / 2)
    assert reader.sequences == {1: [1, 2, 3], 2: [1]}
    assert len(reader.messages) == 2


def test_what_is_almost_due_goes_along(node: HeldNode, reader: Reader) -> None:
    node.append()
    node.loop.advance(WAIT_S / 10)
    node.append(streamlet_id=1)
    node.run()
    node.wait(WAIT_S * 9 / 10)
    assert reader.sequences == {1: [1], 2: [1]}
    assert len(reader.messages) == 1


def test_what_has_been_long_on_its_way_is_told_at_once(node: HeldNode, reader: Reader) -> None:
    node.allow(WAIT_S, way_s=0.25)
    node.loop.advance(0.25)
    node.append()
    node.run()
    assert reader.sequences == {1: [1]}


def test_a_segment_that_is_full_does_not_wait(node: HeldNode, reader: Reader) -> None:
    node.append(4)  # three more fill one
    node.run()
    assert reader.sequences == {1: [1, 2, 3, 4]}


def test_what_was_there_already_is_not_held(node: HeldNode) -> None:
    node.append(3)
    late = Reader(node)
    late.subscribe(lane(1))
    node.run()
    assert late.sequences == {1: [0, 1, 2]}


def test_who_is_in_no_group_does_not_wait(node: HeldNode) -> None:
    alone = Reader(node)
    alone.subscribe(lane(1))
    alone.connection.consumer_group = ""
    node.append()
    node.run()
    node.append()
    node.run()
    assert alone.sequences == {1: [0, 1]}


def test_without_a_constraint_any_more_nothing_waits(node: HeldNode, reader: Reader) -> None:
    node.append()
    node.run()
    assert reader.messages == []
    node.holds.of.clear()
    node.append(streamlet_id=1)
    node.run()
    assert reader.sequences == {2: [1]}
    node.timer.call()
    node.run()
    assert reader.sequences == {1: [1], 2: [1]}


def test_who_has_gone_is_not_told(node: HeldNode, reader: Reader) -> None:
    node.append()
    reader.cancel(1)
    node.run()
    node.wait(WAIT_S)
    assert reader.sequences == {}
    assert 1 in reader.ends
