"""A table, or a query, as the source of a copy: one part, in the order of a key that ascends; places are its values.

Rows are read page by page, each in a transaction of its own. What is copied is what was there at a moment: all keys up
to the largest one then. Transactions that were under way at that moment may yet add rows with smaller keys, as numbers
are given out before rows can be seen; so the copy waits until these have ended (`settle_s`). Rows that are changed or
deleted later are not looked at again.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from kera.connect.endpoints import TableEnd
from kera.connect.errors import Refused, SourceChanged
from kera.connect.pieces import Piece, Place, Span
from kera.connect.postgres import sql
from kera.connect.postgres.connection import Database
from kera.connect.worker import Worker
from kera.core.errors import InternalError, InvalidArgument, SchemaMismatch

PART = "rows"
PAGE_ROWS = 100_000
SETTLE_S = 60.0
PAUSE_S = 0.05
FOLLOW_S = 0.5
"""Between two looks at a table that is followed."""
RANDOM_KEYS = {"uuid", "text", "varchar", "bpchar"}


class TableSource:
    """See `kera.connect.pieces.Source`."""

    may_shrink = False
    streamlets = 0

    def __init__(self, end: TableEnd, wanted: pa.Schema | None, *, follow: bool, settle_s: float = SETTLE_S) -> None:
        """`wanted`: the columns of the target, if it is there."""
        self.shown = self.identity = end.shown
        self.schema = pa.schema([])
        self.notes: list[str] = []
        self._end = end
        self._wanted = wanted
        self._follow = follow
        self._settle_s = settle_s
        self._database: Database | None = None
        self._rows = sql.Rows("", (), ())
        self._is_table = False
        """And neither a view nor a query, whose rows come from who knows where."""
        self._worker = Worker("postgres")

    async def open(self) -> None:
        """See `Source`. Raises `Refused`, `InvalidArgument`, `Unreachable`."""
        await self._worker.call(self._open)

    def _open(self) -> None:
        self._database = database = Database(self._end.uri, self.shown)
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
        with database.batches(sql.columns_of(source), 1 << 20) as reader:
            found = reader.schema
        missing = [column for column in key if column not in found.names]
        if missing:
            raise InvalidArgument(f"key: {self.shown} has no column {missing[0]!r}; it has {', '.join(found.names)}")
        columns = []
        fields = []
        for field in found:
            native = _is_native(field.type)
            columns.append(sql.column(field.name) if native else f"{sql.column(field.name)}::text")
            fields.append(pa.field(field.name, self._type_of(field, native=native)))
        self._rows = sql.Rows(
            source, tuple(f"{each} AS {sql.quoted(name)}" for each, name in zip(columns, found.names, strict=True)), key
        )
        self.schema = pa.schema(fields)
        database.commit()

    def _type_of(self, field: pa.Field, *, native: bool) -> pa.DataType:
        """What has no type in Arrow is text, or a decimal if the stream has one there."""
        if native:
            return _plain(field.type)
        wanted = self._wanted
        if wanted is not None and field.name in wanted.names and pa.types.is_decimal(wanted.field(field.name).type):
            return wanted.field(field.name).type
        return pa.string()

    def _key_of_table(self, database: Database, table: str) -> tuple[str, ...]:
        """That which was given, if no two rows can have the same; else the primary key."""
        uniques = database.rows(sql.UNIQUE_KEYS, [table])
        key = self._end.key
        if not key:
            primary = [tuple(json.loads(columns)) for is_primary, _, columns in uniques if is_primary]
            if not primary:
                raise InvalidArgument(
                    f"{self.shown} has no primary key: give columns by which its rows ascend, with ?table=…&key=id"
                )
            key = primary[0]
        elif not any(not_null and set(json.loads(columns)) <= set(key) for _, not_null, columns in uniques):
            raise InvalidArgument(
                f"key: several rows of {self.shown} can have the same {', '.join(key)}, or none, and some would be"
                " passed over: add columns to it, as in key=changed,id; what counts is a unique index of columns"
                " that are never null"
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
        """See `Source`: what PostgreSQL believes."""
        return await self._worker.call(self._left, places.get(PART))

    def _left(self, place: Place) -> int | None:
        ((plan,),) = self._opened.rows(sql.estimate(self._rows, place))
        self._opened.commit()
        found = json.loads(plan) if isinstance(plan, str) else plan
        return int(found[0]["Plan"]["Plan Rows"])

    async def read(self, places: Mapping[str, Place], piece_bytes: int) -> AsyncIterator[Piece]:
        """See `Source`. Raises `SchemaMismatch` for a key that does not ascend."""
        async for piece in self._worker.each(self._pieces(places.get(PART), piece_bytes)):
            yield piece

    def _pieces(self, place: Place, piece_bytes: int) -> Iterator[Piece | None]:
        while True:
            end = None
            for found in self._settled_end(place):
                end = found
                yield None
            while end is not None and place != end:
                before = place
                for rows, behind in self._page(place, end, PAGE_ROWS, piece_bytes):
                    yield Piece(PART, place, behind, rows)
                    place = behind
                if place == before:  # what was there has been deleted
                    break
            if not self._follow:
                return
            wait_s = time.monotonic() + FOLLOW_S
            while time.monotonic() < wait_s:
                time.sleep(PAUSE_S)
                yield None

    def _settled_end(self, place: Place) -> Iterator[list[str] | None]:
        """The largest key, once nobody can add smaller ones any more; given again and again while one waits."""
        database = self._opened
        found = database.rows(sql.last_key(self._rows))
        database.commit()
        end = list(found[0]) if found else None
        if end is not None and None in end:
            raise SchemaMismatch(f"{self.shown}: a row has no key")
        if self._settle_s and end is not None and end != place:
            under_way = self._under_way()  # asked after the key: who has ended before that can be seen from now on
            until_s = time.monotonic() + self._settle_s
            while under_way():
                if time.monotonic() > until_s:
                    raise Refused(
                        f"{self.shown}: a transaction has been under way for {self._settle_s:.0f} s, and may yet add"
                        " rows with smaller keys than are there. Start the copy again when it has ended; with settle=0"
                        " in the address it does not wait, and passes over such rows"
                    )
                time.sleep(PAUSE_S)
                yield end
        yield end

    def _under_way(self) -> Callable[[], bool]:
        """Tells whether one of those that may be adding rows now still is: of a query, any transaction may."""
        database = self._opened
        if self._is_table:
            writers = set(database.rows(sql.WRITERS, [self._rows.source]))
            database.commit()

            def some_write() -> bool:
                writers.intersection_update(database.rows(sql.WRITERS, [self._rows.source]) if writers else ())
                database.commit()
                return bool(writers)

            return some_write
        ((horizon,),) = database.rows(sql.NEXT_TRANSACTION)
        database.commit()

        def some_are_older() -> bool:
            ((oldest,),) = database.rows(sql.OLDEST_TRANSACTION)
            database.commit()
            return bool(oldest < horizon)

        return some_are_older

    def _page(
        self, start: Place, end: Place, limit: int | None, piece_bytes: int
    ) -> Iterator[tuple[pa.RecordBatch, list[str]]]:
        last = start
        with self._opened.batches(sql.page(self._rows, start, end, limit), piece_bytes) as reader:
            for batch in reader:
                if batch.num_rows:
                    keys = [batch.column(f"{sql.KEY_PREFIX}{number}") for number in range(len(self._rows.key))]
                    self._check_keys(keys, last)
                    last = [column[-1].as_py() for column in keys]
                    yield self._plain_rows(batch), last
        self._opened.commit()

    def _check_keys(self, keys: Sequence[pa.Array], last: Place) -> None:
        """A key that two rows have, one behind the other, would have one of them passed over."""
        if any(column.null_count for column in keys):
            raise SchemaMismatch(f"{self.shown}: a row has no key")
        first = [column[0].as_py() for column in keys]
        same = None
        for column in keys:
            equal = pc.equal(column[1:], column[:-1])
            same = equal if same is None else pc.and_(same, equal)
        if first == last or (same is not None and len(same) and pc.any(same).as_py()):
            raise SchemaMismatch(
                f"{self.shown}: two rows have the same key ({', '.join(self._rows.key)}): add a column"
            )

    def _plain_rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = []
        for field in self.schema:
            column = batch.column(field.name)
            try:
                columns.append(column if column.type == field.type else column.cast(field.type))
            except pa.ArrowInvalid as error:
                text = f"{self.shown}: column {field.name!r} has a value that is no {field.type}: {error}"
                raise SchemaMismatch(text, column=field.name) from error
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    async def again(self, spans: Sequence[Span]) -> list[pa.RecordBatch]:
        """See `Source`."""
        return await self._worker.call(self._again, spans)

    def _again(self, spans: Sequence[Span]) -> list[pa.RecordBatch]:
        found = []
        for _, start, end, count in spans:
            parts = [rows for rows, _ in self._page(start, end, None, 1 << 20)]
            rows = pa.concat_batches(parts) if parts else pa.RecordBatch.from_pylist([], self.schema)
            if rows.num_rows != count:
                raise SourceChanged(
                    f"{self.shown} had {count} rows between {start} and {end}, which were being copied when the copy"
                    f" ended, and has {rows.num_rows} now: copy it anew, into another stream"
                )
            found.append(rows)
        return found

    async def close(self) -> None:
        """See `Source`."""
        if self._database is not None:
            await self._worker.call(self._database.close)
            self._database = None
        self._worker.close()


def _is_native(kind: pa.DataType) -> bool:
    """Whether a column of PostgreSQL comes with its own type."""
    if pa.types.is_list(kind):
        return _is_native(kind.value_type)
    return not (isinstance(kind, pa.BaseExtensionType) or pa.types.is_interval(kind) or pa.types.is_duration(kind))


def _plain(kind: pa.DataType) -> pa.DataType:
    """Without what the driver notes at the values of a list."""
    return pa.list_(_plain(kind.value_type)) if pa.types.is_list(kind) else kind
