"""The form of change records, and the statements that make them: PostgreSQL itself converts all values.

Values of changes arrive as texts. A statement returns them to PostgreSQL as one JSON text, casts each to the type that
its column had, and selects from the result as from a table. So a row has the same form whether it is an initial row or
comes from the log, and types that only PostgreSQL knows need no code here.

There are two forms, for two kinds of streams: `JsonForm` for records without columns, `ColumnsForm` for a stream with
the columns of the table. This module uses a connection only to find the types of columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from kera.connect.postgres import sql
from kera.connect.postgres.columns import ODD_PREFIX, Columns, conformed
from kera.connect.postgres.pgoutput import UNCHANGED, Row
from kera.connect.postgres.replay import Change
from kera.core.errors import InvalidArgument, SchemaMismatch
from kera.core.format.schema import DEFAULT_SCHEMA

META = {"op": pa.string(), "ts_ms": pa.int64(), "lsn": pa.int64()}
"""Columns that describe a change, in addition to those of the table."""
READ = "r"
"""The operation of an initial row."""
_EPOCH = "timestamptz 'epoch'"


class Typed(NamedTuple):
    """The columns of a relation, with their types in SQL."""

    names: tuple[str, ...]
    types: tuple[str, ...]


class Moment(NamedTuple):
    """The moment when the initial rows were read."""

    us: int
    """Microseconds since 1970."""
    lsn: int


class Form(Protocol):
    """How changes become records."""

    schema: pa.Schema

    def reading(self, moment: Moment) -> tuple[str, ...]:
        """Return the expressions to select for the initial rows."""
        ...

    def statement(self, typed: Typed, changes: Sequence[Change]) -> str:
        """Return the statement for the records of `changes`, which have these columns, in order."""
        ...

    def records(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Make the records from rows that `statement`, or a page with `reading`, has returned."""
        ...


