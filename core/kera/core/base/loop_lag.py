"""The lag of the event loop: how long a request waits, because of other work, before its handling begins.

A timer that is due every `PERIOD_S` measures how late it fires. Prometheus gets the maximum since its last scrape, so
it sees a stall of the loop however seldom it scrapes. `still_s` may be read from any thread, since a loop that is stuck
cannot report that itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PERIOD_S = 0.02


class LoopLag(Collector):
    """The lag of the running loop, from construction until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._worst_s = 0.0
        self._due_s = 0.0
        self._turned_s = time.monotonic()
        self._timer: asyncio.TimerHandle
        self._wait()

    @property
    def still_s(self) -> float:
        """How long the loop has been stuck, in seconds: the time since its last turn, less the period."""
        return max(0.0, time.monotonic() - self._turned_s - PERIOD_S)

    def take_worst_s(self) -> float:
        """Return the worst lag since the last call."""
        worst_s, self._worst_s = self._worst_s, 0.0
        return worst_s

    def close(self) -> None:
        """Stop measuring."""
        self._timer.cancel()

    def _wait(self) -> None:
        self._due_s = self._loop.time() + PERIOD_S
        self._timer = self._loop.call_later(PERIOD_S, self._came)

    def _came(self) -> None:
        self._turned_s = time.monotonic()
        self._worst_s = max(self._worst_s, self._loop.time() - self._due_s)
        self._wait()

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        yield GaugeMetricFamily(
            "kera_loop_lag_seconds",
            "how late the event loop was at worst since the last scrape",
            value=self.take_worst_s(),
        )
