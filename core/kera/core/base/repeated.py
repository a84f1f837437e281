"""Saying that something goes on, without saying it each time that it is tried again.

Promises: the first time is told at once, then at growing intervals (twice as long each time, up to `INTERVAL_S_MAX`),
and at the end that it is over, and after how long. What never began is never over. Left to the caller: one object for
each condition that can go on by itself.
"""

from __future__ import annotations

from typing import Any

from kera.core.base.clock import Clock, SystemClock

INTERVAL_S_MIN = 5.0
INTERVAL_S_MAX = 300.0


class Repeated:
    """A condition that may last. `log` is a structured logger, see `kera.core.base.telemetry.get_logger`."""

    def __init__(self, log: Any, clock: Clock | None = None) -> None:
        self._log = log
        self._clock = clock or SystemClock()
        self._since_s: float | None = None
        """When it began; None: it does not go on."""
        self._next_s = 0.0
        """When it is told again."""
        self._interval_s = INTERVAL_S_MIN

    def goes_on(self, event: str, *, level: str = "warning", **attributes: Any) -> None:
        """It has been seen once more; `event` says what."""
        now_s = self._clock.monotonic_s()
        if self._since_s is None:
            self._since_s, self._interval_s = now_s, INTERVAL_S_MIN
        elif now_s < self._next_s:
            return
        else:
            self._interval_s = min(2 * self._interval_s, INTERVAL_S_MAX)
            attributes["for_s"] = round(now_s - self._since_s, 1)
        self._next_s = now_s + self._interval_s
        getattr(self._log, level)(event, **attributes)

    def over(self, event: str, **attributes: Any) -> None:
        """It has not been seen this time; `event` says so, if it was before."""
        since_s, self._since_s = self._since_s, None
        if since_s is not None:
            self._log.info(event, after_s=round(self._clock.monotonic_s() - since_s, 1), **attributes)
