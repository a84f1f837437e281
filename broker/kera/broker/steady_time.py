"""The time of day for what is removed by age: the wall clock, without its short excursions.

A clock that is set ahead by a year, by mistake and for a minute, must not cost a year's records. So a jump counts only
when it has lasted for `SETTLE_S`; until then, time goes on as it did before, by the clock that nobody sets. Corrections
of up to `SLEW_US` are followed at once.

Left to others: a clock that is wrong from the start, or for longer than that, is believed.
"""

from __future__ import annotations

from kera.core.base.clock import Clock
from kera.core.base.telemetry import get_logger

log = get_logger("kera.retention")

SETTLE_S = 600.0
"""For so long a jump must last: time servers and operators are quicker to see and undo one."""
SLEW_US = 1_000_000
"""By so much at most a clock is corrected without a jump, from one reading to the next."""


class SteadyTime:
    """A clock for retention that follows small corrections at once, and a jump only after `SETTLE_S`.

    To be read again and again: a jump between two readings counts from the second.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_us = self._wall_offset_us()
        """From the clock that nobody sets to the time of day, as believed."""
        self._jumped_us = self._offset_us
        """The same, according to the wall clock after it has jumped."""
        self._jumped_s: float | None = None
        """Since when, on the clock that nobody sets; None: it has not jumped."""

    def now_us(self) -> int:
        """Microseconds since the Unix epoch, as believed."""
        offset_us, elapsed_s = self._wall_offset_us(), self._clock.boottime_s()
        if abs(offset_us - self._offset_us) <= SLEW_US:
            self._offset_us, self._jumped_s = offset_us, None
        elif self._jumped_s is None or abs(offset_us - self._jumped_us) > SLEW_US:
            self._jumped_us, self._jumped_s = offset_us, elapsed_s
            self._tell("the time of day has jumped; retention by age does not follow yet", offset_us)
        elif elapsed_s - self._jumped_s >= SETTLE_S:
            self._tell("retention by age follows a jump of the time of day, as it has lasted", offset_us)
            self._offset_us, self._jumped_s = offset_us, None
        return self._offset_us + round(elapsed_s * 1e6)

    def _wall_offset_us(self) -> int:
        return self._clock.now_us() - round(self._clock.boottime_s() * 1e6)

    def _tell(self, event: str, offset_us: int) -> None:
        log.warning(event, by_s=round((offset_us - self._offset_us) / 1e6, 3))
