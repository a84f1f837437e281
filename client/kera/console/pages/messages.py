"""The message browser: the records of a stream, and one record in full.

Both pages decode values according to the parameter ``value``. A record's place is its streamlet, its entry if
streamlets have several, and its offset, which is its ordinal in the entry.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import quote

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kera.client import StreamDescription
from kera.console import limits
from kera.console.browsing.decoding import Shown, brief, shown, shown_cell, shown_columns
from kera.console.browsing.filters.parsing import LENGTH_MAX, FilterError, parse
from kera.console.browsing.formats import AUTO, FORMATS, Decoder
from kera.console.browsing.matching import Match
from kera.console.browsing.reading import Bounds, Found, Wanted, bounds_of, browse
from kera.console.browsing.registered import Registered
from kera.console.browsing.rows import Row
from kera.console.browsing.windows import MARKS_TEXT_MAX, EntryKey, marks_from_text, marks_to_text
from kera.console.rendering import address, stream_path
from kera.console.visits import Visit
from kera.console.web.parameters import NUMBER_MAX, Parameters
from kera.console.web.problems import Refused, within

FROM = {"newest": "Newest", "oldest": "Oldest", "time": "A time", "offset": "An offset"}
_FROM_ALIASES = {"position": "offset"}
BROWSE_WAIT_S = 5.0
READ_TIMEOUT_S = limits.BOUNDS_TIMEOUT_S + limits.BROWSE_TIMEOUT_S + 1
"""Time limit for a request that occupies one of the places for browsing."""
SCHEMAS_TIMEOUT_S = 1.0
CELL_MAX = 200
_BRIEF_MAX = 200
_DECODED_KINDS = {"msgpack", "avro", "protobuf"}
"""Kinds of values with bytes that are not text."""
_NEXT = "marks"


class Line(NamedTuple):
    """A record in the table."""

    key: EntryKey
    row: Row
    value: Shown
    keys: list[str]
    cells: list[Shown]
    """The values of all columns, in a typed stream."""
    brief: str
    """The value in one line."""


async def browse_messages(visit: Visit) -> Response:
    """Show a page of records."""
    stream = await visit.view.client.admin.describe_stream(visit.name())
    asked = _Asked(visit.parameters, stream)
    decoder = Decoder(asked.format, visit.view.registered)
    if asked.filter_error is not None:
        return _messages_page(visit, stream, asked, Found([], {}, more=False, looked_at=0, remarks=[]), [], status=400)
    async with _room(visit), within(READ_TIMEOUT_S):
        bounds = await bounds_of(visit.view.client, stream, asked.keys)
        marks, turn, losses = await _marks(visit, stream, asked, bounds)
        wanted = Wanted(asked.keys, marks, asked.start == "newest", asked.count, asked.match, turn, decoder)
        found = await browse(visit.view.client, stream, bounds, wanted)
    registered = await _look_up(visit, [row for _, row in found.rows])
    lines = []
    for key, row in found.rows:
        lines.append(_line(key, row, asked.columns, registered, decoder))
        await asyncio.sleep(0)  # lets other requests run
    more = _more(stream, asked, found, turn) if found.more else ""
    found.remarks += losses
    return _messages_page(visit, stream, asked, found, lines, more)


def _messages_page(
    visit: Visit,
    stream: StreamDescription,
    asked: _Asked,
    found: Found,
    lines: list[Line],
    more: str = "",
    status: int = 200,
) -> Response:
    return visit.page(
        "messages.html",
        {
            "stream": stream,
            "asked": asked,
            "starts": FROM,
            "formats": FORMATS,
            "filter_max": LENGTH_MAX,
            "found": found,
            "lines": lines,
            "columns": asked.columns,
            "columns_left_out": len(stream.schema.names) - len(asked.columns) if stream.typed else 0,
            "entries_left_out": asked.left_out,
            "more": more,
        },
        status=status,
    )


async def show_record(visit: Visit) -> Response:
    """Show one record, with as much of its value as possible."""
    chosen = visit.parameters.choice("value", FORMATS, AUTO)
    one = await _one(visit)
    row = one.row
    registered = await _look_up(visit, [row])
    if row.columns is None:
        value = Decoder(chosen, registered).shown(row.value, limits.RECORD_SHOWN_MAX)
    else:
        value = shown_columns(row.json(limits.RECORD_SHOWN_MAX), limits.RECORD_SHOWN_MAX)
    by_schema = chosen in {AUTO, "schema"} and registered.shown(row.value, limits.RECORD_SHOWN_MAX) is not None
    return visit.page(
        "record.html",
        {
            "stream": one.stream,
            "key": one.key,
            "row": row,
            "has_previous": row.offset > one.first_offset,
            "has_next": row.offset + 1 < one.next_offset,
            "value": value,
            "chosen": chosen,
            "formats": FORMATS,
            "schema": registered.schema_of(row.value) if by_schema else None,
            "headers": [(name, shown(each, limits.VALUE_SHOWN_MAX)) for name, each in row.headers[: limits.ROWS_MAX]],
            "headers_left_out": max(0, len(row.headers) - limits.ROWS_MAX),
            "keys": [
                registered.shown(each, limits.VALUE_SHOWN_MAX) or shown(each, limits.VALUE_SHOWN_MAX)
                for each in row.keys[: limits.ROWS_MAX]
            ],
        },
    )


async def download(visit: Visit) -> Response:
    """Send the bytes of a value. A browser saves them to a file, and never shows them as one of our pages."""
    places = visit.house.downloads
    if places.locked():
        raise Refused(
            503,
            "Too many values are downloaded now",
            f"{limits.DOWNLOADS_MAX} values are downloaded at a time.",
            "Try again in a moment.",
        )
    await places.acquire()
    try:
        one = await _one(visit)
        if one.row.value is None:
            raise Refused(404, "There is no value", f"Record {one.row.offset} has no value, or is a row of columns.")
        name = f"{one.stream.name}-{one.key.streamlet}-{one.key.entry}-{one.row.offset}.bin"
        headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}"}
        return _Download(one.row.value, headers, places)
    except BaseException:
        places.release()
        raise


class _Download(Response):
    """A value that keeps its place among the downloads until it is sent, or its connection has ended."""

    media_type = "application/octet-stream"

    def __init__(self, value: bytes, headers: dict[str, str], places: asyncio.Semaphore) -> None:
        super().__init__(value, headers=headers)
        self._places = places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._places.release()


class _Asked:
    """The parameters of a page."""

    def __init__(self, parameters: Parameters, stream: StreamDescription) -> None:
        start = parameters.choice("from", (*FROM, *_FROM_ALIASES), "newest")
        self.start = _FROM_ALIASES.get(start, start)
        self.format = parameters.choice("value", FORMATS, AUTO)
        self.streamlet = parameters.optional("streamlet", 0, stream.config.streamlets - 1)
        self.entry = parameters.optional("entry", 0, stream.config.entries - 1)
        self.count = parameters.whole("count", limits.RECORDS_PER_PAGE, 1, limits.RECORDS_PER_PAGE_MAX)
        since_us = parameters.moment("time") if self.start == "time" else None
        self.filter = parameters.text("filter", length_max=LENGTH_MAX)
        self.filter_error: FilterError | None = None
        condition = None
        if self.filter.strip():
            try:
                condition = parse(self.filter)
            except FilterError as error:
                self.filter_error = error
        self.match = Match(parameters.text("key"), parameters.text("text"), since_us, condition)
        self.time = parameters.text("time")
        self.offset = parameters.optional("offset")
        self.marks = parameters.text(_NEXT, length_max=MARKS_TEXT_MAX)
        self.keys, self.left_out = self._entries(stream)
        if self.start == "offset" and self.offset is None:
            self.offset = 0
        self.columns = stream.schema.names[: limits.COLUMNS_SHOWN_MAX] if stream.typed else []

    def _entries(self, stream: StreamDescription) -> tuple[list[EntryKey], int]:
        """Return the entries whose records are shown, and the number of other entries."""
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
        """Return these parameters for the address of another page, with `others` added."""
        return {
            "from": self.start,
            "streamlet": self.streamlet,
            "entry": self.entry,
            "count": self.count if self.count != limits.RECORDS_PER_PAGE else None,
            "key": self.match.key,
            "text": self.match.text,
            "filter": self.filter,
            "value": self.format if self.format != AUTO else None,
            "time": self.time if self.start == "time" else None,
            "offset": self.offset if self.start == "offset" else None,
            **others,
        }


class _room:  # noqa: N801 - it reads as a function: async with _room(visit)
    """One of the places for browsing at the same time."""

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
) -> tuple[dict[EntryKey, int], int, list[str]]:
    """Return where to begin in each entry, the first entry, and remarks on losses there, because these have no time."""
    if asked.marks:
        return *marks_from_text(asked.marks, asked.keys), []
    if asked.start == "offset":
        return dict.fromkeys(asked.keys, asked.offset or 0), 0, []
    if asked.match.since_us is not None:
        places = await visit.view.client.positions_at(stream.name, asked.match.since_us)
        found = {key: places[key.streamlet][key.entry] for key in bounds}
        lost = sorted({key.streamlet for key, place in found.items() if place.lost_from is not None})
        told = "Records right before the first one are lost, and may have been of that time: streamlet"
        losses = [f"{told} {', '.join(map(str, lost))}."] if lost else []
        return {key: place.record for key, place in found.items()}, 0, losses
    return {}, 0, []


def _more(stream: StreamDescription, asked: _Asked, found: Found, turn: int) -> str:
    """Return the address of the next page; empty: its marks are too long for an address."""
    text = marks_to_text(found.marks, turn + 1 if found.remarks else turn)
    path = stream_path(stream.name, "messages")
    return address(path, **asked.parameters(**{_NEXT: text})) if len(text) <= MARKS_TEXT_MAX else ""


async def _look_up(visit: Visit, rows: Sequence[Row]) -> Registered:
    """Look up the schemas that keys and values of records name, within `SCHEMAS_TIMEOUT_S`."""
    registered = visit.view.registered
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SCHEMAS_TIMEOUT_S):
            await registered.look_up(chain.from_iterable((row.value, *row.keys) for row in rows))
    return registered


def _line(key: EntryKey, row: Row, columns: list[str], registered: Registered, decoder: Decoder) -> Line:
    cells = [shown_cell(row.cell(name, CELL_MAX), CELL_MAX) for name in columns] if row.columns is not None else []
    value = decoder.shown(row.value, limits.VALUE_SHOWN_MAX)
    names_schema = value.kind == "json" and (row.value or b"")[:1] == b"\x00"
    decoded = names_schema or value.kind in _DECODED_KINDS
    in_one_line = " ".join(value.text[:_BRIEF_MAX].split()) if decoded else brief(row.value)
    return Line(key, row, value, [_key(each, registered) for each in row.keys], cells, in_one_line)


def _key(key: bytes | None, registered: Registered) -> str:
    """Return a key in one line."""
    named = registered.shown(key, CELL_MAX)
    return brief(key) if named is None else " ".join(named.text.split())


class _One(NamedTuple):
    """A record with its stream, its entry, and the bounds of the entry."""

    stream: StreamDescription
    key: EntryKey
    row: Row
    first_offset: int
    """First offset of the entry."""
    next_offset: int
    """Offset of the next record that the entry will get."""


async def _one(visit: Visit) -> _One:
    """Read the record that an address names. Raises `Refused` if it does not exist."""
    stream = await visit.view.client.admin.describe_stream(visit.name())
    key = EntryKey(
        visit.parameters.whole("streamlet", None, 0, stream.config.streamlets - 1),
        visit.parameters.whole("entry", 0, 0, stream.config.entries - 1),
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
                    return _One(stream, key, row, known.first_record, known.next_record)
    entry = f", entry {key.entry}" if stream.config.entries > 1 else ""
    has = f"offsets {known.first_record} to {known.next_record - 1}"
    raise Refused(
        404,
        "There is no such record",
        f"Streamlet {key.streamlet}{entry} of {stream.name} has"
        f" {has if known.next_record > known.first_record else 'no records'}; offset {offset} cannot be read.",
    )
