"""Identifiers of streamlets and of launches: plain data."""

from __future__ import annotations

from typing import NamedTuple


class StreamletId(NamedTuple):
    """A streamlet of a stream."""

    stream_id: int
    streamlet_id: int


class Launch(NamedTuple):
    """A launch of a broker or a backup."""

    member_id: int
    epoch: int
