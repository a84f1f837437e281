"""Advice never makes a chunk wait beyond its deadline, for any load, and with changing or lost advice.

The model uses the advice that a producer got, and its time. Each piece of advice counts from its answer until the next
one, or until it expires, and sends a chunk when its oldest record has waited that long. So a chunk has to be sent at
the first moment at which that is true, unless it went before. Without advice it goes when no request is in flight.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from kera.client.producing.latency.pace import Lateness
from kera.client.producing.producer import Producer
from kera.client.producing.sending.fill_time import TIMER_S, Due
from kera.core.base.alarm import Alarm
from kera.core.base.clock import FakeClock
from kera.core.latency.report import INTERVAL_S
from kera.v1 import broker_pb2, latency_pb2
from tests.examples import examples
from tests.unit.client.virtual_support import Ways, virtually

STREAM_ID = 7
STREAMLETS = 3
ROUNDING_S = 1e-5


class Step(NamedTuple):
    """The next event."""

    pause_s: float
    records: int
    """To each of the streamlets, in turn."""
    linger_ms: int
    """The broker advises this from now on."""
    lost: bool
    """The advice is lost."""
    jump_s: float
    """The writer's clock is set."""


class Advice(NamedTuple):
    """Advice as the producer has it."""

    from_s: float
    until_s: float
    wait_s: float


STEPS = st.builds(
    Step,
    pause_s=st.one_of(st.floats(0, 0.05), st.floats(0, 2.5)),
    records=st.integers(0, 6),
    linger_ms=st.one_of(st.just(0), st.integers(1, 1500)),
    lost=st.booleans(),
    jump_s=st.sampled_from([0.0, 0.0, 5.0, -5.0]),
)


def deadline_s(opened_s: float, advice: Iterable[Advice]) -> float:
    """The latest time to send a chunk opened at `opened_s`; infinity: without a deadline by advice."""
    for each in advice:
        at_s = max(each.from_s, opened_s + each.wait_s)
        if each.wait_s and at_s < each.until_s:
            return at_s
    return math.inf


class Broker:
    """A broker's advice, and the chunks that it gets."""

    def __init__(self, ways: Ways, valid_ms: int) -> None:
        self.advice: list[Advice] = []
        self.linger_ms = 0
        self.lost = False
        self._ways, self._valid_ms = ways, valid_ms
        ways.cluster.loopback.amend = self._amend

    def _amend(self, message: broker_pb2.MultiWriteChunksResponse) -> None:
        if not message.broker_time_us:
            return
        now_s = asyncio.get_running_loop().time()
        del message.advice[:]
        if self.lost:
            return  # the previous advice counts
        if self.advice:
            self.advice[-1] = self.advice[-1]._replace(until_s=min(now_s, self.advice[-1].until_s))
        message.advice.append(
            latency_pb2.WriterAdvice(stream_id=STREAM_ID, linger_us=self.linger_ms * 1000, valid_ms=self._valid_ms)
        )
        self.advice.append(Advice(now_s, now_s + self._valid_ms / 1000, self.linger_ms / 1000))

    def sent_s(self) -> list[list[float]]:
        """The time at which each record was sent, by streamlet, in order."""
        found: list[list[float]] = [[] for _ in range(STREAMLETS)]
        for at_s, chunks in zip(self._ways.sent_s, self._ways.cluster.loopback.writes, strict=True):
            for chunk in chunks:
                found[chunk.streamlet_id] += [at_s] * chunk.record_count
        return found

    def firsts(self) -> list[list[bool]]:
        """Whether each record is the first of its chunk, likewise."""
        found: list[list[bool]] = [[] for _ in range(STREAMLETS)]
        for chunks in self._ways.cluster.loopback.writes:
            for chunk in chunks:
                found[chunk.streamlet_id] += [True] + [False] * (chunk.record_count - 1)
        return found


