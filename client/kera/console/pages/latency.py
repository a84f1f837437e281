"""Latency constraints: a list with their states, and one constraint with the time of each hop."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from starlette.responses import Response

from kera.client import LatencyDescription, LatencyHop
from kera.console.pages.paging import paged
from kera.console.visits import Visit
from kera.console.web.problems import Refused
from kera.console.web.words import microseconds
from kera.core.errors import UnknownLatencyConstraint

KINDS = {"held": "ok", "unknown": "", "violated": "bad", "infeasible": "bad", "broken": "warn"}
"""The style of each state."""
FILLING = ("gather", "replicate", "hand-over")
"""Hops whose buffers get advice on how long to wait."""


WIDTH = 600.0


class Piece(NamedTuple):
    """The bar of a hop."""

    hop: LatencyHop
    took_us: int
    x: float
    width: float


class Lane(NamedTuple):
    """The bars of a record's hops in one stream."""

    stream: str
    pieces: list[Piece]
    took_us: int


class Bars(NamedTuple):
    """The data of a template's bars, in boxes that are `WIDTH` wide."""

    lanes: list[Lane]
    limit_x: float


def bars(hops: Sequence[LatencyHop], limit_us: float, *, by_p99: bool) -> Bars:
    """Return the bars of hops, in the order of their path."""
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


async def list_constraints(visit: Visit) -> Response:
    """Show a page of the constraints with a text in their name or path."""
    wanted = visit.parameters.text("q").strip()
    number = visit.parameters.whole("page", 1, 1, 1_000_000)
    every = await visit.view.constraints.get()
    found = [
        each
        for each in every
        if wanted.casefold() in each.constraint.name.casefold()
        or any(wanted.casefold() in element.casefold() for element in each.constraint.path)
    ]
    return visit.page(
        "latency.html", {"page": paged(found, number), "q": wanted, "all": len(every), "kinds": KINDS, "worst": _worst}
    )


def _worst(found: LatencyDescription) -> str:
    """Describe the worst hop of a constraint; empty: it is not known."""
    hop = found.worst_hop
    if hop is None:
        return ""
    reader = f" to {hop.consumer_group}" if hop.consumer_group else ""
    took_us = hop.p99_us if found.constraint.statistic == "p99" else hop.mean_us
    return f"{hop.hop} of {hop.stream}{reader}, {microseconds(took_us)}"


async def describe(visit: Visit) -> Response:
    """Show the time of each hop of a path, the hops that take too long, and the advised waits of buffers."""
    name = visit.parameters.text("name", None, length_max=256)
    try:
        found = await visit.view.client.latency.describe(name)
    except UnknownLatencyConstraint as error:
        raise Refused(404, "There is no such latency constraint", error.message) from error
    constraint = found.constraint
    by_p99 = constraint.statistic == "p99"
    return visit.page(
        "constraint.html",
        {
            "found": found,
            "constraint": constraint,
            "took_us": found.p99_us if by_p99 else found.mean_us,
            "bars": bars(found.hops, constraint.limit_ms * 1000, by_p99=by_p99),
            "width": WIDTH,
            "kinds": KINDS,
            "filling": FILLING,
            "clock_error_us": sum(hop.clock_error_us for hop in found.hops),
            "hop_names": list(dict.fromkeys(hop.hop for hop in found.hops)),
        },
    )
