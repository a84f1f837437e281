"""Logs refused connections with their reasons, without letting a flood of them fill the log.

The same reason is logged once per host in `AGAIN_S`, and at most `LINES_MAX` lines altogether in that time. Other
refusals are counted, and the next line says how many there were.
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
        """`interface`: the name of the port, for people."""
        self._interface = interface
        self._event = event
        self._now_s = now_s
        self._told: dict[tuple[str, str], float] = {}
        """Logged hosts and reasons with their times, the oldest first; at most `LINES_MAX`."""
        self.untold = 0
        """Number of refusals that were not logged since the last line."""

    def tell(self, reason: str, peer: str = "") -> None:
        """Note that `peer` (``host:port``; empty: unknown) was refused for `reason`."""
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
