"""Streams: all of them, a page at a time, and one with what it is made of."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from starlette.responses import Response

from kera.client import ClusterDescription, ConsumerGroupSummary, EntryBounds, StreamDescription
from kera.console import limits
from kera.console.pages.paging import paged
from kera.console.visits import Visit
from kera.console.watching.view import View
from kera.console.web.problems import within
from kera.core.errors import KeraError, NotAllowed, UnknownStream

ASKED_AT_ONCE = 16
DETAILS_TIMEOUT_S = 0.1
"""How long a list waits for what brokers say: what has not come by then is as it was seen last, or left out."""
SEEN_MAX = 1_000
"""Streams of which that is remembered."""


class Size(NamedTuple):
    """What a stream has now."""

    records: int
    bytes: int


class Detail(NamedTuple):
    """What a list shows of a stream besides what the coordinator tells of all."""

    stream: StreamDescription
    size: Size


async def list_streams(visit: Visit) -> Response:
    """Streams with a text in their name, some at a time."""
    wanted = visit.parameters.text("q").strip()
    number = visit.parameters.whole("page", 1, 1, 1_000_000)
    streams = await visit.view.streams.get()
    found = [each for each in streams if wanted.casefold() in each.name.casefold()] if wanted else streams
    page = paged(found, number)
    details = await _details(visit.view, [each.name for each in page.rows])
    return visit.page("streams.html", {"page": page, "q": wanted, "all": len(streams), "details": details})


async def describe(visit: Visit) -> Response:
    """Settings of a stream, where its streamlets are and what is in them, and who reads it."""
    view, name = visit.view, visit.name()
    stream = await view.client.admin.describe_stream(name)
    cluster, groups, subjects, bounds = await asyncio.gather(
        view.cluster.get(), view.groups.get(), _subjects(view), _bounds(view, name)
    )
    page = paged(sorted(stream.assignments), visit.parameters.whole("page", 1, 1, 1_000_000))
    return visit.page(
        "stream.html",
        {
            "stream": stream,
            "size": None if isinstance(bounds, str) else size_of(bounds),
            "bounds": {} if isinstance(bounds, str) else bounds,
            "no_bounds": bounds if isinstance(bounds, str) else "",
            "page": page,
            "readers": readers(groups, name),
            "targets": targets(cluster),
            "subjects": [each for each in (f"{name}-key", f"{name}-value") if each in subjects],
            "fields": list(stream.schema)[: limits.COLUMNS_SHOWN_MAX] if stream.typed else [],
        },
    )


def readers(groups: list[ConsumerGroupSummary], stream: str) -> list[ConsumerGroupSummary]:
    """Consumer groups that have begun to read a stream."""
    return [each for each in groups if stream in each.streams][: limits.ROWS_MAX]


def targets(cluster: ClusterDescription) -> list[int]:
    """Brokers to which a streamlet can move."""
    return [each.broker_id for each in cluster.brokers if each.alive and not each.draining]


def size_of(bounds: dict[int, list[EntryBounds]]) -> Size:
    """What is in all entries."""
    entries = [entry for each in bounds.values() for entry in each]
    return Size(sum(e.next_record - e.first_record for e in entries), sum(e.length_bytes for e in entries))


async def _bounds(view: View, name: str) -> dict[int, list[EntryBounds]] | str:
    """Where entries begin and end, or why nobody says so: the rest of the page is good without."""
    try:
        async with within(limits.BOUNDS_TIMEOUT_S):
            return await view.client.bounds(name)
    except (NotAllowed, UnknownStream):
        raise
    except KeraError as error:
        return error.message


async def _subjects(view: View) -> list[str]:
    """Without any as long as nobody says which there are: a coordinator may be older than the registry."""
    try:
        return await view.subjects.get()
    except KeraError:
        return []


async def _details(view: View, names: Sequence[str]) -> dict[str, Detail]:
    """Of the streams of a page, as far as brokers say so quickly, or have said so before."""
    room, seen = asyncio.Semaphore(ASKED_AT_ONCE), view.last_seen

    async def ask(name: str) -> None:
        async with room:
            try:
                bounds = await view.client.bounds(name)
                seen[name] = Detail(await view.client.describe(name), size_of(bounds))
                seen.move_to_end(name)
            except (NotAllowed, UnknownStream):
                seen.pop(name, None)
            except KeraError:
                return

    tasks = [asyncio.ensure_future(ask(each)) for each in names]
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=DETAILS_TIMEOUT_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
    shown = {name: seen[name] for name in names if name in seen}
    while len(seen) > SEEN_MAX:
        seen.popitem(last=False)
    return shown
