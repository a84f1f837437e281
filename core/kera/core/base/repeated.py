"""Logs an error that lasts without a line for each time that it is tried again.

Promises: the first time is logged at once, then at most one line in `INTERVAL_S`, with how many `times` it was seen
since the line before and for how long; and one line when it is over. An error that comes and goes has no more lines
than one that lasts. What never began is never over. Left to the caller: one object for each condition.
"""

from __future__ import annotations

from typing import Any

from kera.core.base.clock import Clock, SystemClock

INTERVAL_S = 60.0


class Repeated:
    """A condition that may last. `log` is a structured logger, see `kera.core.base.telemetry.get_logger`."""

    def __init__(self, log: Any, clock: Clock | None = None) -> None:
        self._log = log
        self._clock = clock or SystemClock()
        self._since_s: float | None = None
        """When it began; None: it does not go on."""
        self._logged = False
        """Since then there was a line."""
        self._next_s = float("-inf")
        """When there may be another one."""
        self._times = 0
        """Seen since the last line."""

    def goes_on(self, event: str, *, level: str = "warning", **attributes: Any) -> None:
        """It has been seen once more; `event` says what."""
        now_s = self._clock.monotonic_s()
        if self._since_s is None:
            self._since_s = now_s
        self._times += 1
        if now_s < self._next_s:
            return
        if self._times > 1:
            attributes |= {"times": self._times, "for_s": round(now_s - self._since_s, 1)}
        self._next_s, self._times, self._logged = now_s + INTERVAL_S, 0, True
        getattr(self._log, level)(event, **attributes)

    def over(self, event: str, **attributes: Any) -> bool:
        """It has not been seen this time; `event` says so, if it was logged before. Returns whether it was."""
        since_s, self._since_s = self._since_s, None
        logged, self._logged = self._logged, False
        if since_s is not None and logged:
            self._log.info(event, after_s=round(self._clock.monotonic_s() - since_s, 1), **attributes)
        return logged
