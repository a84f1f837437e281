"""A table, or a query, as the source of a copy: one part, in ascending order of a key; places are values of the key.

Each page of rows is read in a separate transaction. The copy reads all keys up to the largest one at a moment, after
`settled` has waited for the transactions that may still add rows with smaller keys. Rows that change or vanish later
are not read again, unless a change gives them a larger key. (`changes` copies such changes.)

If a copy was killed, the next process reads the rows again that were being copied. If their keys differ from before, it
copies them anew.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence

import pyarrow as pa

from kera.connect.endpoints import TableEnd
from kera.connect.errors import Refused
from kera.connect.pieces import Piece, Place, Span
from kera.connect.postgres import sql
from kera.connect.postgres.columns import Columns, columns_of, conformed
from kera.connect.postgres.connection import TEXT_FORMS, Database
from kera.connect.postgres.pages import Page, digest_of, pages
from kera.connect.postgres.settling import PAUSE_S, SETTLE_S, settled
from kera.connect.worker import Worker
from kera.core.errors import InternalError, InvalidArgument, SchemaMismatch
from kera.core.format.arrow_types import empty_batch

PART = "rows"
PAGE_ROWS = 100_000
FOLLOW_S = 0.5
"""Pause between two looks at a followed table."""
RANDOM_KEYS = {"uuid", "text", "varchar", "bpchar"}


class TableSource:
    """See `kera.connect.pieces.Source`."""

    may_shrink = False
    streamlets = 0

    def __init__(
        self,
        end: TableEnd,
        wanted: pa.Schema | None,
        *,
        follow: bool,
        settle_s: float = SETTLE_S,
        from_latest: bool = False,
    ) -> None:
        """`wanted`: the columns of the target, if it exists. `from_latest`: begin after the largest present key."""
        self.shown = self.identity = end.shown
        self.schema = pa.schema([])
        self.notes: list[str] = []
        self._end = end
        self._wanted = wanted
        self._follow = follow
        self._settle_s = settle_s
        self._from_latest = from_latest
        self._database: Database | None = None
        self._rows = sql.Rows("", (), ())
        self._columns = Columns(self.schema, ())
        self._is_table = False
        """Whether the source is a table, and not a view or a query, whose rows may come from any table."""
        self._worker = Worker("postgres")

    async def open(self) -> None:
        """See `Source`. Raises `Refused`, `InvalidArgument`, `Unreachable`."""
        await self._worker.call(self._open)

    def _open(self) -> None:
        self._database = database = Database(self._end.uri, self.shown)
        database.set(*TEXT_FORMS)
        ((name,),) = database.rows("SELECT current_database()::text")
        self.identity = f"{self.shown} of database {name}"
        if self._end.table:
            source = sql.table_name(self._end.table)
            if not database.rows(sql.IS_THERE, [source])[0][0]:
                raise Refused(f"there is no table {self._end.table!r} in database {name!r}")
            key = self._key_of_table(database, source)
            self._is_table = bool(database.rows(sql.IS_TABLE, [source])[0][0])
        else:
            source, key = f"({self._end.query.rstrip().rstrip(';')})", self._end.key
        columns = columns_of(database, source, self._wanted)
        names = columns.schema.names
        missing = [column for column in key if column not in names]
        if missing:
            raise InvalidArgument(f"key: {self.shown} has no column {missing[0]!r}; it has {', '.join(names)}")
        self._rows = sql.Rows(source, columns.expressions, key)
        self._columns, self.schema = columns, columns.schema
        database.commit()

    def _key_of_table(self, database: Database, table: str) -> tuple[str, ...]:
        """Return the given key, or else the primary key. Raises `InvalidArgument` if two rows may have the same key."""
        uniques = database.rows(sql.UNIQUE_KEYS, [table])
        key = self._end.key
        if not key:
            primary = [tuple(json.loads(columns)) for is_primary, _, columns in uniques if is_primary]
            if not primary:
                raise InvalidArgument(
                    f"{self.shown} has no primary key: give columns that order its rows, with ?table=…&key=id"
                )
            key = primary[0]
        elif not any(not_null and set(json.loads(columns)) <= set(key) for _, not_null, columns in uniques):
            raise InvalidArgument(
                f"key: several rows of {self.shown} can have the same {', '.join(key)}, or null, and a copy would"
                " skip some: add columns to the key, as in key=changed,id, until a unique index covers it and no"
                " column is nullable"
            )
        kinds = database.rows(sql.TYPE_OF_COLUMN, [table, key[0]])
        if kinds and kinds[0][0] in RANDOM_KEYS:
            self.notes.append(
                f"rows are copied in the order of {key[0]}, which is {kinds[0][0]}: those that are added later with a"
                " smaller one are never seen"
            )
        return key

    @property
    def _opened(self) -> Database:
        if self._database is None:
            raise InternalError("the source was not opened")
        return self._database

    async def left(self, places: Mapping[str, Place]) -> int | None:
        """See `Source`. Returns PostgreSQL's estimate."""
        if self._from_latest and PART not in places:
            return 0
        return await self._worker.call(self._left, places.get(PART))

    def _left(self, place: Place) -> int | None:
        ((plan,),) = self._opened.rows(sql.estimate(self._rows, place))
        self._opened.commit()
        found = json.loads(plan) if isinstance(plan, str) else plan
        return int(found[0]["Plan"]["Plan Rows"])

    def read(self, places: Mapping[str, Place], piece_bytes: int) -> AsyncGenerator[Piece, None]:
        """See `Source`. Raises `SchemaMismatch` for a key that does not ascend."""
        return self._worker.each(self._pieces(places.get(PART), piece_bytes))

    def _pieces(self, place: Place, piece_bytes: int) -> Generator[Piece | None, None, None]:
        if self._from_latest and place is None:
            for found in self._settled_end(None):
                place = found
                yield None
            if place is not None:  # an empty piece makes the target store the place
                yield Piece(PART, place, place, empty_batch(self.schema))
        while True:
            end = None
            for found in self._settled_end(place):
                end = found
                yield None
            while end is not None and place != end:
                before = place
                for page in self._page(place, end, PAGE_ROWS, piece_bytes):
                    yield Piece(PART, place, page.last, self._rows_of(page), digest=digest_of([page]))
                    place = page.last
                if place == before:  # the remaining rows were deleted
                    break
            if not self._follow:
                return
            wait_s = time.monotonic() + FOLLOW_S
            while time.monotonic() < wait_s:
                time.sleep(PAUSE_S)
                yield None

    def _settled_end(self, place: Place) -> Iterator[list[str] | None]:
        """Yield the largest key repeatedly, until no transaction can add smaller ones any more."""
        database = self._opened
        found = database.rows(sql.last_key(self._rows))
        database.commit()
        end = list(found[0]) if found else None
        if end is not None and None in end:
            raise SchemaMismatch(f"{self.shown}: a row has no key")
        if end is not None and end != place:
            source, is_table, settle_s = self._rows.source, self._is_table, self._settle_s
            # Read after the key: transactions that have ended before this moment are visible from now on.
            for _ in settled(database, source, self.shown, is_table=is_table, settle_s=settle_s):
                yield end
        yield end

    def _page(self, start: Place, end: Place, limit: int | None, piece_bytes: int) -> Iterator[Page]:
        database, key = self._opened, self._rows.key
        self._check_columns()
        yield from pages(database, sql.page(self._rows, start, end, limit), key, start, piece_bytes, self.shown)
        database.commit()

    def _check_columns(self) -> None:
        """Raise `SchemaMismatch` if the columns differ from those at the begin of the copy.

        The query locks the tables that it reads, so the columns stay the same until the transaction ends.
        """
        found = columns_of(self._opened, self._rows.source, self._wanted)
        if found == self._columns:
            return
        before, now = (set(zip(each.schema, each.expressions, strict=False)) for each in (self._columns, found))
        name = min(field.name for field, _ in before ^ now)
        raise SchemaMismatch(
            f"{self.shown}: column {name!r} was added, removed or changed while the copy ran: start the copy again, and"
            " it continues with the columns as they are now",
            column=name,
        )

    def _rows_of(self, page: Page) -> pa.RecordBatch:
        return conformed(page.rows, self.schema, self.shown)

    async def kept(self, places: Mapping[str, Place]) -> None:
        """Do nothing: the copy does not change tables. See `Source`."""

    async def again(self, spans: Sequence[Span]) -> list[pa.RecordBatch | None]:
        """See `Source`."""
        return await self._worker.call(self._again, spans)

    def _again(self, spans: Sequence[Span]) -> list[pa.RecordBatch | None]:
        found: list[pa.RecordBatch | None] = []
        for span in spans:
            parts = list(self._page(span.start, span.end, None, 1 << 20))
            count = sum(page.rows.num_rows for page in parts)
            # Journals of earlier versions have no digest.
            if count != span.rows or (span.digest and digest_of(parts) != span.digest):
                self.notes.append(
                    f"rows between {span.start} and {span.end} have changed since they were being copied when the copy"
                    " ended: they are copied again, so some may be there twice"
                )
                return [None] * len(spans)
            rows = [self._rows_of(page) for page in parts]
            found.append(pa.concat_batches(rows) if rows else empty_batch(self.schema))
        return found

    async def close(self) -> None:
        """See `Source`."""
        if self._database is not None:
            await self._worker.call(self._database.close)
            self._database = None
        self._worker.close()
