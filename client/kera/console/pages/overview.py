"""The first page: how the cluster is, its brokers, what it does now."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from typing import TypeVar

from starlette.responses import Response

from kera.client import RecoveryDescription
from kera.client.admin.watching import StreamSummary
from kera.console import limits
from kera.console.visits import Visit
from kera.console.watching.view import READ, WRITTEN, Health, View
from kera.console.web.charts import chart
from kera.core.base.internal_names import is_internal
from kera.core.errors import NotAllowed

T = TypeVar("T")
UNKNOWN = 3
"""In place of a severity."""
ENDED = frozenset({"done", "cancelled"})


async def overview(visit: Visit) -> Response:
    """Health, brokers, rates, what runs."""
    view = visit.view
    cluster, streams, groups, health, recoveries, activity = await asyncio.gather(
        view.cluster.get(),
        view.streams.get(),
        view.groups.get(),
        allowed(_health(view)),
        allowed(view.recoveries.get()),
        view.activities(),
    )
    return visit.page(
        "overview.html",
        {
            "cluster": cluster,
            "streams": sum(not is_internal(each.name) for each in streams),
            "streamlets": sum(each.streamlets for each in streams if not is_internal(each.name)),
            "owned": owned(streams),
            "groups": len(groups),
            "consumers": sum(each.members for each in groups),
            "health": health,
            "running": None if recoveries is None else running(recoveries),
            "activity": activity,
            "written": chart(view.rates.of(WRITTEN), binary=True),
            "read": chart(view.rates.of(READ), binary=True),
        },
    )


async def _health(view: View) -> Health:
    """Without findings as long as nobody knows: the page is made anew soon."""
    return await view.health.soon(limits.PATIENCE_S) or Health((), UNKNOWN)


async def allowed(asked: Awaitable[T]) -> T | None:
    """The answer; None: the user may not see it, and the rest of the page is there all the same."""
    try:
        return await asked
    except NotAllowed:
        return None


def running(recoveries: list[RecoveryDescription]) -> list[RecoveryDescription]:
    """Those that have not ended."""
    return [each for each in recoveries if each.phase not in ENDED]


def owned(streams: list[StreamSummary]) -> Counter[int]:
    """How many streamlets each broker owns, of these streams."""
    counts: Counter[int] = Counter()
    for stream in streams:
        counts.update(stream.owners)
    return counts
