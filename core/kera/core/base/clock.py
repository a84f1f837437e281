"""Time, behind a protocol, so that decisions that depend on it can be tested without waiting.

There are three clocks, each with its own purpose:

* the *wall clock* says when something happened, for people and for data. It may be set forward and back while we run,
  so it never decides how long to wait, when a deadline has passed or whether a lease still holds;
* the *monotonic* clock measures how long something took. It stands still while the host is suspended. A process that
  *grants* a lease, or that judges others by their silence, uses this clock: if it measures too little time, it is only
  more patient;
* the *boot-time* clock goes on while the host is suspended. A process that *holds* a lease uses this clock: a host that
  wakes up finds that its lease has expired, as it has for every other process.
"""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol


class ProcessorTime(NamedTuple):
    """Processor time in seconds; only differences are meaningful."""

    thread_s: float
    """Processor time of the calling thread, such as that of an event loop."""
    process_s: float
    """Processor time of all threads of the process."""


class Clock(Protocol):
    """Source of time."""

    def now_us(self) -> int:
        """Wall-clock time: microseconds since the Unix epoch."""
        ...

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back, and stands still while the host is suspended.

        Only differences are meaningful.
        """
        ...

    def boottime_s(self) -> float:
        """The same, but it goes on while the host is suspended."""
        ...

    def processor_s(self) -> ProcessorTime | None:
        """Processor time used so far; None where there is no such thing, as in a simulation."""
        ...


_BOOTTIME: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""The boot-time clock of Linux; on other systems the monotonic clock."""


def boottime_s() -> float:
    """Seconds on a clock that never goes back, and goes on while the host is suspended; for holders of leases."""
    return time.clock_gettime(_BOOTTIME)


class SystemClock:
    """The machine's own clocks."""

    def now_us(self) -> int:
        """See `Clock.now_us`."""
        return time.time_ns() // 1000

    def monotonic_s(self) -> float:
        """See `Clock.monotonic_s`."""
        return time.monotonic()

    def boottime_s(self) -> float:
        """See `Clock.boottime_s`."""
        return boottime_s()

    def processor_s(self) -> ProcessorTime | None:
        """See `Clock.processor_s`."""
        return ProcessorTime(time.thread_time(), time.process_time())


class FakeClock:
    """A clock that moves only when `advance` or `step` is called."""

    def __init__(self, now_us: int = 1_500_000_000_000_000) -> None:
        self._now_us = now_us
        self._elapsed_us = 0
        self.processor: ProcessorTime | None = None
        """The answer of `processor_s`; tests set it."""

    def now_us(self) -> int:
        """See `Clock.now_us`."""
        return self._now_us + self._elapsed_us

    def monotonic_s(self) -> float:
        """See `Clock.monotonic_s`."""
        return self._elapsed_us / 1e6

    def boottime_s(self) -> float:
        """See `Clock.boottime_s`. It equals `monotonic_s`, as this clock is never suspended."""
        return self._elapsed_us / 1e6

    def processor_s(self) -> ProcessorTime | None:
        """See `Clock.processor_s`."""
        return self.processor

    def advance(self, seconds: float) -> None:
        """Move both clocks forward by `seconds`."""
        self._elapsed_us += round(seconds * 1e6)

    def step(self, seconds: float) -> None:
        """Set the wall clock forward (or back) by `seconds`, as an administrator does; no time passes."""
        self._now_us += round(seconds * 1e6)
