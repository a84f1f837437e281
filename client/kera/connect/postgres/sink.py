"""A table as the target of a copy. Each transaction writes rows together with the progress of the copy.

The progress is in a table `STATE_TABLE` in the same schema. It has a row for each copy, with a number that grows with
each transaction: if two processes run the same copy, one finds the number changed, and ends.

Rows go directly into the table if the types are the same; otherwise into a temporary table, and from there with
PostgreSQL's conversions. A value that does not fit, or that a conversion would change, ends the copy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kera.client.json_form import texts_of
from kera.connect.endpoints import TableEnd
from kera.connect.errors import CopyElsewhere, CopyMismatch, Refused
from kera.connect.pieces import Piece, Place, Progress, Source
from kera.connect.postgres import sql
from kera.connect.postgres.connection import Database
from kera.connect.postgres.conversions import Conversion, Target, fitting, value_text
from kera.connect.worker import Worker
from kera.core.errors import InternalError, InvalidArgument, KeraError, SchemaMismatch
from kera.core.format.schema import DEFAULT_SCHEMA

STATE_TABLE = "kera_connect"
ROWS_TABLE = "kera_connect_rows"
LENGTH_CHECKED = {"varchar", "bpchar"}
"""Types whose length PostgreSQL checks, without truncating, when it reads rows directly."""
_PLACE_IN_ROWS = re.compile(r"line (\d+), column ([^:)]+)")
RECORDS = pa.schema(
    [DEFAULT_SCHEMA.field("timestamp"), ("key", pa.binary()), ("value", pa.binary()), ("headers", pa.string())]
)
"""The columns of a table for records of a stream without a schema; headers are JSON."""


class TableSink:
    """See `kera.connect.pieces.Sink`."""

    piece_bytes = 1 << 20

    def __init__(self, end: TableEnd, name: str, *, create: bool) -> None:
        """`name`: the copy's name."""
        if not end.table or end.key or end.settle or end.changes:
            raise InvalidArgument(
                "a table as the target takes no query, key, settle or changes: write"
                " postgresql://user@host/db?table=clicks"
            )
        self.shown = end.shown
        self.notes: list[str] = []
        self._end = end
        self._name = name
        self._create = create
        self._database: Database | None = None
        self._schema = RECORDS
        self._default = True
        self._conversions: tuple[Conversion, ...] = ()
        """Conversions of all columns; empty: rows are written directly."""
        self._state = ""
        self._place = ("", "")
        """Schema and table."""
        self._round = 0
        self._places: dict[str, Place] = {}
        self._records = 0
        self._worker = Worker("postgres")

    async def open(self, source: Source) -> Progress:
        """See `Sink`. Raises `Refused`, `SchemaMismatch`, `CopyMismatch`, `Unreachable`."""
        self._default = source.schema.equals(DEFAULT_SCHEMA)
        self._schema = RECORDS if self._default else source.schema
        return await self._worker.call(self._open, source.identity)

    def _open(self, identity: str) -> Progress:
        self._database = database = Database(self._end.uri, self.shown)
        database.set("timezone = 'UTC'")  # for texts without a time zone
        table = sql.table_name(self._end.table)
        if not database.rows(sql.IS_THERE, [table])[0][0]:
            if not self._create:
                raise Refused(f"there is no {self.shown}; --create makes it, with the columns of the stream")
            database.execute(sql.create_table(table, self._schema))
            self.notes.append(f"{self.shown} was made")
        ((schema, name),) = database.rows(sql.PLACE_OF_TABLE, [table])
        self._place = (schema, name)
        self._conversions = self._conversions_into(database, table)
        self._state = f"{sql.quoted(schema)}.{sql.quoted(STATE_TABLE)}"
        database.execute(sql.STATE.format(state=self._state))
        database.execute(sql.BEGIN.format(state=self._state), [self._name, identity, name])
        ((known, target, places, records, number),) = database.rows(sql.HOW_FAR.format(state=self._state), [self._name])
        database.commit()
        if (known, target) != (identity, name):
            raise CopyMismatch(
                f"the copy of this name is from {known} to table {target}, not from {identity} to {name}: give this one"
                " another --name"
            )
        self._places, self._records, self._round = json.loads(places), records, number
        return Progress(dict(self._places), self._records)

    def _conversions_into(self, database: Database, table: str) -> tuple[Conversion, ...]:
        """Return the conversions of all columns; empty: none is necessary.

        Raises `SchemaMismatch` for columns that the table does not have, or needs besides.
        """
        found = database.rows(sql.TARGET_COLUMNS, [table])
        columns = {name: Target(*target) for name, *target, _ in found}
        conversions, differ = [], False
        for field in self._schema:
            if field.name not in columns:
                raise SchemaMismatch(
                    f"{self.shown} has no column {field.name!r}, and the stream has one; it has {', '.join(columns)}",
                    column=field.name,
                )
            kind, as_they_are = sql.type_of(field)
            target = columns[field.name]
            conversion = Conversion(field.name, kind, target)
            conversions.append(conversion)
            as_it_is = target.type_name in as_they_are and (not target.is_limited or target.base_name in LENGTH_CHECKED)
            differ = differ or not (as_it_is or conversion.is_none)
        needed = [name for name, *_, must in found if must and name not in self._schema.names]
        if needed:
            raise SchemaMismatch(
                f"{self.shown} needs column {needed[0]!r}, which the stream does not have", column=needed[0]
            )
        return tuple(conversions) if differ else ()

    async def settle(self, rows: Sequence[pa.RecordBatch | None]) -> Progress:
        """Raise `InternalError`: this target has no unsure writes."""
        raise InternalError("this target leaves no write in doubt", spans=len(rows))

    async def put(self, pieces: Sequence[Piece]) -> Mapping[str, Place]:
        """See `Sink`. Uses one transaction. Raises `CopyElsewhere`, `SchemaMismatch`, `Refused`, `Unreachable`."""
        await self._worker.call(self._put, pieces)
        return dict(self._places)

    @property
    def _opened(self) -> Database:
        if self._database is None:
            raise InternalError("the target was not opened")
        return self._database

    def _put(self, pieces: Sequence[Piece]) -> None:
        database = self._opened
        batches = [fitting(self._rows(piece.rows), self.shown) for piece in pieces if piece.rows.num_rows]
        places = {**self._places, **{piece.part: piece.end for piece in pieces}}
        records = self._records + sum(piece.rows.num_rows for piece in pieces)
        try:
            given = [json.dumps(places), records, self._name, self._round]
            if not database.rows(sql.GO_ON.format(state=self._state), given):
                raise CopyElsewhere(
                    "another process runs this copy, and has gone on with it; one of them is enough, or give this one"
                    " another --name"
                )
            if batches:
                self._insert(pa.Table.from_batches(batches))
            database.commit()
        except BaseException:
            database.rollback()
            raise
        self._places, self._records, self._round = places, records, self._round + 1

    def _insert(self, rows: pa.Table) -> None:
        database = self._opened
        if not self._conversions:
            try:
                database.ingest(self._place[1], rows, schema=self._place[0])
            except SchemaMismatch as error:
                raise _with_value(error, rows) from error
            return
        database.ingest(ROWS_TABLE, rows, temporary=True)
        names = ", ".join(sql.quoted(each.name) for each in self._conversions)
        values = ", ".join(each.expression for each in self._conversions)
        target = ".".join(map(sql.quoted, self._place))
        try:
            self._check_loss(rows)
            database.execute(f"INSERT INTO {target} ({names}) SELECT {values} FROM pg_temp.{ROWS_TABLE}")
        except SchemaMismatch as error:
            raise self._blamed(error, rows) from error
        database.execute(f"DROP TABLE pg_temp.{ROWS_TABLE}")

    def _check_loss(self, rows: pa.Table) -> None:
        """Raise `SchemaMismatch` for a value that a conversion would change."""
        lossy = [each for each in self._conversions if each.loss]
        found = lossy and self._opened.rows(sql.lossy(f"pg_temp.{ROWS_TABLE}", [each.loss for each in lossy]))
        for row, which in found:
            raise self._changed(lossy[which], rows, row - 1, "which it cannot hold as it is")

    def _changed(self, conversion: Conversion, rows: pa.Table, row: int, why: str) -> SchemaMismatch:
        value = value_text(rows.column(conversion.name)[row])
        return SchemaMismatch(
            f"{self.shown}: column {conversion.name!r} is {conversion.target.type} there, and record {row + 1} of a"
            f" piece has {value}, {why}",
            column=conversion.name,
        )

    def _blamed(self, error: SchemaMismatch, rows: pa.Table) -> SchemaMismatch:
        """Return the error with the column and the value that do not fit, which PostgreSQL does not report."""
        if "column" in error.attributes:
            return error
        for each in self._conversions:
            if not self._converts(each, rows):
                first, end = 0, rows.num_rows
                while end - first > 1:
                    half = (first + end) // 2
                    first, end = (half, end) if self._converts(each, rows.slice(first, half - first)) else (first, half)
                return self._changed(each, rows, first, f"which does not fit: {error.message}")
        return error

    def _converts(self, conversion: Conversion, rows: pa.Table) -> bool:
        database, conditions = self._opened, [conversion.loss] if conversion.loss else []
        database.rollback()
        try:
            database.ingest(ROWS_TABLE, rows.select([conversion.name]), temporary=True)
            database.rows(f"SELECT count({conversion.expression}) FROM pg_temp.{ROWS_TABLE}")
            if conditions:
                database.rows(sql.lossy(f"pg_temp.{ROWS_TABLE}", conditions))
        except KeraError:
            return False
        return True

    def _rows(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        if not self._default:
            return rows
        keys = rows.column("keys").to_pylist()
        if any(own and len(own) > 1 for own in keys):
            raise SchemaMismatch(
                "a record has several keys, for which the table has no column: copy into files of Parquet"
            )
        columns: list[Any] = [
            rows.column("timestamp"),
            pa.array([own[0] if own else None for own in keys], pa.binary()),
            rows.column("value"),
            _headers(rows.column("headers")),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=RECORDS)

    async def finish(self, *, complete: bool) -> Mapping[str, Place]:
        """See `Sink`. This target holds no rows back."""
        del complete
        return dict(self._places)

    async def close(self) -> None:
        """See `Sink`."""
        if self._database is not None:
            await self._worker.call(self._database.close)
            self._database = None
        self._worker.close()


def _with_value(error: SchemaMismatch, rows: pa.Table) -> SchemaMismatch:
    """Return the error with the value, at the line and column that PostgreSQL reports."""
    place = _PLACE_IN_ROWS.search(error.message)
    if place is None or place[2] not in rows.schema.names or int(place[1]) > rows.num_rows:
        return error
    value = value_text(rows.column(place[2])[int(place[1]) - 1])
    return SchemaMismatch(f"{error.message}: the value is {value}", column=place[2])


def _headers(column: pa.MapArray) -> pa.Array:
    """Return headers as JSON, in the form of docs/json.md; null for a record without headers."""
    texts = texts_of(column)
    return pc.if_else(pc.is_in(texts, pa.array(["null", "[]"])), pa.scalar(None, pa.string()), texts)