@settings(max_examples=examples(300, 30), deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=25), st.floats(0.001, 0.2), st.sampled_from([1_500, 5_000]))
def test_no_chunk_is_sent_after_its_deadline(steps: list[Step], answers_after_s: float, valid_ms: int) -> None:
    clock = FakeClock()
    accepted_s: list[list[float]] = [[] for _ in range(STREAMLETS)]

    async def main(ways: Ways, producer: Producer) -> tuple[Broker, float]:
        loop, broker, number = asyncio.get_running_loop(), Broker(ways, valid_ms), 0
        accepted_s[0] += [-math.inf] * 2  # the records of `virtually`
        for step in steps:
            clock.step(step.jump_s)
            broker.linger_ms, broker.lost = step.linger_ms, step.lost
            for _ in range(step.records):
                producer.send("s", b"x", streamlet=number % STREAMLETS)
                accepted_s[number % STREAMLETS].append(loop.time())
                number += 1
            await asyncio.sleep(step.pause_s)  # sleep: virtual time
        await asyncio.sleep(2 * INTERVAL_S)  # sleep: virtual time, until all chunks are sent
        assert producer.loss() is None
        return broker, producer.late_ms

    options: Any = {"requests_in_flight_max": 1_000}
    _, (broker, late_ms) = virtually(STREAMLETS, answers_after_s, main, clock=clock, **options)
    for accepted, sent, firsts in zip(accepted_s, broker.sent_s(), broker.firsts(), strict=True):
        assert len(accepted) == len(sent)
        for opened_s, at_s, is_first in zip(accepted, sent, firsts, strict=True):
            if is_first and opened_s > 0:
                assert at_s <= deadline_s(opened_s, broker.advice) + ROUNDING_S
    assert late_ms <= ROUNDING_S * 1000


def test_a_late_timer_is_counted_as_lateness() -> None:
    """Shows that the other test can fail: each chunk goes 30 ms after its deadline, and counts as that late."""
    delay_s = 0.03

    async def main(ways: Ways, producer: Producer) -> tuple[int, float]:
        loop: Any = asyncio.get_running_loop()
        broker, call_at = Broker(ways, 5_000), loop.call_at

        def late(when: float, callback: Any, *arguments: Any, **options: Any) -> Any:
            is_alarm = isinstance(getattr(callback, "__self__", None), Alarm)
            return call_at(when + delay_s * is_alarm, callback, *arguments, **options)

        loop.call_at = late
        broker.linger_ms = 100
        await asyncio.sleep(INTERVAL_S)  # sleep: virtual time
        await producer.send("s", b"x")
        before = producer.late_ms
        for _ in range(4):
            await producer.send("s", b"x")
        return len(ways.sent_s), producer.late_ms - before

    assert abs(virtually(1, 0.002, main)[1][1] - 4 * delay_s * 1000) < 1


class TestLateness:
    def test_a_due_chunk_left_without_an_obstacle_is_late(self) -> None:
        lateness = Lateness()
        lateness.begins()
        assert lateness.looked(Due(closed=True, next_s=None), 1.0) == 0.0
        lateness.begins()
        assert round(lateness.looked(Due(closed=True, next_s=None, since_s=1.7), 2.0), 6) == 0.3

    def test_a_chunk_that_had_to_wait_for_room_or_a_connection_is_not_late(self) -> None:
        lateness = Lateness()
        lateness.begins()
        lateness.looked(Due(closed=True, next_s=None, since_s=0.5), 1.0)
        lateness.sent()  # and there is no room for another request
        lateness.begins()
        assert lateness.looked(Due(closed=True, next_s=None, since_s=1.2), 2.0) == 0.0
        lateness.begins()  # and there is no look at chunks, for lack of a connection
        lateness.begins()
        assert lateness.looked(Due(closed=True, next_s=None, since_s=2.2), 3.0) == 0.0

    def test_a_chunk_due_by_new_advice_is_late_only_since_the_advice(self) -> None:
        lateness = Lateness()
        lateness.begins()
        lateness.looked(Due(closed=False, next_s=5.0), 1.0)
        lateness.told(2.0)
        lateness.begins()
        assert lateness.looked(Due(closed=True, next_s=None, since_s=1.1), 2.0 + TIMER_S) <= TIMER_S * 1.01
