"""The time that a hop took for many chunks."""

from __future__ import annotations

from array import array
from operator import add

from kera.core.latency.buckets import BUCKETS, bucket_of, quantile_us

TIME_US_MAX = 7 * 86_400_000_000
"""Maximum of a hop's time, and of the difference of clocks, that figures are made of."""
_EMPTY = bytes(8 * BUCKETS)
"""In an array, which has a quarter of what a list of large numbers takes: brokers keep eleven of each hop."""


class Sample:
    """Times in microseconds: how many, their sum, the longest, and how many of them are in which bucket.

    Merging samples gives what adding all of their times to one would.
    """

    __slots__ = ("buckets", "count", "max_us", "sum_us")

    def __init__(self) -> None:
        self.count = 0
        self.sum_us = 0
        self.max_us = 0
        self.buckets = array("Q", _EMPTY)

    def add(self, us: int, count: int = 1) -> None:
        """`count` chunks took so long. Less than nothing, as of clocks that do not agree, counts as nothing.

        More than a week, as of what was written long before somebody reads it, counts as a week.
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
        """Their mean, rounded up; 0 if there are none."""
        return -(-self.sum_us // self.count) if self.count else 0

    @property
    def p99_us(self) -> int:
        """The time that 99 of 100 took at most: up to 42 % too much, never too little; 0 if there are none."""
        return self.quantile_us(0.99)

    def quantile_us(self, share: float) -> int:
        """The same of another share of them: 0.5 is the median."""
        return quantile_us(self.buckets, share, self.max_us)
