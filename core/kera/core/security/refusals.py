"""Refused connections and their reasons in the log: an operator finds the reason, and a flood does not fill the log.

The same reason is told of a host once in `AGAIN_S`, and `LINES_MAX` lines altogether in that time. What is not told is
counted, and the next line says how many these were.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from kera.core.base.telemetry import get_logger

log = get_logger("kera.tls")

AGAIN_S = 60.0
LINES_MAX = 10


class Refusals:
    """The refusals at one port."""

    def __init__(
        self, interface: str, now_s: Callable[[], float] = monotonic, *, event: str = "connection refused"
    ) -> None:
        """`interface`: which port it is, for a person."""
        self._interface = interface
        self._event = event
        self._now_s = now_s
        self._told: dict[tuple[str, str], float] = {}
        """Hosts and reasons, the oldest first, with when it was; at most `LINES_MAX`."""
        self.untold = 0
        """Since the last line."""

    def tell(self, reason: str, peer: str = "") -> None:
        """`peer` (``host:port``; empty: unknown) was refused for `reason`."""
        now_s = self._now_s()
        while self._told:
            oldest = next(iter(self._told))
            if now_s < self._told[oldest] + AGAIN_S:
                break
            del self._told[oldest]
        key = peer.rpartition(":")[0], reason
        if key in self._told or len(self._told) >= LINES_MAX:
            self.untold += 1
            return
        self._told[key] = now_s
        untold, self.untold = self.untold, 0
        named = {"peer": peer} if peer else {}
        log.warning(self._event, interface=self._interface, **named, reason=reason, untold=untold)
