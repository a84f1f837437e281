"""The ids of other things: plain data."""

from __future__ import annotations

from typing import NamedTuple


class StreamletId(NamedTuple):
    """Which streamlet of which stream."""

    stream_id: int
    streamlet_id: int


class Launch(NamedTuple):
    """Which launch of a broker or a backup."""

    member_id: int
    epoch: int
