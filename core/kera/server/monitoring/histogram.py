"""Latencies, counted on hot paths: one search among a few bounds, and two additions."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily

BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets; one more bucket has the times above the last bound."""


class LatencyHistogram:
    """A histogram of latencies. Belongs to one event loop."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """Add `count` requests that took `seconds`."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += count
        self.sum_s += seconds * count

    def add_to(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        """Add the histogram to a metric, with cumulative buckets, as Prometheus has them."""
        bounds = [*map(str, BOUNDS_S), "+Inf"]
        family.add_metric(labels, list(zip(bounds, accumulate(self.counts), strict=True)), self.sum_s)
