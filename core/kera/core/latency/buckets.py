"""Buckets of times in microseconds whose bounds are the powers of the square root of two.

Bucket 0 has what took up to 1 us, bucket `i` what took up to 2^(i/2) us and longer than the one before has; the last
one also has all that took longer. So what is read off a bucket's bound is at most 42 % too much, and never too little.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

BUCKETS = 64
"""How many there are: the last bound is about 50 minutes."""
BOUNDS_US = tuple(int(2 ** (i / 2)) for i in range(BUCKETS))
"""The longest time of each bucket. The first two differ by nothing, and nothing is ever in the second."""


def bucket_of(us: int) -> int:
    """Where a time belongs. One below zero, as of clocks that were set back, counts as none."""
    return min(bisect_left(BOUNDS_US, us), BUCKETS - 1)


def quantile_us(buckets: Sequence[int], share: float, max_us: int) -> int:
    """No smaller than what `share` of the times are at most (0.99: the p99), and no larger than the longest.

    0 if there are none.
    """
    count = sum(buckets)
    if not count:
        return 0
    wanted, seen = share * count, 0
    for bound_us, in_bucket in zip(BOUNDS_US[:-1], buckets, strict=False):
        seen += in_bucket
        if seen >= wanted:
            return min(bound_us, max_us)
    return max_us
