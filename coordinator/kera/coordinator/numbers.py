"""Numbers that are given once, also when the metadata are put back to what they were at an earlier time. Pure.

A counter alone would give them again: what was given since the copy is not in it, and brokers, backups and readers know
it. So each number is above the last one that is written down, and above what the clock says: ids grow by microseconds,
epochs by seconds. Which of the two decides does not matter to anybody; both only grow.

What is needed for it is that over the time between a copy and its return the wall clock goes on, and that no more than
a million ids, or one epoch, are given a second on average. A clock that was set back costs nothing as long as the
counter is there.
"""

from __future__ import annotations

SINCE_US = 1_577_836_800_000_000
"""2020-01-01T00:00:00Z. So an epoch fits into 31 bits until 2088: the upper half of a virtual segment's id is one."""


def id_floor(now_us: int) -> int:
    """Ids of streams and producers are above this."""
    return max(0, now_us - SINCE_US)


def epoch_floor(now_us: int) -> int:
    """Epochs, of launches and of coordinators, are above this."""
    return id_floor(now_us) // 1_000_000
