"""Consumer groups: all of them with what they have yet to read, and one in full."""

from __future__ import annotations

from starlette.responses import Response

from kera.console import limits
from kera.console.pages.paging import paged
from kera.console.visits import Visit
from kera.console.watching.view import lag_of
from kera.console.web.charts import chart


async def list_groups(visit: Visit) -> Response:
    """Consumer groups with a text in their name, some at a time."""
    wanted = visit.parameters.text("q").strip()
    number = visit.parameters.whole("page", 1, 1, 1_000_000)
    groups = await visit.view.groups.get()
    found = [each for each in groups if wanted.casefold() in each.consumer_group.casefold()] if wanted else groups
    page = paged(found, number)
    lags = {each.consumer_group: visit.view.lags.of(each.consumer_group) for each in page.rows}
    return visit.page(
        "groups.html",
        {
            "page": page,
            "q": wanted,
            "all": len(groups),
            "lags": {name: points[-1][1] for name, points in lags.items() if points},
            "charts": {name: chart(points) for name, points in lags.items()},
        },
    )


async def describe(visit: Visit) -> Response:
    """Members of a consumer group, how far it is, and its lag over time."""
    name = visit.parameters.text("name", None, length_max=1024)
    group = await visit.view.describe_group(name)
    streams = sorted({each.stream for each in group.entries})
    return visit.page(
        "group.html",
        {
            "group": group,
            "streams": streams,
            "lag": lag_of(group),
            "chart": chart(visit.view.lags.of(name)),
            "entries": group.entries[: limits.ROWS_MAX],
            "entries_left_out": max(0, len(group.entries) - limits.ROWS_MAX),
            "members": group.members[: limits.ROWS_MAX],
            "members_left_out": max(0, len(group.members) - limits.ROWS_MAX),
        },
    )
