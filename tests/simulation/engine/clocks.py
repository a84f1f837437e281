"""The clocks of a machine, with realistic errors."""

from __future__ import annotations

from tests.simulation.engine.scheduler import Scheduler

EPOCH_US = 1_700_000_000_000_000
"""The time of right wall clocks when a simulation begins."""


class MachineClock:
    """See `kera.core.base.clock.Clock`. All three clocks have the same rate; the wall clock also jumps."""

    def __init__(self, scheduler: Scheduler, rate: float = 1.0, wall_offset_s: float = 0.0) -> None:
        """`rate`: seconds of this clock per second of the simulation."""
        self._scheduler = scheduler
        self.rate = rate
        self._wall_offset_us = round(wall_offset_s * 1e6)
        self._boot_s = 1000.0  # so that no code relies on a start at 0

    def now_us(self) -> int:
        """See `Clock.now_us`."""
        return EPOCH_US + self._wall_offset_us + round(self._scheduler.now_s * self.rate * 1e6)

    def monotonic_s(self) -> float:
        """See `Clock.monotonic_s`."""
        return self._boot_s + self._scheduler.now_s * self.rate

    def boottime_s(self) -> float:
        """See `Clock.boottime_s`."""
        return self.monotonic_s()

    def processor_s(self) -> None:
        """See `Clock.processor_s`. The processor time of a run is not simulated."""

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back."""
        self._wall_offset_us += round(seconds * 1e6)

    def when_s(self, monotonic_s: float) -> float:
        """The simulation's time at which the monotonic clock shows `monotonic_s`."""
        return (monotonic_s - self._boot_s) / self.rate
