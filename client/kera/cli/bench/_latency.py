"""Distributions of times in nanoseconds, as HDR histograms, with three digits of precision at any size."""

from __future__ import annotations

from typing import Any

from hdrh.histogram import HdrHistogram

_LEAST_NS, _MOST_NS, _DIGITS = 1_000, 3_600 * 10**9, 3


class Latencies:
    """Times, each with the number of records that it stands for."""

    def __init__(self) -> None:
        self._histogram: Any = HdrHistogram(_LEAST_NS, _MOST_NS, _DIGITS)

    def add(self, time_ns: int, count: int = 1) -> None:
        """Add a time that `count` records have; a time below a microsecond counts as one."""
        self._histogram.record_value(min(max(time_ns, _LEAST_NS), _MOST_NS), count)

    def add_encoded(self, *texts: str) -> None:
        """Add the times of other objects, also from other processes, that `encode` has encoded."""
        for text in texts:
            self._histogram.decode_and_add(text)

    def encode(self) -> str:
        """Return all times as text, for `add_encoded`."""
        return str(self._histogram.encode().decode())

    @property
    def count(self) -> int:
        """The number of times."""
        return int(self._histogram.get_total_count())

    def ms(self, percentile: float) -> float:
        """Return a percentile in milliseconds; 100 is the largest time."""
        if percentile >= 100:
            return float(self._histogram.get_max_value()) / 1e6
        return float(self._histogram.get_value_at_percentile(percentile)) / 1e6

    def summary(self) -> dict[str, int] | None:
        """Return percentiles and maximum in microseconds; None when nothing was measured."""
        if not self.count:
            return None
        percentiles = {"p50": 50, "p95": 95, "p99": 99, "max": 100}
        return {name: int(1e3 * self.ms(each)) for name, each in percentiles.items()} | {"samples": self.count}
