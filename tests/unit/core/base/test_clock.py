"""Both clocks keep the promises of the protocol; the fake one moves only when a test moves it."""

import time

import pytest

from kera.core.base.clock import Clock, FakeClock, SystemClock, boottime_s


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


def test_a_step_moves_the_wall_clock_only() -> None:
    clock = FakeClock(now_us=5_000_000)

    clock.step(-1.5)

    assert (clock.now_us(), clock.monotonic_s()) == (3_500_000, 0.0)


def test_boottime_reads_the_clock_that_counts_suspended_time() -> None:
    before_s = time.clock_gettime(time.CLOCK_BOOTTIME)

    now_s = boottime_s()

    assert before_s <= now_s <= time.clock_gettime(time.CLOCK_BOOTTIME)
