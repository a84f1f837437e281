"""Numbers that are given once, also when the metadata are put back to what they were at an earlier time. Pure.

A counter alone would give them again: what was given since the copy is not in it, and brokers, backups and readers know
it. So each number is above the last one that is written down, and above what the clock says:

    epoch     max(last + 1, seconds): of a launch, a coordinator; also a schema's id, a configuration's version
    id        max(last + 1, seconds << 20 | the lower 20 bits of last + 1): of a stream, a producer
    instance  max(last + 1, half hours): of a named producer

The lower bits of ids count on: a producer's id decides which entries it writes to, and several producers are to
have different ones.

What is needed for it is that over the time between a copy and its return the wall clock goes on, and that no more than
a million ids, or one epoch, are given a second on average, and one instance of a name in half an hour. A clock that was
set back costs nothing as long as the counter is there. Metadata may be put back within a second: so a coordinator goes
by the time after the second in which it has begun (``State``).

Ids of brokers and backups are small, for people, and only counted: see ``kera.coordinator.cluster.membership`` for
members that are younger than the metadata.
"""

from __future__ import annotations

SINCE_US = 1_577_836_800_000_000
"""2020-01-01T00:00:00Z. So an epoch fits into 31 bits until 2088: the upper half of a virtual segment's id is one."""
COUNTED_BITS = 20
"""The counting bits of an id."""
INSTANCE_S = 1_800
"""An instance has 4,096 of 32 bits of epochs: there is room for a million half hours, until 2079."""


def next_epoch(last: int, now_us: int) -> int:
    """The epoch of a launch, or of a coordinator, after the one that was given last."""
    return max(last + 1, _seconds(now_us))


def next_id(last: int, now_us: int) -> int:
    """The id of a stream or of a producer after the one that was given last."""
    counted = (last + 1) & (1 << COUNTED_BITS) - 1
    return max(last + 1, _seconds(now_us) << COUNTED_BITS | counted)


def instances_by(now_us: int) -> int:
    """How many instances of a named producer there may have been; the number of the next one is no lower."""
    return _seconds(now_us) // INSTANCE_S


def _seconds(now_us: int) -> int:
    return max(0, now_us - SINCE_US) // 1_000_000
