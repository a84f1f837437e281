"""How late the event loop is: what a request waits for, before anybody looks at it, because of others.

A timer that is due every `PERIOD_S` measures by how much it comes late. Prometheus is told of the worst since it asked
last; a stop of the loop is seen however seldom it asks. `still_s` may be asked from any thread: a loop that is stuck
cannot tell of itself.
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
        """For how long the loop has not turned, but for the period."""
        return max(0.0, time.monotonic() - self._turned_s - PERIOD_S)

    def take_worst_s(self) -> float:
        """The worst since this was called last."""
        worst_s, self._worst_s = self._worst_s, 0.0
        return worst_s

    def close(self) -> None:
        """Measure no more."""
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
