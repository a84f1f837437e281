"""Distributions of times in microseconds, as HDR histograms: three digits of precision whatever the size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hdrh.histogram import HdrHistogram

_LEAST_US, _MOST_US, _DIGITS = 1, 3_600_000_000, 3


class Latencies:
    """Times, each with the number of records it stands for."""

    def __init__(self) -> None:
        self._histogram: Any = HdrHistogram(_LEAST_US, _MOST_US, _DIGITS)

    def add(self, time_us: float, count: int = 1) -> None:
        """Add one time; what is below a microsecond counts as one."""
        self._histogram.record_value(min(max(round(time_us), _LEAST_US), _MOST_US), count)

    def add_encoded(self, encoded: Iterable[str]) -> None:
        """Add what other processes have measured and `encode`d."""
        for text in encoded:
            self._histogram.decode_and_add(text)

    def encode(self) -> str:
        """As text, for `add_encoded`."""
        return str(self._histogram.encode().decode())

    @property
    def count(self) -> int:
        """How many times there are."""
        return int(self._histogram.get_total_count())

    def summary(self) -> dict[str, int] | None:
        """Percentiles and maximum; None when nothing was measured."""
        if not self.count:
            return None
        at = self._histogram.get_value_at_percentile
        return {
            "p50": int(at(50)),
            "p95": int(at(95)),
            "p99": int(at(99)),
            "max": int(self._histogram.get_max_value()),
            "samples": self.count,
        }
