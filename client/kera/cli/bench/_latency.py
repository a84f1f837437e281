"""Distributions of times in nanoseconds, as HDR histograms: three digits of precision whatever the size."""

from __future__ import annotations

from typing import Any

from hdrh.histogram import HdrHistogram

_LEAST_NS, _MOST_NS, _DIGITS = 1_000, 3_600 * 10**9, 3


class Latencies:
    """Times, each with the number of records it stands for."""

    def __init__(self) -> None:
        self._histogram: Any = HdrHistogram(_LEAST_NS, _MOST_NS, _DIGITS)

    def add(self, time_ns: int, count: int = 1) -> None:
        """Add a time that `count` records have; what is below a microsecond counts as one."""
        self._histogram.record_value(min(max(time_ns, _LEAST_NS), _MOST_NS), count)

    def add_encoded(self, *texts: str) -> None:
        """Add what others, also in other processes, have measured and `encode`d."""
        for text in texts:
            self._histogram.decode_and_add(text)

    def encode(self) -> str:
        """As text, for `add_encoded`."""
        return str(self._histogram.encode().decode())

    @property
    def count(self) -> int:
        """How many times there are."""
        return int(self._histogram.get_total_count())

    def ms(self, percentile: float) -> float:
        """Milliseconds; 100 is the largest."""
        if percentile >= 100:
            return float(self._histogram.get_max_value()) / 1e6
        return float(self._histogram.get_value_at_percentile(percentile)) / 1e6

    def summary(self) -> dict[str, int] | None:
        """Percentiles and maximum in microseconds; None when nothing was measured."""
        if not self.count:
            return None
        percentiles = {"p50": 50, "p95": 95, "p99": 99, "max": 100}
        return {name: int(1e3 * self.ms(each)) for name, each in percentiles.items()} | {"samples": self.count}
