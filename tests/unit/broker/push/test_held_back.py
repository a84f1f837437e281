"""Held-back pushes: readers of a group get chunks in rounds, as long as a latency constraint leaves time."""

from typing import Any

import pytest

from kera.broker.latency.holding import Hold, Holds
from kera.broker.serving.push import Push
from tests.unit.broker.push_support import PushNode, Reader, lane
from tests.unit.broker.support import BROKER_ID, CHUNK_BYTES, STREAM_ID, Engine, stream_info

WAIT_S = 0.1


class Timer:
    """Stands in for the timer of the event loop."""

    def __init__(self) -> None:
        self.in_s: list[float] = []
        self.call: Any = None

    def listen(self, call: Any) -> None:
        self.call = call

    def set_in(self, seconds: float) -> None:
        self.in_s.append(seconds)


class HeldNode(PushNode):
    """A node where one stream has a latency constraint."""

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
    """A reader that has read a chunk of each of two lanes."""
    made = Reader(node)
    node.append()
    node.append(streamlet_id=1)
    made.subscribe(lane(1), lane(2, streamlet=1))
    node.run()
    made.messages.clear()
    made.runs.clear()
    made.sequences.clear()
    return made


def test_chunks_appended_during_the_wait_are_pushed_in_one_message(node: HeldNode, reader: Reader) -> None:
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


def test_a_lane_that_is_almost_due_is_pushed_with_a_due_one(node: HeldNode, reader: Reader) -> None:
    node.append()
    node.loop.advance(WAIT_S / 10)
    node.append(streamlet_id=1)
    node.run()
    node.wait(WAIT_S * 9 / 10)
    assert reader.sequences == {1: [1], 2: [1]}
    assert len(reader.messages) == 1


def test_chunks_that_are_late_already_are_pushed_at_once(node: HeldNode, reader: Reader) -> None:
    node.allow(WAIT_S, way_s=0.25)
    node.loop.advance(0.25)
    node.append()
    node.run()
    assert reader.sequences == {1: [1]}


def test_a_full_segment_is_pushed_at_once(node: HeldNode, reader: Reader) -> None:
    node.append(4)  # three more fill the segment
    node.run()
    assert reader.sequences == {1: [1, 2, 3, 4]}


def test_chunks_from_before_the_subscription_are_not_held_back(node: HeldNode) -> None:
    node.append(3)
    late = Reader(node)
    late.subscribe(lane(1))
    node.run()
    assert late.sequences == {1: [0, 1, 2]}


def test_a_reader_without_a_consumer_group_does_not_wait(node: HeldNode) -> None:
    alone = Reader(node)
    alone.subscribe(lane(1))
    alone.connection.consumer_group = ""
    node.append()
    node.run()
    node.append()
    node.run()
    assert alone.sequences == {1: [0, 1]}


def test_chunks_are_not_held_back_once_the_constraint_is_removed(node: HeldNode, reader: Reader) -> None:
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


def test_a_cancelled_lane_gets_no_held_back_chunks(node: HeldNode, reader: Reader) -> None:
    node.append()
    reader.cancel(1)
    node.run()
    node.wait(WAIT_S)
    assert reader.sequences == {}
    assert 1 in reader.ends
