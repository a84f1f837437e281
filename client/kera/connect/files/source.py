"""Files as the source of a copy: one part, in the order of their names; `places` defines places.

Records of text files are copied once they have their end. A last record without an end is copied, too, if the copy does
not follow, no process has the file open for writing, and the record is syntactically complete: a closed JSON object, or
a row of CSV without an open quote. If the file later continues within that record, the next start of the copy ends with
an error: a record is never copied in two halves.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from kera.connect.endpoints import FilesEnd
from kera.connect.errors import Refused, SourceChanged
from kera.connect.files.places import Spot, check_order, find_files
from kera.connect.files.reading import BLOCK_BYTES, Reading, reading_of, schema_of, translated
from kera.connect.files.text import Position, has_writer
from kera.connect.pieces import Piece, Place, Span
from kera.connect.worker import Worker
from kera.core.errors import SchemaMismatch
from kera.core.format.schema import DEFAULT_SCHEMA

PART = "files"
LOOK_S = 0.2
"""Pause between two looks at followed files."""
PAUSE_S = 0.02


class _Files(NamedTuple):
    """The files to read. It differs after any change that shows without reading the files."""

    names: list[str]
    stats: list[tuple[int, int, int]]
    """Size, time of the last change in nanoseconds, inode."""

    @property
    def sizes(self) -> list[int]:
        return [size for size, _, _ in self.stats]


class FilesSource:
    """See `kera.connect.pieces.Source`."""

    may_shrink = False
    streamlets = 0

    def __init__(
        self, end: FilesEnd, wanted: pa.Schema | None, *, follow: bool = False, inferred: bool = False
    ) -> None:
        """`wanted`: the columns of the target, if it exists; `inferred`: they were inferred from the files."""
        self.shown = end.shown
        self.notes: list[str] = []
        self.identity = f"files {Path(end.path).absolute()}" + ("/" if end.path.endswith("/") else "")
        self.schema = pa.schema([])
        self._end = end
        self._wanted = wanted
        self._follow = follow
        self._inferred = inferred or wanted is None
        self._files = _Files([], [])
        self._worker = Worker("files")

    async def open(self) -> None:
        """See `Source`. Raises `Refused`, `SchemaMismatch`."""
        await self._worker.call(self._open)

    def _open(self) -> None:
        self._files = self._find()
        schema = self._wanted if self._wanted is not None else schema_of(self._files.names[0], self._end.format)
        self.schema = DEFAULT_SCHEMA if schema.equals(DEFAULT_SCHEMA) else schema

    def _find(self) -> _Files:
        names = find_files(self._end)
        try:
            found = [os.stat(name) for name in names]  # noqa: PTH116 - names
        except OSError as error:
            raise Refused(f"{error.filename} cannot be read: {error.strerror}") from error
        return _Files(names, [(each.st_size, each.st_mtime_ns, each.st_ino) for each in found])

    async def close(self) -> None:
        """See `Source`."""
        self._worker.close()

    async def left(self, places: Mapping[str, Place]) -> int | None:
        """See `Source`. Only files of Parquet have the number of their rows."""
        return await self._worker.call(self._left, places.get(PART)) if self._end.format == "parquet" else None

    def _left(self, place: Place) -> int:
        spot = Spot.of(place) if place is not None else Spot(0, "", 0, 0)
        try:
            rows: int = sum(pq.read_metadata(name).num_rows for name in self._files.names[spot.number :])
            return rows - spot.at
        except (pa.ArrowInvalid, OSError) as error:
            raise Refused(f"{self.shown}: {error}") from error

    def read(self, places: Mapping[str, Place], piece_bytes: int) -> AsyncGenerator[Piece, None]:
        """See `Source`.

        Raises `SchemaMismatch`, which names the file and, if possible, the column, and `SourceChanged` for a file that
        differs from the one that was copied.
        """
        return self._worker.each(self._pieces(places.get(PART), piece_bytes))

    def _pieces(self, place: Place, piece_bytes: int) -> Generator[Piece | None, None, None]:
        spot = Spot(0, self._files.names[0], 0, self._files.sizes[0], 0) if place is None else Spot.of(place)
        while True:
            for rows, behind in self._rows_behind(spot, piece_bytes):
                yield Piece(PART, spot.place(), behind.place(), rows)
                spot = behind
            if not self._follow:
                return
            seen = self._files
            while (found := self._find()) == seen:
                wait_s = time.monotonic() + LOOK_S
                while time.monotonic() < wait_s:
                    time.sleep(PAUSE_S)
                    yield None
            self._files = found

    def _rows_behind(self, spot: Spot, piece_bytes: int) -> Generator[tuple[pa.RecordBatch, Spot], None, None]:
        """Yield the rows after `spot`, up to the last complete record, with the end of each batch."""
        names, sizes = self._files.names, self._files.sizes
        check_order(names, sizes, spot)
        before = sum(sizes[: spot.number])
        for number in range(spot.number, len(names)):
            name, size = names[number], sizes[number]
            at = spot if number == spot.number else Spot(number, name, 0, size, before)
            reading = self._reading(at, size)
            with translated(name):
                for rows, end in self._behind(reading, at, piece_bytes):
                    at = Spot(number, name, end.at, size, before, end.mark)
                    yield rows, at
                if not (yield from self._at_end(reading, at, piece_bytes)):
                    return
            before += reading.size

    def _reading(self, spot: Spot, size: int) -> Reading:
        if self._end.format == "parquet" and spot.at and size != spot.size:
            raise SourceChanged(f"{spot.name} had {spot.size} bytes when it was copied, and has {size} now")
        return reading_of(spot.name, self._end.format, self.schema, inferred=self._inferred)

    def _behind(
        self, reading: Reading, spot: Spot, piece_bytes: int
    ) -> Generator[tuple[pa.RecordBatch, Position], None, None]:
        """Yield the batches of one file after a place."""
        if not self._counts_rows(spot):
            yield from reading.batches(Position(spot.at, spot.mark), piece_bytes)
            return
        left = spot.at
        for rows, end in reading.batches(Position(0), piece_bytes):
            skipped = min(left, rows.num_rows)
            left -= skipped
            if skipped < rows.num_rows:
                yield rows.slice(skipped), end

    def _counts_rows(self, spot: Spot) -> bool:
        """Return whether a place comes from an earlier version, which counted the rows of CSV."""
        return self._end.format == "csv" and spot.before is None

    def _at_end(
        self, reading: Reading, spot: Spot, piece_bytes: int
    ) -> Generator[tuple[pa.RecordBatch, Spot], None, bool]:
        """Handle the text after the last complete record of a file, and return whether later files may be read.

        `spot` is the place of the copy in the file.
        """
        name, is_last = spot.name, spot.number == len(self._files.names) - 1
        if not (reading.tail or reading.is_cut):
            if self._follow and not is_last and has_writer(name):
                self._note(f"{name} is open for writing: the files behind it wait until it is closed")
                return False
            return True
        if self._follow and is_last:
            return False
        what = "compressed frame" if reading.is_cut else "record"
        if has_writer(name):
            waits = f"{name}: its last {what} has no end yet, and a process has the file open for writing"
            if not (self._follow or is_last):
                raise Refused(f"{waits}: the files behind it come after it; start the copy again when it is complete")
            self._note(f"{waits}: it is copied once it is complete")
            return False
        if os.stat(name).st_size != reading.size:  # noqa: PTH116 - names
            # The writer has finished since the end was read.
            yield from self._rows_behind(spot, piece_bytes)
            return False
        found = None if reading.is_cut else reading.of_tail()
        if found is None:
            raise SchemaMismatch(
                f"its last {what} is not complete, and all records before it are copied; start the copy again when it"
                " is complete"
            )
        rows, end = found
        if rows.num_rows:
            yield rows, spot._replace(at=end.at, mark=end.mark)
        return True

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    async def kept(self, places: Mapping[str, Place]) -> None:
        """Do nothing: the copy does not remove files. See `Source`."""

    async def again(self, spans: Sequence[Span]) -> list[pa.RecordBatch | None]:
        """See `Source`."""
        return await self._worker.call(self._again, spans)

    def _again(self, spans: Sequence[Span]) -> list[pa.RecordBatch | None]:
        found: list[pa.RecordBatch | None] = []
        for _, start, end, count, _ in spans:
            begin, behind = Spot.of(start), Spot.of(end)
            check_order(self._files.names, self._files.sizes, behind)
            if begin.number != behind.number:
                begin = behind._replace(at=0, mark="")
            reading = self._reading(behind, self._files.sizes[behind.number])
            with translated(behind.name):
                rows = self._rows_between(reading, begin, behind, count)
            if rows.num_rows != count:
                raise SourceChanged(f"{behind.name} has no longer the {count} records that were being copied")
            found.append(rows)
        return found

    def _rows_between(self, reading: Reading, begin: Spot, end: Spot, count: int) -> pa.RecordBatch:
        if not self._counts_rows(end):
            return reading.between(Position(begin.at, begin.mark), Position(end.at, end.mark))
        parts = []
        for rows, _ in self._behind(reading, begin, BLOCK_BYTES):
            parts.append(rows)
            if sum(each.num_rows for each in parts) >= count:
                break
        return pa.concat_batches(parts).slice(0, count)
