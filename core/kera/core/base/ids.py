"""Ids and positions (thesis 6.1, 6.2.2)."""

from __future__ import annotations

from typing import NamedTuple

PRODUCER_IDS = range(1 << 63, 1 << 64)
"""Ids of writers that choose their ids themselves, see ``kera.client.producing.appender``. The coordinator assigns
lower ids."""
PRODUCER_EPOCHS = 1 << 12
"""The number of consecutive epochs that belong to one instance of a named producer. The coordinator assigns the first
of them, and the lanes of the instance move on to later ones when they must. So all epochs of a later instance are above
all epochs of an earlier one, without communication between them. An epoch has 32 bits, which leaves a name a million
instances, and an instance 4096 epochs per streamlet."""


class Position(NamedTuple):
    """A place in one entry of a streamlet. Positions of one entry compare in log order."""

    group_id: int
    """0 stands for "the oldest existing group"; every real position is greater."""
    segment_id: int
    """Logical segment within the group, from 1."""
    offset: int
    """Bytes from the start of the segment; the start of a chunk or the end of the last one."""


EARLIEST = Position(0, 0, 0)
"""The start of an entry, whatever retention has removed."""


class EntryId(NamedTuple):
    """An entry of a streamlet of a stream: an append-only chain of groups of segments."""

    stream_id: int
    streamlet_id: int
    entry: int
