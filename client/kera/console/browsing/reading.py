"""Reads a page of records, with bounds on records, bytes, time, and parallel reads.

A page that has reached one of its bounds shows that, and the next page continues from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from kera.client import ChunkQuery, Client, ConsumerSettings, EntryBounds, Position, StreamDescription
from kera.console import limits
from kera.console.browsing.decoding import TAKEN_APART_BYTES_MAX
from kera.console.browsing.formats import Decoder
from kera.console.browsing.matching import Match
from kera.console.browsing.registered import ASKED_MAX
from kera.console.browsing.rows import SLICE_ROWS, Row, rows_in
from kera.console.browsing.windows import EntryKey, Marks, Newest, Stretch, pick
from kera.console.web import words
from kera.core.base.sizes import format_size
from kera.core.errors import DataLost, KeraError, NotAllowed

Bounds = dict[EntryKey, EntryBounds]
READ_AT_ONCE = 2
UNBOUNDED = 1 << 62
"""No bound, for reading forward, which stops when there are enough records."""
_STEP_MIN, _STEP_MAX = 500, 16_384
_DECODED_AT_ONCE = 32
"""Number of records that a filter decodes before other requests run."""
_SETTINGS: dict[str, Any] = {
    "shared_memory": "never",  # a page must not hold a broker's memory
    "corrupt_chunks": "skip",
    "prefetch_bytes_max": 1 << 20,
    "fetch_bytes_max": 1 << 20,
    "joined_bytes_max": 0,
    "decompressed_bytes_max": 64 << 20,
}


@dataclass(frozen=True)
class Wanted:
    """The wanted records of a page."""

    keys: Sequence[EntryKey]
    marks: Marks
    """Per entry, the ordinal from which (backward: before which) to look; other entries start at their first record
    (backward: at their end)."""
    backward: bool
    count: int = limits.RECORDS_PER_PAGE
    match: Match = field(default_factory=Match)
    turn: int = 0
    """The entry to begin with. It varies, so that the same entry does not always use up the page's budget."""
    decoder: Decoder = field(default_factory=Decoder)
    """The decoder of values for filters."""


@dataclass
class Found:
    """A page of records."""

    rows: list[tuple[EntryKey, Row]]
    marks: dict[EntryKey, int]
    """The marks of the next page."""
    more: bool
    """Whether there are more records to examine."""
    looked_at: int
    """Number of examined records."""
    remarks: list[str]
    """Reasons why there are not more rows."""


class _Budget:
    """The remaining budget of a page."""

    def __init__(self) -> None:
        self.deadline_s = asyncio.get_running_loop().time() + limits.BROWSE_TIMEOUT_S
        self.bytes_left = limits.BROWSE_BYTES_MAX
        self.records_left = limits.BROWSE_RECORDS_MAX

    @property
    def spent(self) -> str:
        """The exhausted part of the budget; empty: no part is exhausted."""
        if asyncio.get_running_loop().time() >= self.deadline_s:
            return f"{limits.BROWSE_TIMEOUT_S:.0f} s have passed"
        if self.bytes_left <= 0:
            return f"{limits.BROWSE_BYTES_MAX >> 20} MiB were read"
        return f"{limits.BROWSE_RECORDS_MAX} records were looked at" if self.records_left <= 0 else ""


async def bounds_of(client: Client, stream: StreamDescription, keys: Iterable[EntryKey]) -> Bounds:
    """Return where entries begin and end now."""
    known = await client.bounds(stream.name)
    return {key: known[key.streamlet][key.entry] for key in keys}


async def browse(client: Client, stream: StreamDescription, bounds: Bounds, wanted: Wanted) -> Found:
    """Read a page of records of some entries. Raises the errors of a consumer."""
    return await _Browsing(client, stream, bounds, wanted).page()


