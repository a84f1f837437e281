"""Ids and positions (thesis 6.1, 6.2.2)."""

from __future__ import annotations

from typing import NamedTuple

PRODUCER_IDS = range(1 << 63, 1 << 64)
"""Ids of writers that choose their ids themselves, see ``kera.client.producing.appender``. The coordinator gives lower
ones."""
PRODUCER_EPOCHS = 1 << 12
"""How many epochs in a row are an instance's of a named producer: the coordinator gives out the first of them, the
lanes of the instance take later ones when they must. So all epochs of a later instance are above all of an earlier
one's, without a word between them. Of 32 bits they leave a name a million instances, and an instance 4096 epochs per
streamlet."""


class Position(NamedTuple):
    """A place in one entry of a streamlet. Positions of one entry compare in log order."""

    group_id: int
    """0 stands for "the oldest group there is"; every real position is greater."""
    segment_id: int
    """Logical segment within the group, from 1."""
    offset: int
    """Bytes from the start of the segment; the start of a chunk or the end of the last one."""


EARLIEST = Position(0, 0, 0)
"""Where an entry starts, whatever retention has removed."""


class EntryId(NamedTuple):
    """An entry of a streamlet of a stream: an append-only chain of groups of segments."""

    stream_id: int
    streamlet_id: int
    entry: int
