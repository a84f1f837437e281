"""The time that a hop took for many chunks."""

from __future__ import annotations

from array import array
from operator import add

from kera.core.latency.buckets import BUCKETS, bucket_of, quantile_us

TIME_US_MAX = 7 * 86_400_000_000
"""Maximum of a hop's time, and of a difference of clocks, that figures are made of."""
_EMPTY = bytes(8 * BUCKETS)
"""Content of an empty array. An array takes a quarter of the memory of a list; brokers keep eleven for each hop."""


class Sample:
    """Times in microseconds: their count, sum and maximum, and how many of them are in each bucket.

    Merging samples has the same result as adding all of their times to one sample.
    """

    __slots__ = ("buckets", "count", "max_us", "sum_us")

    def __init__(self) -> None:
        self.count = 0
        self.sum_us = 0
        self.max_us = 0
        self.buckets = array("Q", _EMPTY)

    def add(self, us: int, count: int = 1) -> None:
        """Add a time of `us` for `count` chunks. A negative time, from clocks that do not agree, counts as 0.

        A time above a week, as of records that are read long after they were written, counts as a week.
        """
        us = min(max(us, 0), TIME_US_MAX)
        self.count += count
        self.sum_us += us * count
        self.max_us = max(self.max_us, us)
        self.buckets[bucket_of(us)] += count

    def merge(self, other: Sample) -> None:
        """Add all times of `other`."""
        if not other.count:
            return
        self.count += other.count
        self.sum_us += other.sum_us
        self.max_us = max(self.max_us, other.max_us)
        self.buckets = array("Q", map(add, self.buckets, other.buckets))

    @property
    def mean_us(self) -> int:
        """The mean, rounded up; 0 if there are no times."""
        return -(-self.sum_us // self.count) if self.count else 0

    @property
    def p99_us(self) -> int:
        """The 99th percentile: up to 42 % too large, never too small; 0 if there are no times."""
        return self.quantile_us(0.99)

    def quantile_us(self, share: float) -> int:
        """Return the quantile for any share, as `p99_us`: 0.5 is the median."""
        return quantile_us(self.buckets, share, self.max_us)
