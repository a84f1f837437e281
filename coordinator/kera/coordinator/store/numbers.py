"""Numbers that are given once, even if the metadata are restored to an earlier state. Pure.

A counter alone would repeat numbers: those given since the copy are not in it, but brokers, backups and readers know
them. So each number is above the last one that is written down, and above a number derived from the clock:

    epoch     max(last + 1, seconds): of a launch, a coordinator; also a schema's id, a configuration's version
    id        max(last + 1, seconds << 20 | the lower 20 bits of last + 1): of a stream, a producer
    instance  max(last + 1, half hours): of a named producer

The lower bits of ids keep counting: a producer's id decides which entries it writes to, and several producers should
have different ones.

This requires that the wall clock advances between a copy and its return, and that at most a million ids, or one epoch,
are given per second on average, and one instance of a name per half hour. A clock that was set back does no harm as
long as the counter is there. Metadata may be restored within a second: so a coordinator uses a time after the second in
which it has started (``State``).

Ids of brokers and backups are small, for people, and only counted: see ``kera.coordinator.cluster.membership`` for
members that are younger than the metadata.
"""

from __future__ import annotations

SINCE_US = 1_577_836_800_000_000
"""2020-01-01T00:00:00Z. So an epoch fits into 31 bits until 2088, as the upper half of a virtual segment's id
has to.
"""
COUNTED_BITS = 20
"""The number of lower bits of an id that count."""
INSTANCE_S = 1_800
"""An instance has 4,096 epochs out of a range of 32 bits: there is room for a million half hours, until 2079."""


def next_epoch(last: int, now_us: int) -> int:
    """Return the epoch of a launch, or of a coordinator, after the epoch `last`."""
    return max(last + 1, _seconds(now_us))


def next_id(last: int, now_us: int) -> int:
    """Return the id of a stream or of a producer after the id `last`."""
    counted = (last + 1) & (1 << COUNTED_BITS) - 1
    return max(last + 1, _seconds(now_us) << COUNTED_BITS | counted)


def instances_by(now_us: int) -> int:
    """Return how many instances of a named producer there may have been; the next one's number is at least that."""
    return _seconds(now_us) // INSTANCE_S


def _seconds(now_us: int) -> int:
    return max(0, now_us - SINCE_US) // 1_000_000
