"""The cluster's operations: recoveries, drains, and streamlets that have moved."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal, NamedTuple

from starlette.responses import Response

from kera.client import ClusterDescription, DrainStatus, StreamDescription, StreamletMove
from kera.console import limits
from kera.console.pages.overview import allowed
from kera.console.visits import Visit
from kera.console.watching.view import View
from kera.core.base.internal_names import is_internal
from kera.core.errors import KeraError

STREAMS_DESCRIBED_MAX = 20
"""Maximum number of streams that are described for a page."""


class Spread(NamedTuple):
    """A streamlet that has moved, and has records at several brokers."""

    stream: str
    streamlet: int
    owner: int
    others: tuple[int, ...]


class Drain(NamedTuple):
    """A member that is being drained."""

    name: str
    status: DrainStatus | None
    """The progress; None: the user may not see it."""
    error: str = ""


async def show(visit: Visit) -> Response:
    """Show recoveries, drains, and streamlets that have moved."""
    view = visit.view
    recoveries, cluster, streams, balance = await asyncio.gather(
        allowed(view.recoveries.get()), view.cluster.get(), view.streams.get(), allowed(_balance(view))
    )
    moving = [each.name for each in streams if each.spread and (visit.internal or not is_internal(each.name))]
    described = await asyncio.gather(*(_described(view, name) for name in moving[:STREAMS_DESCRIBED_MAX]))
    spread = [each for stream in described if stream is not None for each in moved(stream)]
    return visit.page(
        "operations.html",
        {
            "recoveries": None if recoveries is None else recoveries[: limits.ROWS_PER_PAGE],
            "drains": await _drains(view, cluster),
            "spread": spread[: limits.ROWS_PER_PAGE],
            "spread_left_out": max(0, len(spread) - limits.ROWS_PER_PAGE),
            "streams_left_out": max(0, len(moving) - STREAMS_DESCRIBED_MAX),
            "moves": balance
            if balance is None or balance == "unknown"
            else [each for each in balance if visit.internal or not is_internal(each.stream)][: limits.ROWS_PER_PAGE],
            "internal_streams": sum(is_internal(each.name) for each in streams),
        },
    )


def moved(stream: StreamDescription) -> list[Spread]:
    """Return the streamlets of a stream that have older records at other brokers than the owner."""
    return [
        Spread(stream.name, number, assignment.broker_id, assignment.broker_ids[:-1])
        for number, assignment in sorted(stream.assignments.items())
        if len(assignment.broker_ids) > 1
    ]


async def _balance(view: View) -> Sequence[StreamletMove] | Literal["unknown"]:
    """Return the moves of a rebalancing, or ``unknown``: with many streams the coordinator needs time to plan them."""
    balance = await view.balance.soon(limits.PATIENCE_S)
    return "unknown" if balance is None else balance.moves


async def _described(view: View, name: str) -> StreamDescription | None:
    """Describe a stream; None: that fails, for example because it was deleted."""
    try:
        return await view.client.admin.describe_stream(name)
    except KeraError:
        return None


async def _drains(view: View, cluster: ClusterDescription) -> list[Drain]:
    members = [("broker", each.broker_id) for each in cluster.brokers if each.draining]
    members += [("backup", each.backup_id) for each in cluster.backups if each.draining]
    return [await _drain(view, *member) for member in members[: limits.ROWS_PER_PAGE]]


async def _drain(view: View, kind: str, member_id: int) -> Drain:
    admin, name = view.client.admin, f"{kind} {member_id}"
    ask = admin.drain_broker if kind == "broker" else admin.drain_backup
    try:
        return Drain(name, await allowed(ask(member_id, ask=True)))
    except KeraError as error:
        return Drain(name, None, error.message)
