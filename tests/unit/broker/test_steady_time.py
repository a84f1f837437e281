"""The clock of retention: the wall clock without its short jumps."""

from __future__ import annotations

import pytest

from kera.broker.steady_time import SETTLE_S, SLEW_US, SteadyTime
from kera.core.base.clock import FakeClock

YEAR_S = 365 * 86_400


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_steady_time_follows_the_wall_clock(clock: FakeClock) -> None:
    time = SteadyTime(clock)
    for _ in range(100):
        clock.advance(60)
        assert time.now_us() == clock.now_us()


def test_steady_time_follows_small_corrections_at_once(clock: FakeClock) -> None:
    time = SteadyTime(clock)
    for step_s in (0.5, -0.5, SLEW_US / 1e6):
        clock.advance(1)
        clock.step(step_s)
        assert time.now_us() == clock.now_us()


@pytest.mark.parametrize("step_s", [YEAR_S, -YEAR_S, 60, -60])
def test_a_jump_that_is_undone_has_no_effect(clock: FakeClock, step_s: float) -> None:
    time, before_us = SteadyTime(clock), clock.now_us()
    clock.step(step_s)
    for second in range(1, int(SETTLE_S)):
        clock.advance(1)
        assert time.now_us() == before_us + second * 1_000_000
    clock.step(-step_s)
    for _ in range(2 * int(SETTLE_S)):
        clock.advance(1)
        assert time.now_us() == clock.now_us()


@pytest.mark.parametrize("step_s", [YEAR_S, -YEAR_S])
def test_a_jump_that_lasts_is_followed(clock: FakeClock, step_s: float) -> None:
    time = SteadyTime(clock)
    clock.step(step_s)
    assert time.now_us() == clock.now_us() - step_s * 1_000_000
    clock.advance(SETTLE_S)
    assert time.now_us() == clock.now_us()


def test_the_last_of_several_jumps_has_to_last(clock: FakeClock) -> None:
    time, before_us = SteadyTime(clock), clock.now_us()
    time.now_us()
    for _ in range(10):
        clock.step(YEAR_S)
        time.now_us()
        clock.advance(SETTLE_S / 2)
        assert time.now_us() < before_us + 6 * SETTLE_S * 1_000_000
