"""The clocks of a machine: they are as wrong as clocks are."""

from __future__ import annotations

from tests.simulation.engine.scheduler import Scheduler

EPOCH_US = 1_700_000_000_000_000
"""What the wall clocks show when a simulation begins, those that are right."""


class MachineClock:
    """See `kera.core.base.clock.Clock`. All three go at the same rate; the wall clock also jumps."""

    def __init__(self, scheduler: Scheduler, rate: float = 1.0, wall_offset_s: float = 0.0) -> None:
        """`rate`: seconds of this clock in one of the simulation's."""
        self._scheduler = scheduler
        self.rate = rate
        self._wall_offset_us = round(wall_offset_s * 1e6)
        self._boot_s = 1000.0  # nobody may take 0 for the beginning of time

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
        """See `Clock.processor_s`. What a run takes is not part of it."""

    def jump(self, seconds: float) -> None:
        """Somebody sets the wall clock."""
        self._wall_offset_us += round(seconds * 1e6)

    def when_s(self, monotonic_s: float) -> float:
        """The simulation's time at which the monotonic clock shows this."""
        return (monotonic_s - self._boot_s) / self.rate
