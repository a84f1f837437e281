"""The hops of a path as bars, each from where the one before it ends, against the limit. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from kera.client import LatencyHop

WIDTH = 600.0


class Piece(NamedTuple):
    """A hop."""

    hop: LatencyHop
    took_us: int
    x: float
    width: float


class Lane(NamedTuple):
    """The time of a record's way through a stream."""

    stream: str
    pieces: list[Piece]
    took_us: int


class Bars(NamedTuple):
    """The data of a template's bars, in boxes that are `WIDTH` wide."""

    lanes: list[Lane]
    limit_x: float


def bars(hops: Sequence[LatencyHop], limit_us: float, *, by_p99: bool) -> Bars:
    """The bars of hops in the order of their path."""
    taken = [(hop, hop.p99_us if by_p99 else hop.mean_us) for hop in hops]
    scale = WIDTH / max(limit_us, sum(took_us for _, took_us in taken), 1)
    lanes, place_us = [], 0
    for stream, some in groupby(taken, key=lambda each: each[0].stream):
        begun_us, pieces = place_us, []
        for hop, took_us in some:
            pieces.append(Piece(hop, took_us, place_us * scale, took_us * scale))
            place_us += took_us
        lanes.append(Lane(stream, pieces, place_us - begun_us))
    return Bars(lanes, limit_us * scale)