def _recordset(names: Sequence[str], types: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return the FROM item for `rows`: ``r`` with these columns, and each row's number ``n``."""
    texts = json.dumps([dict(zip(names, row, strict=True)) for row in rows], ensure_ascii=False)
    columns = ", ".join(f"{name} {kind}" for name, kind in zip(names, types, strict=True))
    given = ", ".join([*names, "n"])
    return f"ROWS FROM (json_to_recordset({sql.literal(texts)}) AS ({columns})) WITH ORDINALITY AS r({given})"


def _numbered(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def _cast(prefix: str, typed: Typed, only: Sequence[str] | None = None) -> str:
    """Return the expressions for the columns of ``r`` named `prefix` and a number, with their real names and types."""
    return ", ".join(
        f"r.{prefix}{number}::{kind} AS {sql.quoted(name)}"
        for number, (name, kind) in enumerate(zip(typed.names, typed.types, strict=True))
        if only is None or name in only
    )


def _texts(row: Row | None, count: int) -> list[str | None]:
    if row is None:
        return [None] * count
    return [value if isinstance(value, str) else None for value in row]


def missing_of(change: Change) -> list[str]:
    """Return the names of columns whose values were not logged, and so are unknown."""
    columns = change.relation.columns
    return [column.name for column, value in zip(columns, change.after or (), strict=False) if value is UNCHANGED]


class JsonForm:
    """Records with the row's key as the key, and a JSON object as the value: op, ts_ms, lsn, before, after."""

    def __init__(self, key: Sequence[str], *, tombstones: bool) -> None:
        """`key`: columns of the primary key. `tombstones`: whether a record without a value follows each deletion."""
        self.schema = pa.schema([DEFAULT_SCHEMA.field(name) for name in ("timestamp", "keys", "value")])
        self._key = tuple(key)
        self._tombstones = tombstones

    def reading(self, moment: Moment) -> tuple[str, ...]:
        """See `Form`."""
        key = sql.column(self._key[0])
        if len(self._key) > 1:
            key = f"(SELECT row_to_json(x) FROM (SELECT {', '.join(map(sql.column, self._key))}) AS x)"
        fields = f"'op', '{READ}', 'ts_ms', {moment.us // 1000}, 'lsn', {moment.lsn}, 'before', NULL"
        return (
            f"{_EPOCH} + {moment.us} * interval '1 microsecond' AS timestamp",
            f"{key}::text AS key",
            f"json_build_object({fields}, 'after', row_to_json({sql.ALIAS}))::text AS value",
        )

    def statement(self, typed: Typed, changes: Sequence[Change]) -> str:
        """See `Form`."""
        count = len(typed.names)
        fixed = {"op": "text", "us": "bigint", "lsn": "bigint", "was": "text", "has": "boolean", "missing": "text[]"}
        names = [*fixed, *_numbered("a", count), *_numbered("b", count)]
        types = [*fixed.values(), *["text"] * (2 * count)]
        rows: list[list[Any]] = []
        for change in changes:
            after, before = _texts(change.after, count), _texts(change.before, count)
            was = None if change.before is None else "whole" if change.whole else "key"
            own = [change.op, change.committed_us, change.lsn, was, change.after is not None]
            rows.append([*own, missing_of(change) or None, *after, *before])
            if change.op == "d" and self._tombstones:
                rows.append([None, *own[1:], None, *after, *before])
        keys = {name: f"COALESCE(r.a{at}, r.b{at})::{typed.types[at]}" for name, at in self._at(typed).items()}
        key = f"{keys[self._key[0]]}::text"
        if len(keys) > 1:
            each = ", ".join(f"{value} AS {sql.quoted(name)}" for name, value in keys.items())
            key = f"(SELECT row_to_json(x)::text FROM (SELECT {each}) AS x)"
        after_row = f"FROM (SELECT {_cast('a', typed)}) AS x"
        known = f"((SELECT to_jsonb(x) {after_row}) - r.missing)::json"
        whole = f"(SELECT row_to_json(x) FROM (SELECT {_cast('b', typed)}) AS x)"
        part = f"(SELECT row_to_json(x) FROM (SELECT {_cast('b', typed, self._key)}) AS x)"
        return f"""
            SELECT {_EPOCH} + r.us * interval '1 microsecond' AS timestamp,
                   CASE WHEN r.op IS DISTINCT FROM 't' THEN {key} END AS key,
                   CASE WHEN r.op IS NOT NULL THEN json_build_object(
                       'op', r.op, 'ts_ms', r.us / 1000, 'lsn', r.lsn,
                       'before', CASE r.was WHEN 'whole' THEN {whole} WHEN 'key' THEN {part} END,
                       'after', CASE WHEN r.has AND r.missing IS NULL THEN (SELECT row_to_json(x) {after_row})
                                     WHEN r.has THEN {known} END
                   )::text END AS value
            FROM {_recordset(names, types, rows)} ORDER BY r.n
        """

    def _at(self, typed: Typed) -> dict[str, int]:
        return {name: typed.names.index(name) for name in self._key}

    def records(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """See `Form`."""
        key = rows.column("key").cast(pa.binary())
        offsets = pa.array(range(rows.num_rows + 1), pa.int32())
        keys = pa.ListArray.from_arrays(offsets, key, mask=key.is_null())
        timestamp, _, value = self.schema.types
        columns = [rows.column("timestamp").cast(timestamp), keys, rows.column("value").cast(value)]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


class ColumnsForm:
    """Records with the columns of the row, and `META`. A deletion has the key and the known values of the old row."""

    def __init__(
        self, table: Columns, wanted: pa.Schema | None, probe: Callable[[str], Columns], *, shown: str
    ) -> None:
        """`table`: the present columns of the table. `wanted`: the columns of the stream, if it exists.

        `probe`: returns the columns of a FROM item. Raises `InvalidArgument` for a table that has a column ``op``, and
        `SchemaMismatch` for a stream without one.
        """
        if "op" in table.schema.names:
            raise InvalidArgument(
                f"{shown} has a column 'op' of its own, so a stream with columns cannot say what a change is: copy into"
                " a stream without columns (values=json)"
            )
        if wanted is not None and "op" not in wanted.names:
            raise SchemaMismatch(
                "the stream has no column 'op' of type string, to tell deletions by: kera stream alter --add-column"
                " adds it; or copy into a stream without columns",
                column="op",
            )
        self._meta = {
            name: pa.field(name, kind)
            for name, kind in META.items()
            if name not in table.schema.names and (wanted is None or name in wanted.names)
        }
        self.schema = pa.schema([*table.schema, *self._meta.values()])
        self._read = table
        self._known = set(wanted.names if wanted is not None else self.schema.names)
        self._probe = probe
        self._shown = shown
        self._of: dict[Typed, Columns] = {}

    def reading(self, moment: Moment) -> tuple[str, ...]:
        """See `Form`."""
        values = {"op": f"'{READ}'::text", "ts_ms": f"{moment.us // 1000}::bigint", "lsn": f"{moment.lsn}::bigint"}
        return (*self._read.expressions, *(f"{values[name]} AS {name}" for name in self._meta))

    def statement(self, typed: Typed, changes: Sequence[Change]) -> str:
        """See `Form`. Raises `SchemaMismatch` for columns that the stream does not have."""
        extra = [name for name in typed.names if name not in self._known]
        if extra:
            raise SchemaMismatch(
                f"{self._shown} has got a column {extra[0]!r} that the copy does not know: start the copy again; a"
                " stream with columns needs the column first, by kera stream alter --add-column",
                column=extra[0],
            )
        count = len(typed.names)
        fixed = {"op": "text", "us": "bigint", "lsn": "bigint"}
        names, types = [*fixed, *_numbered("a", count)], [*fixed.values(), *["text"] * count]
        rows = [
            [change.op, change.committed_us, change.lsn, *_texts(change.after or change.before, count)]
            for change in changes
        ]
        inner = f"""(
            SELECT r.n AS __kera_n, r.op AS __kera_op, r.us / 1000 AS __kera_ts_ms, r.lsn AS __kera_lsn,
                   {_cast("a", typed)}
            FROM {_recordset(names, types, rows)}
        )"""
        meta = [f"{sql.ALIAS}.__kera_{name} AS {name}" for name in self._meta]
        columns = ", ".join([*self._columns(typed).expressions, *meta])
        return f"SELECT {columns} FROM {inner} AS {sql.ALIAS} ORDER BY {sql.ALIAS}.__kera_n"

    def _columns(self, typed: Typed) -> Columns:
        if typed not in self._of:
            each = zip(typed.names, typed.types, strict=True)
            self._of[typed] = self._probe(
                f"(SELECT {', '.join(f'NULL::{kind} AS {sql.quoted(n)}' for n, kind in each)})"
            )
        return self._of[typed]

    def records(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """See `Form`. The records have the columns of `rows`, because the table may have had other columns before."""
        fields = []
        names = [name for name in rows.schema.names if not name.startswith((sql.KEY_PREFIX, ODD_PREFIX))]
        for name in names:
            known = [each.schema for each in (*self._of.values(), self._read) if name in each.schema.names]
            fields.append(self._meta[name] if name in self._meta else known[0].field(name))
        return conformed(rows, pa.schema(fields), self._shown)


def lookup(table: str, typed: Typed, wanted: Sequence[str], keys: Sequence[Mapping[str, str]]) -> str:
    """Return the statement for the present values of the columns `wanted` of the rows with these `keys`.

    It gives the number of the key (from 1), and then the values as texts.
    """
    names = list(keys[0])
    types = dict(zip(typed.names, typed.types, strict=True))
    numbered = _numbered("k", len(names))
    rows = _recordset(numbered, ["text"] * len(names), [[key[name] for name in names] for key in keys])
    same = [f"{sql.column(name)} = r.{k}::{types[name]}" for k, name in zip(numbered, names, strict=True)]
    values = ", ".join(f"{sql.column(name)}::text" for name in wanted)
    return f"SELECT r.n, {values} FROM {rows} JOIN {table} AS {sql.ALIAS} ON {' AND '.join(same)}"
