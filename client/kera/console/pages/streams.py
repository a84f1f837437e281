"""Streams: all of them, a page at a time, and one with what it is made of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from starlette.responses import Response

from kera.client import ClusterDescription, ConsumerGroupSummary, EntryBounds, StreamConfig, StreamDescription
from kera.client.epochs.settled import Settled, settled_entries
from kera.console import limits
from kera.console.pages.paging import paged
from kera.console.visits import Visit
from kera.console.watching.view import View
from kera.console.web.problems import within
from kera.console.web.words import milliseconds, second
from kera.core.errors import KeraError, NotAllowed, UnknownStream
from kera.core.punctuation import EPOCH_GRACE_MS, TIMESTAMP_AHEAD_MAX_MS

ASKED_AT_ONCE = 16
DETAILS_TIMEOUT_S = 0.1
"""How long a list waits for what brokers say: what has not come by then is as it was seen last, or left out."""
SEEN_MAX = 1_000
"""Streams of which that is remembered."""


DEFAULTS = {"epoch_grace_ms": EPOCH_GRACE_MS, "timestamp_ahead_max_ms": TIMESTAMP_AHEAD_MAX_MS}
"""Of settings, for whoever leaves them out."""
WAITED_FOR_SHOWN = 5
LATE_MS = 2_000
"""So much more than its grace a stream's entries may be behind the clock, before somebody should look at it."""


class Size(NamedTuple):
    """What a stream has now."""

    records: int
    bytes: int


class Detail(NamedTuple):
    """What a list shows of a stream besides what the coordinator tells of all."""

    stream: StreamDescription
    size: Size


class Epochs(NamedTuple):
    """How far a stream is settled."""

    entries: dict[tuple[int, int], Settled]
    """By streamlet and entry, the one for which the next epoch waits first."""
    by_clock: bool
    is_late: bool
    """The first one should be further."""
    now_us: int

    @property
    def waited_for(self) -> list[Settled]:
        """Those that are furthest behind."""
        return [each for each in self.entries.values() if each.holds_up][:WAITED_FOR_SHOWN]

    def told(self, streamlet_id: int, entry: int) -> str:
        """Of an entry: how far it is behind the clock; of a history, whose times are not now, up to when it goes."""
        found = self.entries.get((streamlet_id, entry))
        if found is None or found.settled_us is None:
            return "–"
        if self.by_clock:
            return f"{milliseconds(found.behind_ms(self.now_us) or 0)} behind"
        return second(found.settled_us)


async def list_streams(visit: Visit) -> Response:
    """Streams with a text in their name, some at a time."""
    wanted = visit.parameters.text("q").strip()
    number = visit.parameters.whole("page", 1, 1, 1_000_000)
    streams = await visit.view.streams.get()
    found = [each for each in streams if wanted.casefold() in each.name.casefold()] if wanted else streams
    page = paged(found, number)
    details = await _details(visit.view, [each.name for each in page.rows])
    shown = {"page": page, "q": wanted, "all": len(streams), "details": details, "defaults": DEFAULTS}
    return visit.page("streams.html", shown)


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
            "epochs": None if isinstance(bounds, str) else epochs_of(stream, bounds, time.time_ns() // 1000),
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


def epochs_of(stream: StreamDescription, bounds: dict[int, list[EntryBounds]], now_us: int) -> Epochs | None:
    """How far a stream with epochs is settled; None: it has none."""
    if not stream.config.epoch_ms:
        return None
    entries = {(each.streamlet_id, each.entry): each for each in settled_entries(stream.config, bounds)}
    by_clock = stream.config.punctuation == "clock"
    first = next(iter(entries.values()), None)
    is_late = by_clock and first is not None and _is_late(stream.config, first.behind_ms(now_us))
    return Epochs(entries, by_clock, is_late, now_us)


def _is_late(config: StreamConfig, behind_ms: int | None) -> bool:
    """Whether an entry is further behind the clock than its broker would be by itself; None: nobody says anything."""
    return behind_ms is None or behind_ms > config.epoch_grace_ms + LATE_MS


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
