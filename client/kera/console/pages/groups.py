"""Consumer groups: a list with their lags, and one group in full."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

from kera.client import ConsumerGroupSummary
from kera.console import limits
from kera.console.pages.paging import Order, ordered, paged, parse_order
from kera.console.visits import Visit
from kera.console.watching.view import lag_of
from kera.console.web.charts import chart
from kera.core.base.internal_names import is_internal

ORDERS: Mapping[str, Callable[[ConsumerGroupSummary], Any]] = {
    "name": lambda group: group.consumer_group,
    "consumers": lambda group: group.members,
    "idle": lambda group: None if group.members else group.idle_ms,
}
"""The columns by which the list of groups can be sorted, besides the lag."""


async def list_groups(visit: Visit) -> Response:
    """Show a page of the consumer groups with a text in their name, sorted by a column."""
    wanted = visit.parameters.text("q").strip()
    number = visit.parameters.whole("page", 1, 1, 1_000_000)
    order = parse_order(visit.parameters.text("sort"), [*ORDERS, "lag"], "name")
    groups = await visit.view.groups.get()
    shown = groups if visit.internal else [each for each in groups if not is_internal(each.consumer_group)]
    found = [each for each in shown if wanted.casefold() in each.consumer_group.casefold()] if wanted else shown
    lags = {name: points[-1][1] for name in visit.view.lags.watched if (points := visit.view.lags.of(name))}
    found = ordered(found, order, ORDERS.get(order.column, lambda each: lags.get(each.consumer_group)))
    page = paged(found, number)
    return visit.page(
        "groups.html",
        {
            "page": page,
            "q": wanted,
            "order": order,
            "query": {"q": wanted, "sort": "" if order == Order("name") else str(order), **visit.kept},
            "all": len(shown),
            "internal_groups": sum(is_internal(each.consumer_group) for each in groups),
            "lags": lags,
            "charts": {each.consumer_group: chart(visit.view.lags.of(each.consumer_group)) for each in page.rows},
        },
    )


async def describe(visit: Visit) -> Response:
    """Show the members of a consumer group, its progress, and its lag over time."""
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
