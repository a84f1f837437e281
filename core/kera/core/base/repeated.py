"""Logs an error that lasts without a line for each retry.

It logs the first occurrence at once, then at most one line per `INTERVAL_S` (with the number of `times` it was seen
since the previous line, and for how long), and one line when the error is over, if it was logged before. An error that
comes and goes causes no more lines than one that lasts. The caller keeps one object for each condition.
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
        """When the condition began; None: it does not hold."""
        self._logged = False
        """Whether a line was logged since then."""
        self._next_s = float("-inf")
        """When the next line may be logged."""
        self._times = 0
        """Occurrences since the last line."""

    def goes_on(self, event: str, *, level: str = "warning", **attributes: Any) -> None:
        """Note that the condition was seen once more; `event` describes it."""
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
        """Note that the condition is over; log `event` if it was logged before. Return whether it was logged."""
        since_s, self._since_s = self._since_s, None
        logged, self._logged = self._logged, False
        if since_s is not None and logged:
            self._log.info(event, after_s=round(self._clock.monotonic_s() - since_s, 1), **attributes)
        return logged
