"""The first page: the cluster's health, its brokers, and its activity."""

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
"""The severity before the health is known."""
ENDED = frozenset({"done", "cancelled"})


async def overview(visit: Visit) -> Response:
    """Show health, brokers, rates and running recoveries."""
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
    """Return the health, or `UNKNOWN` without findings until it is known: the page refreshes soon."""
    return await view.health.soon(limits.PATIENCE_S) or Health((), UNKNOWN)


async def allowed(asked: Awaitable[T]) -> T | None:
    """Return the answer; None: the user may not see it, and the rest of the page is shown without it."""
    try:
        return await asked
    except NotAllowed:
        return None


def running(recoveries: list[RecoveryDescription]) -> list[RecoveryDescription]:
    """Return the recoveries that have not ended."""
    return [each for each in recoveries if each.phase not in ENDED]


def owned(streams: list[StreamSummary]) -> Counter[int]:
    """Return how many streamlets of these streams each broker owns."""
    counts: Counter[int] = Counter()
    for stream in streams:
        counts.update(stream.owners)
    return counts
