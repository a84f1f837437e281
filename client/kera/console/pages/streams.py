"""Streams: a list in pages, and one stream in full."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from starlette.responses import Response

from kera.client import ClusterDescription, ConsumerGroupSummary, EntryBounds, StreamConfig, StreamDescription
from kera.client.admin.watching import StreamSummary
from kera.client.epochs.settled import Settled, settled_entries
from kera.console import limits
from kera.console.pages.paging import Order, ordered, paged, parse_order
from kera.console.visits import Visit
from kera.console.watching.sizes import Size, size_of
from kera.console.watching.view import View
from kera.console.web.problems import within
from kera.console.web.words import second
from kera.core.base.internal_names import is_internal
from kera.core.base.spans import format_ms
from kera.core.errors import KeraError, NotAllowed, UnknownStream

WAITED_FOR_SHOWN = 5
LATE_MS = 2_000
"""Time, in addition to the grace, that a stream's entries may be behind the clock before the stream counts as late."""


class Epochs(NamedTuple):
    """How far a stream is settled."""

    entries: dict[tuple[int, int], Settled]
    """The entries by streamlet and number; the one that the next epoch waits for comes first."""
    by_clock: bool
    is_late: bool
    """Whether the first entry should be further."""
    now_us: int

    @property
    def waited_for(self) -> list[Settled]:
        """The entries that are furthest behind."""
        return [each for each in self.entries.values() if each.holds_up][:WAITED_FOR_SHOWN]

    def told(self, streamlet_id: int, entry: int) -> str:
        """Describe how far an entry is settled: how far it is behind the clock, or the time that it has reached.

        The latter is for a stream that does not follow the clock, such as a history.
        """
        found = self.entries.get((streamlet_id, entry))
        if found is None or found.settled_us is None:
            return "–"
        if self.by_clock:
            return f"{format_ms(found.behind_ms(self.now_us) or 0)} behind"
        return second(found.settled_us)


ORDERS: Mapping[str, Callable[[StreamSummary], Any]] = {
    "name": lambda stream: stream.name,
    "streamlets": lambda stream: stream.streamlets,
    "entries": lambda stream: stream.entries,
    "replicas": lambda stream: stream.replication,
    "durability": lambda stream: stream.durability,
    "retention": lambda stream: (stream.retention_ms or float("inf"), stream.retention_bytes or float("inf")),
    "values": lambda stream: stream.typed,
    "created": lambda stream: stream.created_us,
}
"""The columns by which the list of streams can be sorted, besides those of `SIZE_ORDERS`."""
SIZE_ORDERS: Mapping[str, Callable[[Size], int]] = {
    "records": lambda size: size.records,
    "size": lambda size: size.bytes,
}


async def list_streams(visit: Visit) -> Response:
    """Show a page of the streams with a text in their name, sorted by a column."""
    wanted = visit.parameters.text("q").strip()
    number = visit.parameters.whole("page", 1, 1, 1_000_000)
    order = parse_order(visit.parameters.text("sort"), [*ORDERS, *SIZE_ORDERS], "name")
    streams = await visit.view.streams.get()
    shown = streams if visit.internal else [each for each in streams if not is_internal(each.name)]
    found = [each for each in shown if wanted.casefold() in each.name.casefold()] if wanted else shown
    found, sizes = await _sorted(visit.view, found, order)
    page = paged(found, number)
    return visit.page(
        "streams.html",
        {
            "page": page,
            "q": wanted,
            "order": order,
            "query": {"q": wanted, "sort": "" if order == Order("name") else str(order), **visit.kept},
            "all": len(shown),
            "internal_streams": sum(is_internal(each.name) for each in streams),
            "sizes": await visit.view.sizes.of([each.name for each in page.rows], limits.SIZES_PATIENCE_S)
            if sizes is None
            else sizes,
            "unknown": 0 if sizes is None else len(found) - len(sizes),
        },
    )


async def _sorted(
    view: View, streams: list[StreamSummary], order: Order
) -> tuple[list[StreamSummary], Mapping[str, Size] | None]:
    """Sort `streams`. Return them, and the known sizes if the order needs them."""
    if order.column in ORDERS:
        return (streams if order == Order("name") else ordered(streams, order, ORDERS[order.column])), None
    sizes, value = (
        await view.sizes.of([each.name for each in streams], limits.SORT_PATIENCE_S),
        SIZE_ORDERS[order.column],
    )
    return ordered(streams, order, lambda each: value(sizes[each.name]) if each.name in sizes else None), sizes


async def describe(visit: Visit) -> Response:
    """Show the settings of a stream, its streamlets with their brokers and contents, and its readers."""
    view, name = visit.view, visit.name()
    stream = await view.client.admin.describe_stream(name)
    groups, subjects, bounds = await asyncio.gather(view.groups.get(), _subjects(view), _bounds(view, name))
    page = paged(sorted(stream.assignments), visit.parameters.whole("page", 1, 1, 1_000_000))
    return visit.page(
        "stream.html",
        {
            "stream": stream,
            "size": None if isinstance(bounds, str) else size_of(bounds),
            "bounds": {} if isinstance(bounds, str) else bounds,
            "no_bounds": bounds if isinstance(bounds, str) else "",
            "epochs": None if isinstance(bounds, str) else epochs_of(stream, bounds, time.time_ns() // 1000),
            "page": page,
            "readers": readers(groups, name),
            "lags": {each: points[-1][1] for each in view.lags.watched if (points := view.lags.of(each))},
            "subjects": [each for each in (f"{name}-key", f"{name}-value") if each in subjects],
            "fields": list(stream.schema)[: limits.COLUMNS_SHOWN_MAX] if stream.typed else [],
        },
    )


def readers(groups: list[ConsumerGroupSummary], stream: str) -> list[ConsumerGroupSummary]:
    """Return the consumer groups that have begun to read a stream."""
    return [each for each in groups if stream in each.streams][: limits.ROWS_MAX]


def targets(cluster: ClusterDescription) -> list[int]:
    """Return the brokers to which a streamlet can move."""
    return [each.broker_id for each in cluster.brokers if each.alive and not each.draining]


def epochs_of(stream: StreamDescription, bounds: dict[int, list[EntryBounds]], now_us: int) -> Epochs | None:
    """Return how far a stream with epochs is settled; None: it has no epochs."""
    if not stream.config.epoch_ms:
        return None
    entries = {(each.streamlet_id, each.entry): each for each in settled_entries(stream.config, bounds)}
    by_clock = stream.config.punctuation == "clock"
    first = next(iter(entries.values()), None)
    is_late = by_clock and first is not None and _is_late(stream.config, first.behind_ms(now_us))
    return Epochs(entries, by_clock, is_late, now_us)


def _is_late(config: StreamConfig, behind_ms: int | None) -> bool:
    """Return whether an entry is later than its broker alone would make it; `behind_ms` None: its time is unknown."""
    return behind_ms is None or behind_ms > config.epoch_grace_ms + LATE_MS


async def _bounds(view: View, name: str) -> dict[int, list[EntryBounds]] | str:
    """Return where entries begin and end, or why that is unknown: the rest of the page does not need it."""
    try:
        async with within(limits.BOUNDS_TIMEOUT_S):
            return await view.client.bounds(name)
    except (NotAllowed, UnknownStream):
        raise
    except KeraError as error:
        return error.message


async def _subjects(view: View) -> list[str]:
    """Return all subjects; none if asking fails, because an older coordinator may have no registry."""
    try:
        return await view.subjects.get()
    except KeraError:
        return []