class _Browsing:
    def __init__(self, client: Client, stream: StreamDescription, bounds: Bounds, wanted: Wanted) -> None:
        self._client, self._stream, self._bounds, self._wanted = client, stream, bounds, wanted
        self._budget = _Budget()
        self._room = asyncio.Semaphore(READ_AT_ONCE)
        self._settings = ConsumerSettings.load(**_SETTINGS)
        self._looked_at = 0
        self._schemas_left = ASKED_MAX
        self._too_long = 0
        """Number of records whose values were too long for a filter to decode."""
        self._remarks: dict[str, None] = {}
        self._stretches = {key: self._empty(key) for key in wanted.keys}

    def _empty(self, key: EntryKey) -> Stretch[Row]:
        """Return the stretch of an entry before any record was examined."""
        bounds = self._bounds[key]
        mark = self._wanted.marks.get(key, bounds.next_record if self._wanted.backward else bounds.first_record)
        mark = min(max(mark, bounds.first_record), bounds.next_record)
        return Stretch(mark, mark)

    async def page(self) -> Found:
        wanted = self._wanted
        step = wanted.count if wanted.match.everything else _STEP_MIN
        open_ = [key for key in wanted.keys if self._is_open(key)]
        at = wanted.turn % len(open_) if open_ else 0
        open_ = open_[at:] + open_[:at]
        while open_ and not self._budget.spent:
            await self._round(open_, step)
            if sum(len(each.found) for each in self._stretches.values()) >= wanted.count:
                break
            open_ = [key for key in open_ if self._is_open(key)]
            step = min(step * 2, _STEP_MAX)
        rows, marks = pick(self._stretches, wanted.count, backward=wanted.backward)
        spent = self._budget.spent
        if spent and len(rows) < wanted.count and any(map(self._is_open, wanted.keys)):
            self._remarks[f"This page ends here, as {spent}."] = None
        if self._too_long:
            values, longest = words.plural(self._too_long, "value"), format_size(TAKEN_APART_BYTES_MAX)
            self._remarks[f"The filter does not see the fields of {values} of more than {longest}."] = None
        return Found(rows, marks, self._has_more(marks), self._looked_at, list(self._remarks))

    def _is_open(self, key: EntryKey) -> bool:
        stretch, bounds = self._stretches[key], self._bounds[key]
        return stretch.low > bounds.first_record if self._wanted.backward else stretch.high < bounds.next_record

    def _has_more(self, marks: Marks) -> bool:
        if self._wanted.backward:
            return any(mark > self._bounds[key].first_record for key, mark in marks.items())
        return any(mark < self._bounds[key].next_record for key, mark in marks.items())

    async def _round(self, keys: Sequence[EntryKey], step: int) -> None:
        """Examine `step` more records of each entry, as far as the budget allows."""
        windows = {key: self._window(key, step) for key in keys}
        starts = await self._starts({key: low for key, (low, _) in windows.items()})
        try:
            async with asyncio.TaskGroup() as group:
                for key, (low, high) in windows.items():
                    group.create_task(self._look(key, starts[key], low, high))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _window(self, key: EntryKey, step: int) -> tuple[int, int]:
        stretch, bounds = self._stretches[key], self._bounds[key]
        if self._wanted.backward:
            # The estimated size of the window has to fit into the page's budget.
            records = max(1, bounds.next_record - bounds.first_record)
            fitting = limits.BROWSE_BYTES_MAX * records // (2 * max(1, bounds.length_bytes))
            return max(bounds.first_record, stretch.low - max(1, min(step, fitting))), stretch.low
        return stretch.high, min(bounds.next_record, stretch.high + step)

    async def _starts(self, lows: Marks) -> dict[EntryKey, Position]:
        """Return chunk boundaries before these records, as close as possible."""
        starts = {key: self._bounds[key].start for key in lows}
        asked = {key: low - self._bounds[key].first_record for key, low in lows.items()}
        inner = [key for key, passed in asked.items() if passed > 0]
        queries = [ChunkQuery(*key, starts[key], self._bounds[key].end, records_max=asked[key]) for key in inner]
        if queries:
            for key, place in zip(inner, await self._client.locate(self._stream.name, queries), strict=True):
                if place.record <= lows[key]:
                    starts[key] = place.position
        return starts

    async def _look(self, key: EntryKey, start: Position, low: int, high: int) -> None:
        """Add the fitting records between two ordinals to the stretch, if the budget allows."""
        async with self._room:
            if self._budget.spent:
                return
            newest: Newest[Row] = Newest(limits.BROWSE_BYTES_MAX if self._wanted.backward else UNBOUNDED)
            reached = low
            try:
                async with asyncio.timeout_at(self._budget.deadline_s):
                    while True:
                        try:
                            reached = await self._read(key, start, low, high, newest)
                            break
                        except DataLost as error:
                            behind = _behind(error, start)
                            self._remarks[error.message] = None
                            if behind is None:
                                reached = high
                                break
                            start = behind
            except TimeoutError:
                if self._wanted.backward:
                    return  # the records after the part that was read are missing
                reached = max(low, newest.reached)
            except KeraError as error:
                if isinstance(error, NotAllowed) or not error.retriable:
                    raise
                self._remarks[f"Streamlet {key.streamlet} cannot be read: {error.message}"] = None
                return
        stretch, found = self._stretches[key], list(newest.rows)
        if self._wanted.backward:
            stretch.low, stretch.found = low if newest.low is None else newest.low, found + stretch.found
        else:
            stretch.high, stretch.found = max(reached, low), stretch.found + found

    async def _read(self, key: EntryKey, start: Position, low: int, high: int, newest: Newest[Row]) -> int:
        """Add rows to `newest`, and return the ordinal up to which records were read."""
        end, match, budget = self._bounds[key].end, self._wanted.match, self._budget
        reading = self._client.read_range(
            self._stream.name, *key, start, end, bytes_max=1 << 20, settings=self._settings
        )
        try:
            async for chunk in reading:
                header, count = chunk.header, chunk.batch.num_rows
                budget.bytes_left -= header.payload_bytes
                if count < header.record_count:
                    self._remarks[
                        f"{header.record_count - count} records from {header.first_record} on are damaged."
                    ] = None
                slice_rows = _DECODED_AT_ONCE if match.decodes else SLICE_ROWS
                for rows in rows_in(chunk, self._stream, max(low, newest.reached), high, slice_rows):
                    self._looked_at += len(rows)
                    budget.records_left -= len(rows)
                    if match.decodes:
                        await self._look_up(rows)
                    fitting = (row for row in rows if match.fits(row, key, self._wanted.decoder))
                    newest.add(fitting, header.payload_bytes // count)
                    newest.pass_by(rows[-1].offset + 1)
                    await asyncio.sleep(0)
                behind: int = header.first_record + max(count, header.record_count)
                if behind >= high:
                    return high
                if behind > low and not self._wanted.backward and budget.spent:
                    return behind
        finally:
            await reading.aclose()  # type: ignore[attr-defined]  # a generator's
        return high

    async def _look_up(self, rows: Sequence[Row]) -> None:
        """Look up the schemas that these records name, up to the page's limit."""
        self._too_long += sum(1 for row in rows if len(row.value or b"") > TAKEN_APART_BYTES_MAX)
        if self._schemas_left:
            values = chain.from_iterable((row.value, *row.keys) for row in rows)
            self._schemas_left -= await self._wanted.decoder.look_up(values, self._schemas_left)
            if not self._schemas_left:
                self._remarks[
                    f"The filter decodes by {ASKED_MAX} new schemas a page at most; values of others have no fields."
                ] = None


def _behind(error: DataLost, start: Position) -> Position | None:
    """Return the place after a loss where records are available; None: it is unknown."""
    try:
        available = Position(*error.attributes["available_from"])
    except (KeyError, TypeError):
        return None
    return available if available > start else None
