"""Buckets of times in microseconds whose bounds are the powers of the square root of two.

Bucket 0 has times of up to 1 us, bucket `i` has times of up to 2^(i/2) us that are above the previous bound, and the
last bucket also has all longer times. So a value read off a bucket's bound is at most 42 % too large, and never too
small.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

BUCKETS = 64
"""The number of buckets: the last bound is about 50 minutes."""
BOUNDS_US = tuple(int(2 ** (i / 2)) for i in range(BUCKETS))
"""The longest time of each bucket. The first two bounds are equal, so the second bucket is always empty."""


def bucket_of(us: int) -> int:
    """Return the bucket of a time. A negative time, from clocks that were set back, counts as 0."""
    return min(bisect_left(BOUNDS_US, us), BUCKETS - 1)


def quantile_us(buckets: Sequence[int], share: float, max_us: int) -> int:
    """Return an upper bound of the quantile for `share` (0.99: the p99), which is at most the longest time.

    0 if there are no times.
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
