"""The time of day for removal by age: the wall clock without its short excursions.

A clock that is set ahead by a year, by mistake and for a minute, must not cost a year's records. So a jump counts only
once it has lasted for `SETTLE_S`; until then, the time continues by the boot-time clock, which cannot be set.
Corrections of up to `SLEW_US` are followed at once.

A clock that is wrong from the start, or for longer than `SETTLE_S`, is believed.
"""

from __future__ import annotations

from kera.core.base.clock import Clock
from kera.core.base.telemetry import get_logger

log = get_logger("kera.retention")

SETTLE_S = 600.0
"""How long a jump must last before it counts; time servers and operators undo a mistake sooner."""
SLEW_US = 1_000_000
"""Maximum correction of a clock, from one reading to the next, that is not a jump."""


class SteadyTime:
    """A clock for retention that follows small corrections at once, and a jump only after `SETTLE_S`.

    It has to be read regularly: a jump between two readings counts from the second.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_us = self._wall_offset_us()
        """The believed offset of the time of day from the boot-time clock."""
        self._jumped_us = self._offset_us
        """The offset of the wall clock from the boot-time clock after its jump."""
        self._jumped_s: float | None = None
        """When the wall clock jumped, on the boot-time clock; None: it has not jumped."""

    def now_us(self) -> int:
        """Return the believed time of day, in microseconds since the Unix epoch."""
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
