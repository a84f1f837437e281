"""Both clocks keep what the protocol promises; the fake one moves only when told to."""

import time

import pytest

from kera.core.clock import Clock, FakeClock, SystemClock


def test_the_system_clock_tells_microseconds_since_the_epoch() -> None:
    before = time.time_ns() // 1000

    now = SystemClock().now_us()

    assert before <= now <= time.time_ns() // 1000


def test_the_system_clock_never_goes_back() -> None:
    clock: Clock = SystemClock()

    readings = [clock.monotonic_s() for _ in range(1000)]

    assert readings == sorted(readings)


def test_the_fake_clock_stands_still() -> None:
    clock = FakeClock(now_us=5)

    assert [(clock.now_us(), clock.monotonic_s()) for _ in range(3)] == [(5, 0.0)] * 3


def test_advancing_moves_both_clocks() -> None:
    clock: FakeClock = FakeClock(now_us=1_000_000)

    clock.advance(1.5)
    clock.advance(0.000_001)

    assert clock.now_us() == 2_500_001
    assert clock.monotonic_s() == pytest.approx(1.500_001)


def test_small_steps_do_not_get_lost() -> None:
    clock = FakeClock(now_us=0)

    for _ in range(1000):
        clock.advance(0.001)

    assert (clock.now_us(), clock.monotonic_s()) == (1_000_000, 1.0)
