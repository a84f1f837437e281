"""Held-back replication: chunks wait for others as long as a latency constraint leaves time, and no longer."""

import pytest

from kera.broker.latency.held_back import HeldBack
from kera.broker.latency.holding import HELD_BYTES_MAX, LIMIT_S, Hold, Holds
from kera.broker.log.segment import Segment
from kera.broker.ownership.stream import Stream
from kera.broker.replication.virtual_log import Send, VirtualLog
from kera.broker.replication.virtual_segment import Batch
from kera.core.latency.limits import HELD_REQUESTS_MAX, HELD_US_MAX
from kera.v1 import common_pb2
from tests.unit.broker.replication_support import Replicated
from tests.unit.broker.support import STREAM_ID

WAIT_S = 0.1
OTHER_ID = STREAM_ID + 1


class Clock:
    """The clock of the held-back chunks."""

    def __init__(self, world: Replicated) -> None:
        self.now_s = 50.0
        self.holds = Holds(lambda: self.now_s, self.now_us)
        self.woken_in_s: list[float] = []
        """The delay of each requested wake-up."""
        self.held = HeldBack(world.replication.logs, self.holds, self.woken_in_s.append)
        world.replication.logs.plug_in(self.held)

    @property
    def next_in_s(self) -> float:
        """The delay until the held-back chunks are checked again."""
        assert self.woken_in_s[-1] == pytest.approx(self.held.next_in_s)
        return self.held.next_in_s

    def now_us(self) -> int:
        return 5 + round((self.now_s - 50) * 1e6)  # chunks are created at 5


@pytest.fixture
def clock(world: Replicated) -> Clock:
    return Clock(world)


def allow(clock: Clock, wait_s: float = WAIT_S, way_s: float = 10.0) -> None:
    clock.holds.set(STREAM_ID, Hold(round(wait_s * 1e6), round(way_s * 1e6)))


def sent(world: Replicated, stream_id: int = STREAM_ID) -> list[int]:
    """Lengths of the sent batches, once for each replica."""
    return [
        each.batch.length for each in world.wire.sent if isinstance(each, Send) and each.place.stream_id == stream_id
    ]


def test_chunks_are_sent_together_when_the_first_is_due(world: Replicated, clock: Clock) -> None:
    allow(clock)
    stream = world.open()
    outcomes = []
    for _ in range(3):
        outcomes.append(world.append(stream))
        clock.now_s += WAIT_S / 5
        world.finish()
    assert sent(world) == []
    assert clock.now_s + clock.next_in_s == pytest.approx(50.0 + WAIT_S)
    clock.now_s = 50.0 + WAIT_S
    world.finish()
    assert sent(world) == [3072] * 2
    assert [outcome.calls for outcome in outcomes] == [[None]] * 3
    world.append(stream)
    assert clock.now_s + clock.next_in_s == pytest.approx(clock.now_s + WAIT_S)


def test_the_append_hook_runs_once_the_log_has_work(world: Replicated) -> None:
    logs = world.replication.logs
    had_work: list[bool] = []

    class Noting(HeldBack):
        def on_appended(self, log: VirtualLog, batch: Batch, segment: Segment, start: int, end: int) -> None:
            had_work.append(logs.has_work)
            super().on_appended(log, batch, segment, start, end)

    logs.plug_in(Noting(logs, Holds(lambda: 0.0, lambda: 0), lambda _: None))
    world.append(world.open())
    assert had_work == [True]


def test_chunks_are_held_back_only_for_the_time_left_on_their_way(world: Replicated, clock: Clock) -> None:
    allow(clock, way_s=0.3)
    stream = world.open()
    clock.now_s += 0.25
    world.append(stream)
    assert clock.now_s + clock.next_in_s == pytest.approx(50.3)
    clock.now_s = 50.3
    world.finish()
    world.append(stream)
    assert len(sent(world)) == 4


