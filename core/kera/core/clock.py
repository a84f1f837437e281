"""Time, behind a protocol, so that decisions that depend on it can be tested without waiting."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of time."""

    def now_us(self) -> int:
        """Wall-clock time: microseconds since the Unix epoch."""
        ...

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back; only differences mean something."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now_us(self) -> int:
        """See `Clock.now_us`."""
        return time.time_ns() // 1000

    def monotonic_s(self) -> float:
        """See `Clock.monotonic_s`."""
        return time.monotonic()


class FakeClock:
    """A clock that moves only when told to."""

    def __init__(self, now_us: int = 1_700_000_000_000_000) -> None:
        self._now_us = now_us
        self._elapsed_us = 0

    def now_us(self) -> int:
        """See `Clock.now_us`."""
        return self._now_us + self._elapsed_us

    def monotonic_s(self) -> float:
        """See `Clock.monotonic_s`."""
        return self._elapsed_us / 1e6

    def advance(self, seconds: float) -> None:
        """Move both clocks forward by `seconds`."""
        self._elapsed_us += round(seconds * 1e6)
