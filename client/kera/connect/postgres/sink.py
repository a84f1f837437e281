"""A table as the target of a copy: rows and how far the copy is with them, in one transaction.

How far it is, is in a table `STATE_TABLE` beside the target, a row for each copy, with a number that grows with each
transaction: of two processes that run the same copy, one finds the number changed, and ends.

Rows go into the table as they are where types are the same; else into a temporary one, and from there with PostgreSQL's
own conversions, which refuse what does not fit.
"""

from __future__ import annotations

import json
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
from kera.connect.worker import Worker
from kera.core.errors import InternalError, InvalidArgument, KeraError, SchemaMismatch
from kera.core.schema import DEFAULT_SCHEMA

STATE_TABLE = "kera_connect"
ROWS_TABLE = "kera_connect_rows"
RECORDS = pa.schema(
    [DEFAULT_SCHEMA.field("timestamp"), ("key", pa.binary()), ("value", pa.binary()), ("headers", pa.string())]
)
"""What a table has of records without columns of their own; headers are JSON."""


class TableSink:
    """See `kera.connect.pieces.Sink`."""

    piece_bytes = 1 << 20

    def __init__(self, end: TableEnd, name: str, *, create: bool) -> None:
        """`name`: of the copy."""
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
        self._casts: dict[str, str] = {}
        """By column: to which type; empty: rows go in as they are."""
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
        table = sql.table_name(self._end.table)
        if not database.rows(sql.IS_THERE, [table])[0][0]:
            if not self._create:
                raise Refused(f"there is no {self.shown}; --create makes it, with the columns of the stream")
            database.execute(sql.create_table(table, self._schema))
            self.notes.append(f"{self.shown} was made")
        ((schema, name),) = database.rows(sql.PLACE_OF_TABLE, [table])
        self._place = (schema, name)
        self._casts = self._casts_into(database, table)
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

    def _casts_into(self, database: Database, table: str) -> dict[str, str]:
        """Raises `SchemaMismatch` for columns that the table does not have, or needs."""
        found = database.rows(sql.COLUMNS, [table])
        columns = {name: (kind, whole) for name, kind, whole, _ in found}
        casts, differ = {}, False
        for field in self._schema:
            if field.name not in columns:
                raise SchemaMismatch(
                    f"{self.shown} has no column {field.name!r}, and the stream has one; it has {', '.join(columns)}",
                    column=field.name,
                )
            kind, casts[field.name] = columns[field.name]
            differ = differ or kind not in sql.type_of(field)[1]
        needed = [name for name, _, _, must in found if must and name not in self._schema.names]
        if needed:
            raise SchemaMismatch(f"{self.shown} needs column {needed[0]!r}, and the stream has none", column=needed[0])
        return casts if differ else {}

    async def settle(self, rows: Sequence[pa.RecordBatch | None]) -> Progress:
        """See `Sink`: nothing is ever unsure."""
        raise InternalError("this target has nothing that is unsure", spans=len(rows))

    async def put(self, pieces: Sequence[Piece]) -> Mapping[str, Place]:
        """See `Sink`: one transaction. Raises `CopyElsewhere`, `SchemaMismatch`, `Refused`, `Unreachable`."""
        await self._worker.call(self._put, pieces)
        return dict(self._places)

    @property
    def _opened(self) -> Database:
        if self._database is None:
            raise InternalError("the target was not opened")
        return self._database

    def _put(self, pieces: Sequence[Piece]) -> None:
        database = self._opened
        batches = [self._rows(piece.rows) for piece in pieces if piece.rows.num_rows]
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
        if not self._casts:
            database.ingest(self._place[1], rows, schema=self._place[0])
            return
        database.ingest(ROWS_TABLE, rows, temporary=True)
        names = ", ".join(map(sql.quoted, self._casts))
        values = ", ".join(f"{sql.quoted(name)}::{kind}" for name, kind in self._casts.items())
        target = ".".join(map(sql.quoted, self._place))
        try:
            database.execute(f"INSERT INTO {target} ({names}) SELECT {values} FROM pg_temp.{ROWS_TABLE}")
        except SchemaMismatch as error:
            raise self._blamed(error, rows) from error
        database.execute(f"DROP TABLE pg_temp.{ROWS_TABLE}")

    def _blamed(self, error: SchemaMismatch, rows: pa.Table) -> SchemaMismatch:
        """The same, with the name of the column that does not fit: PostgreSQL does not say."""
        database = self._opened
        for name, kind in self._casts.items():
            database.rollback()
            try:
                database.ingest(ROWS_TABLE, rows.select([name]), temporary=True)
                database.rows(f"SELECT count({sql.quoted(name)}::{kind}) FROM pg_temp.{ROWS_TABLE}")
            except KeraError:
                return SchemaMismatch(f"column {name!r} is {kind} there: {error.message}", column=name)
        return error

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
        """See `Sink`: nothing is held back."""
        del complete
        return dict(self._places)

    async def close(self) -> None:
        """See `Sink`."""
        if self._database is not None:
            await self._worker.call(self._database.close)
            self._database = None
        self._worker.close()


def _headers(column: pa.MapArray) -> pa.Array:
    """As JSON, in the form of docs/json.md; null for a record without any."""
    texts = texts_of(column)
    return pc.if_else(pc.is_in(texts, pa.array(["null", "[]"])), pa.scalar(None, pa.string()), texts)