def test_a_stream_without_a_constraint_does_not_wait_for_one_with_a_constraint(world: Replicated, clock: Clock) -> None:
    allow(clock)
    slow, quick = world.open(), world.open(OTHER_ID)
    waiting, done = world.append(slow), world.append(quick)
    world.finish()
    assert (waiting.calls, done.calls) == ([], [None])
    assert sent(world, OTHER_ID) == [1024] * 2


def test_chunks_of_durability_leader_are_not_held_back(world: Replicated, clock: Clock) -> None:
    """At level `leader` chunks may be lost as long as no backup has them."""
    allow(clock)
    world.append(world.open(durability=common_pb2.DURABILITY_LEADER))
    assert sent(world) == [1024] * 2


def test_chunks_are_not_held_back_once_the_constraint_is_removed(world: Replicated, clock: Clock) -> None:
    allow(clock)
    stream = world.open()
    waiting = world.append(stream)
    clock.holds.of.clear()
    world.finish()
    assert waiting.calls == [None]
    done = world.append(stream)
    world.finish()
    assert done.calls == [None]


def test_chunks_behind_a_batch_in_flight_still_wait_for_their_time(world: Replicated, clock: Clock) -> None:
    stream = world.open()
    world.append(stream)
    allow(clock)
    waiting = world.append(stream)
    world.finish()
    assert waiting.calls == []
    clock.now_s += WAIT_S
    world.finish()
    assert waiting.calls == [None]


def test_chunks_are_held_back_for_a_limited_time_and_until_a_virtual_segment_is_full(
    world: Replicated, clock: Clock
) -> None:
    allow(clock, wait_s=3_600, way_s=7_200)
    stream = world.open()
    world.append(stream)
    assert clock.now_s + clock.next_in_s == pytest.approx(clock.now_s + HELD_US_MAX / 1e6)
    world.append(stream, 2)
    assert sent(world) == []
    world.append(stream)  # fills the virtual segment
    assert sent(world) == [4096] * 2
    assert HELD_BYTES_MAX > 4096


def test_held_back_chunks_of_a_dropped_stream_are_not_sent(world: Replicated, clock: Clock) -> None:
    allow(clock)
    stream: Stream = world.open()
    world.append(stream)
    world.engine.streams.drop(STREAM_ID)
    clock.now_s += WAIT_S
    world.finish()
    assert sent(world) == []


def test_chunks_are_sent_when_their_writer_has_too_many_waiting_requests(world: Replicated, clock: Clock) -> None:
    """The writer might have no request left to send, and later chunks would wait at the writer."""
    allow(clock)
    stream = world.open()
    some = world.append(stream, requests=HELD_REQUESTS_MAX)
    world.finish()
    assert sent(world) == []
    one_more = world.append(stream, requests=1)
    world.finish()
    assert sent(world) == [2048] * 2
    assert [outcome.calls for outcome in (some, one_more)] == [[None]] * 2


def test_waiting_requests_of_several_writers_are_not_added_up(world: Replicated, clock: Clock) -> None:
    allow(clock)
    stream = world.open()
    for producer in (1, 2):
        world.append(stream, producer=producer, requests=HELD_REQUESTS_MAX)
        world.finish()
    assert sent(world) == []


def test_the_shortest_limit_of_a_writer_bounds_the_hold_for_a_while(world: Replicated, clock: Clock) -> None:
    stream = world.open()
    clock.holds.limit(STREAM_ID, 20_000)
    clock.holds.limit(STREAM_ID, 80_000)  # another writer, which allows more time
    allow(clock)
    allow(clock, wait_s=0)  # budgets come and go
    allow(clock)
    world.append(stream)
    assert sent(world) == []
    assert clock.next_in_s == pytest.approx(0.02)
    clock.holds.limit(STREAM_ID, 0)
    world.append(stream)
    world.finish()
    assert sent(world) == [2048] * 2
    clock.now_s += LIMIT_S
    allow(clock, way_s=100)
    world.append(stream)
    assert clock.next_in_s == pytest.approx(WAIT_S)
