"""Brokers and backups: their states, their data and their activity."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from kera.console.pages.overview import owned
from kera.console.visits import Visit


async def list_members(visit: Visit) -> Response:
    """Show all members of the cluster."""
    view = visit.view
    cluster, activity, streams = await asyncio.gather(view.cluster.get(), view.activities(), view.streams.get())
    return visit.page("members.html", {"cluster": cluster, "activity": activity, "owned": owned(streams)})
