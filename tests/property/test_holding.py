"""A broker never holds an item back beyond its deadline, against a model that looks at all items each time."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kera.broker.latency.holding import SLACK, TIMER_S, Held, Hold, Holds
from kera.core.latency.limits import HELD_US_MAX

US = st.integers(0, 2_000_000)
NOW_US = 1_000_000_000_000
HUGE = st.integers(-(1 << 62), 1 << 62)


@given(US, US, US, st.integers(-3_000_000, 3_000_000))
def test_a_wait_is_limited_by_its_own_part_and_by_the_rest_of_the_way(
    wait_us: int, before_us: int, age_us: int, ahead_us: int
) -> None:
    """Holds for any clock of the writer, if its offset is known."""
    hold = Hold(wait_us, before_us + wait_us, ahead_us)
    waits_us = hold.wait_s(NOW_US - age_us + ahead_us, NOW_US) * 1e6
    assert 0 <= waits_us <= min(wait_us, HELD_US_MAX) + 0.1
    if age_us >= before_us + wait_us:
        assert waits_us == 0
    else:
        assert age_us + waits_us <= before_us + wait_us + 0.1
    if age_us <= before_us and wait_us <= HELD_US_MAX:
        assert waits_us >= wait_us - 0.1  # a chunk that arrives in time may wait for all of its part


@given(HUGE, HUGE, st.integers(0, 3_600_000_000), st.integers(0, 3_600_000_000))
def test_odd_clocks_do_not_lengthen_a_wait(created_us: int, now_us: int, wait_us: int, way_us: int) -> None:
    assert 0 <= Hold(wait_us, way_us).wait_s(created_us, now_us) <= min(wait_us, HELD_US_MAX) / 1e6


class Buffer(RuleBasedStateMachine):
    """Items of some streams are held, with a look at them at each event and at each timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 10.0
        self.holds = Holds(lambda: self.now_s, lambda: round(self.now_s * 1e6))
        self.held = Held[int]()
        self.deadlines: dict[int, tuple[float, float]] = {}
        """The deadline of each item, and the earliest time to go together with others."""

    def check(self, taken: list[int], model: list[int]) -> None:
        assert sorted(taken) == sorted(model)
        for item in taken:
            del self.deadlines[item]

    def due(self) -> list[int]:
        """All due items; and with them, in the order of deadlines, items for which the time is not too early."""
        if not any(until_s <= self.now_s + TIMER_S for until_s, _ in self.deadlines.values()):
            return []
        found = []
        for item, (until_s, early_s) in sorted(self.deadlines.items(), key=lambda each: each[1][0]):
            if early_s > self.now_s and until_s > self.now_s + TIMER_S:
                break
            found.append(item)
        return found

    @rule(stream_id=st.integers(1, 3), wait_us=st.sampled_from([0, 2_000, 50_000, 400_000, 5_000_000]), way_us=US)
    def budget(self, stream_id: int, wait_us: int, way_us: int) -> None:
        self.holds.set(stream_id, Hold(wait_us, way_us + wait_us))

    @rule(item=st.integers(0, 8), stream_id=st.integers(1, 4), age_us=US)
    def come(self, item: int, stream_id: int, age_us: int) -> None:
        created_us = round(self.now_s * 1e6) - age_us
        until_s = self.holds.until_s(stream_id, created_us)
        hold = self.holds.of.get(stream_id)
        assert until_s == 0 or hold is not None
        if hold is not None and until_s:
            assert until_s - self.now_s <= min(hold.wait_us, HELD_US_MAX) / 1e6 + 1e-6
            assert until_s <= (created_us + hold.way_us) / 1e6 + 1e-6
            self.held.hold(item, until_s, self.now_s)
            if until_s < self.deadlines.get(item, (math.inf, 0))[0]:
                self.deadlines[item] = until_s, until_s - SLACK * (until_s - self.now_s)

    @rule(item=st.integers(0, 8))
    def forget(self, item: int) -> None:
        self.held.discard(item)
        self.deadlines.pop(item, None)

    @rule(ms=st.floats(0.1, 300))
    def time_goes_on(self, ms: float) -> None:
        """Timers are exact to a millisecond; each sets the next one."""
        until_s = self.now_s + ms / 1000
        while self.held.next_s <= until_s:
            self.now_s = max(self.now_s, self.held.next_s)
            self.check(self.held.take(self.now_s), self.due())
        self.now_s = until_s

    @rule()
    def look(self) -> None:
        """Look because of another event."""
        self.check(self.held.take(self.now_s), self.due())

    @invariant()
    def nothing_is_left_beyond_its_deadline(self) -> None:
        assert len(self.held) == len(self.deadlines)
        assert all(item in self.held for item in self.deadlines)
        assert self.held.next_s == min((until_s for until_s, _ in self.deadlines.values()), default=math.inf)
        assert self.held.next_s >= self.now_s


TestBuffer = Buffer.TestCase
TestBuffer.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
