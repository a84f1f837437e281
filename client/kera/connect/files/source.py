"""Files as the source of a copy: one part, in the order of their names; what a place is, is in `places`."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from kera.connect.endpoints import FilesEnd
from kera.connect.errors import Refused, SourceChanged
from kera.connect.files.places import PACKED, Spot, find_files, go_on
from kera.connect.files.reading import reader_of, schema_of, translated
from kera.connect.pieces import Piece, Place, Span
from kera.connect.worker import Worker
from kera.core.schema import DEFAULT_SCHEMA

PART = "files"


class FilesSource:
    """See `kera.connect.pieces.Source`."""

    may_shrink = False
    streamlets = 0

    def __init__(self, end: FilesEnd, wanted: pa.Schema | None) -> None:
        """`wanted`: the columns of the target, if it is there."""
        self.shown = end.shown
        self.notes: list[str] = []
        self.identity = f"files {Path(end.path).absolute()}" + ("/" if end.path.endswith("/") else "")
        self.schema = pa.schema([])
        self._end = end
        self._wanted = wanted
        self._files: list[str] = []
        self._sizes: list[int] = []
        self._worker = Worker("files")

    async def open(self) -> None:
        """See `Source`. Raises `Refused`, `SchemaMismatch`."""
        await self._worker.call(self._open)

    def _open(self) -> None:
        self._files = find_files(self._end)
        try:
            self._sizes = [os.stat(name).st_size for name in self._files]  # noqa: PTH116 - names
        except OSError as error:
            raise Refused(f"{error.filename} cannot be read: {error.strerror}") from error
        schema = self._wanted if self._wanted is not None else schema_of(self._files[0], self._end.format)
        self.schema = DEFAULT_SCHEMA if schema.equals(DEFAULT_SCHEMA) else schema

    async def close(self) -> None:
        """See `Source`."""
        self._worker.close()

    async def left(self, places: Mapping[str, Place]) -> int | None:
        """See `Source`: only files of Parquet say how many rows they have."""
        return await self._worker.call(self._left, places.get(PART)) if self._end.format == "parquet" else None

    def _left(self, place: Place) -> int:
        spot = Spot.of(place) if place is not None else Spot(0, "", 0, 0)
        try:
            rows: int = sum(pq.read_metadata(name).num_rows for name in self._files[spot.number :])
            return rows - spot.at
        except (pa.ArrowInvalid, OSError) as error:
            raise Refused(f"{self.shown}: {error}") from error

    def read(self, places: Mapping[str, Place], piece_bytes: int) -> AsyncGenerator[Piece, None]:
        """See `Source`. Raises `SchemaMismatch` that names the file, and the column if there is one to blame."""
        return self._worker.each(self._pieces(places.get(PART), piece_bytes))

    def _pieces(self, place: Place, piece_bytes: int) -> Generator[Piece | None, None, None]:
        number, at = 0, 0
        if place is None:
            place = Spot(0, self._files[0], 0, self._sizes[0]).place()
        else:
            number, at = go_on(self._files, self._sizes, Spot.of(place), may_grow=self._may_grow(Spot.of(place).name))
        read = reader_of(self._end.format)
        for each in range(number, len(self._files)):
            name = self._files[each]
            for rows, end in translated(name, read(name, at if each == number else 0, self.schema, piece_bytes)):
                behind = Spot(each, name, end, self._sizes[each]).place()
                yield Piece(PART, place, behind, rows)
                place = behind

    def _may_grow(self, name: str) -> bool:
        return self._end.format != "parquet" and not name.endswith(PACKED)

    async def kept(self, places: Mapping[str, Place]) -> None:
        """See `Source`: files stay."""

    async def again(self, spans: Sequence[Span]) -> list[pa.RecordBatch | None]:
        """See `Source`."""
        return await self._worker.call(self._again, spans)

    def _again(self, spans: Sequence[Span]) -> list[pa.RecordBatch | None]:
        found: list[pa.RecordBatch | None] = []
        for _, start, end, count, _ in spans:
            begin, behind = Spot.of(start), Spot.of(end)
            number, _ = go_on(self._files, self._sizes, behind, may_grow=self._may_grow(behind.name))
            at = begin.at if begin.number == number else 0
            name, parts, rows = self._files[number], [], 0
            # A piece is what was read at once, which need not be so the next time: rows count, or bytes of lines.
            for batch, reached in translated(name, reader_of(self._end.format)(name, at, self.schema, 1 << 20)):
                parts.append(batch)
                rows += batch.num_rows
                if reached >= behind.at or rows >= count:
                    break
            if rows < count:
                raise SourceChanged(f"{name} has no longer the {count} records that were being copied")
            found.append(pa.concat_batches(parts).slice(0, count))
        return found
