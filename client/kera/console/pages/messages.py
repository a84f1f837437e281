"""The message browser: records of a stream, and one of them in full."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import quote

from starlette.responses import Response

from kera.client import ChunkPlace, StreamDescription
from kera.console import limits
from kera.console.browsing.decoding import Shown, brief, shown, shown_cell, shown_columns
from kera.console.browsing.matching import Match
from kera.console.browsing.reading import Bounds, Found, Wanted, bounds_of, browse
from kera.console.browsing.registered import Registered
from kera.console.browsing.rows import Row
from kera.console.browsing.windows import MARKS_TEXT_MAX, EntryKey, marks_from_text, marks_to_text
from kera.console.rendering import address, stream_path
from kera.console.visits import Visit
from kera.console.web.parameters import NUMBER_MAX, Parameters
from kera.console.web.problems import Refused, within

FROM = {"newest": "Newest", "oldest": "Oldest", "time": "From a time", "position": "From a position"}
BROWSE_WAIT_S = 5.0
READ_TIMEOUT_S = limits.BOUNDS_TIMEOUT_S + limits.BROWSE_TIMEOUT_S + 1
"""How long somebody keeps a place among those who browse."""
SCHEMAS_TIMEOUT_S = 1.0
CELL_MAX = 200
_NEXT = "marks"


class Line(NamedTuple):
    """A record in the table."""

    key: EntryKey
    row: Row
    value: Shown
    keys: list[str]
    cells: list[Shown]
    """Of a typed stream, a value of each column."""


async def browse_messages(visit: Visit) -> Response:
    """A page of records."""
    stream = await visit.view.client.admin.describe_stream(visit.name())
    asked = _Asked(visit.parameters, stream)
    async with _room(visit), within(READ_TIMEOUT_S):
        bounds = await bounds_of(visit.view.client, stream, asked.keys)
        marks, turn = await _marks(visit, stream, asked, bounds)
        wanted = Wanted(asked.keys, marks, asked.start == "newest", asked.count, asked.match, turn)
        found = await browse(visit.view.client, stream, bounds, wanted)
    registered = await _look_up(visit, [row for _, row in found.rows])
    columns = stream.schema.names[: limits.COLUMNS_SHOWN_MAX] if stream.typed else []
    lines = []
    for key, row in found.rows:
        lines.append(_line(key, row, columns, registered))
        await asyncio.sleep(0)  # others are to get their pages, too
    return visit.page(
        "messages.html",
        {
            "stream": stream,
            "asked": asked,
            "starts": FROM,
            "found": found,
            "lines": lines,
            "columns": columns,
            "columns_left_out": len(stream.schema.names) - len(columns) if stream.typed else 0,
            "entries_left_out": asked.left_out,
            "more": _more(stream, asked, found, turn) if found.more else "",
        },
    )


async def show_record(visit: Visit) -> Response:
    """One record, with all of its value that can be shown."""
    stream, key, row = await _one(visit)
    registered = await _look_up(visit, [row])
    value = registered.shown(row.value, limits.RECORD_SHOWN_MAX)
    schema = None if value is None else registered.schema_of(row.value)
    if row.columns is not None:
        value = shown_columns(row.columns, limits.RECORD_SHOWN_MAX)
    return visit.page(
        "record.html",
        {
            "stream": stream,
            "key": key,
            "row": row,
            "value": value or shown(row.value, limits.RECORD_SHOWN_MAX),
            "schema": schema,
            "headers": [(name, shown(each, limits.VALUE_SHOWN_MAX)) for name, each in row.headers[: limits.ROWS_MAX]],
            "keys": [
                registered.shown(each, limits.VALUE_SHOWN_MAX) or shown(each, limits.VALUE_SHOWN_MAX)
                for each in row.keys[: limits.ROWS_MAX]
            ],
        },
    )


async def download(visit: Visit) -> Response:
    """The bytes of a value. A browser keeps them in a file: it never shows them as a page of ours."""
    stream, key, row = await _one(visit)
    if row.value is None:
        raise Refused(404, "There is no value", f"Record {row.offset} has none, or is a row of columns.")
    name = f"{stream.name}-{key.streamlet}-{key.entry}-{row.offset}.bin"
    headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}"}
    return Response(row.value, media_type="application/octet-stream", headers=headers)


class _Asked:
    """What the parameters of a page say."""

    def __init__(self, parameters: Parameters, stream: StreamDescription) -> None:
        self.start = parameters.choice("from", FROM, "newest")
        self.streamlet = parameters.optional("streamlet", 0, stream.config.streamlets - 1)
        self.entry = parameters.optional("entry", 0, stream.config.entries - 1)
        self.count = parameters.whole("count", limits.RECORDS_PER_PAGE, 1, limits.RECORDS_PER_PAGE_MAX)
        since_us = parameters.moment("time") if self.start == "time" else None
        self.match = Match(parameters.text("key"), parameters.text("text"), since_us)
        self.time = parameters.text("time")
        self.offset = parameters.optional("offset")
        self.marks = parameters.text(_NEXT, length_max=MARKS_TEXT_MAX)
        self.keys, self.left_out = self._entries(stream)
        if self.start == "position" and self.offset is None:
            self.offset = parameters.whole("offset", 0)

    def _entries(self, stream: StreamDescription) -> tuple[list[EntryKey], int]:
        """Those whose records are shown, and how many there are besides."""
        streamlets = range(stream.config.streamlets) if self.streamlet is None else [self.streamlet]
        entries = range(stream.config.entries) if self.entry is None else [self.entry]
        total = len(streamlets) * len(entries)
        keys: list[EntryKey] = []
        for streamlet in streamlets:
            keys += [EntryKey(streamlet, entry) for entry in entries][: limits.BROWSE_ENTRIES_MAX - len(keys)]
            if len(keys) == limits.BROWSE_ENTRIES_MAX:
                break
        return keys, total - len(keys)

    def parameters(self, **others: Any) -> dict[str, Any]:
        """Of a page with the same."""
        return {
            "from": self.start,
            "streamlet": self.streamlet,
            "entry": self.entry,
            "count": self.count if self.count != limits.RECORDS_PER_PAGE else None,
            "key": self.match.key,
            "text": self.match.text,
            "time": self.time if self.start == "time" else None,
            "offset": self.offset if self.start == "position" else None,
            **others,
        }


class _room:  # noqa: N801 - reads as what it is: async with _room(visit)
    """A place among those who browse at a time."""

    def __init__(self, visit: Visit) -> None:
        self._places = visit.house.browsing

    async def __aenter__(self) -> None:
        try:
            async with asyncio.timeout(BROWSE_WAIT_S):
                await self._places.acquire()
        except TimeoutError:
            raise Refused(
                503,
                "Too many people read records now",
                f"{limits.BROWSINGS_MAX} pages of records are read at a time.",
                "Try again in a moment.",
            ) from None

    async def __aexit__(self, *_: object) -> None:
        self._places.release()


async def _marks(
    visit: Visit, stream: StreamDescription, asked: _Asked, bounds: Bounds
) -> tuple[dict[EntryKey, int], int]:
    if asked.marks:
        return marks_from_text(asked.marks, asked.keys)
    if asked.start == "position":
        return dict.fromkeys(asked.keys, asked.offset or 0), 0
    if asked.match.since_us is not None:
        places = await visit.view.client.positions_at(stream.name, asked.match.since_us)
        return {key: _record_at(places, key) for key in bounds}, 0
    return {}, 0


def _record_at(places: dict[int, list[ChunkPlace]], key: EntryKey) -> int:
    return places[key.streamlet][key.entry].record


def _more(stream: StreamDescription, asked: _Asked, found: Found, turn: int) -> str:
    """Where the next page is; empty: its place is too long for an address."""
    text = marks_to_text(found.marks, turn + 1 if found.remarks else turn)
    path = stream_path(stream.name, "messages")
    return address(path, **asked.parameters(**{_NEXT: text})) if len(text) <= MARKS_TEXT_MAX else ""


async def _look_up(visit: Visit, rows: Sequence[Row]) -> Registered:
    """Learn the schemas that keys and values of records name, if that can be done quickly."""
    registered = visit.view.registered
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SCHEMAS_TIMEOUT_S):
            await registered.look_up(chain.from_iterable((row.value, *row.keys) for row in rows))
    return registered


def _line(key: EntryKey, row: Row, columns: list[str], registered: Registered) -> Line:
    cells = [shown_cell(row.columns[name], CELL_MAX) for name in columns] if row.columns is not None else []
    value = registered.shown(row.value, limits.VALUE_SHOWN_MAX) or shown(row.value, limits.VALUE_SHOWN_MAX)
    return Line(key, row, value, [_key(each, registered) for each in row.keys], cells)


def _key(key: bytes | None, registered: Registered) -> str:
    """In one line."""
    named = registered.shown(key, CELL_MAX)
    return brief(key) if named is None else " ".join(named.text.split())


async def _one(visit: Visit) -> tuple[StreamDescription, EntryKey, Row]:
    """The record that an address names. Raises `Refused` if it is not there."""
    stream = await visit.view.client.admin.describe_stream(visit.name())
    key = EntryKey(
        visit.parameters.whole("streamlet", None, 0, stream.config.streamlets - 1),
        visit.parameters.whole("entry", None, 0, stream.config.entries - 1),
    )
    offset = visit.parameters.whole("offset", None, 0, NUMBER_MAX - 1)
    async with _room(visit), within(READ_TIMEOUT_S):
        bounds = await bounds_of(visit.view.client, stream, [key])
        known = bounds[key]
        if known.first_record <= offset < known.next_record:
            found = await browse(
                visit.view.client, stream, bounds, Wanted([key], {key: offset}, backward=False, count=1)
            )
            for _, row in found.rows:
                if row.offset == offset:
                    return stream, key, row
    raise Refused(
        404,
        "There is no such record",
        f"Streamlet {key.streamlet}, entry {key.entry} of {stream.name} has the records from {known.first_record} up to"
        f" {known.next_record}, and {offset} cannot be read.",
    )
