"""The SQL of copies, as text: names, values, pages of a table by its key. This module uses no connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

from kera.core.errors import InvalidArgument, SchemaMismatch

ALIAS = "kera_rows"
KEY_PREFIX = "__kera_key_"
"""Prefix of columns with the key's values as text."""
TYPES: dict[str, tuple[str, frozenset[str]]] = {
    "int8": ("smallint", frozenset({"int2"})),
    "int16": ("smallint", frozenset({"int2"})),
    "int32": ("integer", frozenset({"int4"})),
    "int64": ("bigint", frozenset({"int8"})),
    "uint8": ("smallint", frozenset()),
    "uint16": ("integer", frozenset()),
    "uint32": ("bigint", frozenset()),
    "float": ("real", frozenset({"float4"})),
    "double": ("double precision", frozenset({"float8"})),
    "bool": ("boolean", frozenset({"bool"})),
    "string": ("text", frozenset({"text", "varchar", "bpchar"})),
    "binary": ("bytea", frozenset({"bytea"})),
    "date32[day]": ("date", frozenset({"date"})),
    "time64[us]": ("time", frozenset({"time"})),
}
"""By Arrow's type, PostgreSQL's type for a created column, and the types that take the values without a conversion."""

IS_THERE = "SELECT to_regclass($1)::oid IS NOT NULL"
IS_TABLE = "SELECT relkind IN ('r', 'p') FROM pg_class WHERE oid = to_regclass($1)"
UNIQUE_KEYS = """
SELECT i.indisprimary, bool_and(a.attnotnull),
       array_to_json(array_agg(a.attname::text ORDER BY array_position(i.indkey, a.attnum)))::text
FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
WHERE i.indrelid = to_regclass($1) AND i.indisunique AND i.indpred IS NULL AND i.indexprs IS NULL
GROUP BY i.indexrelid, i.indisprimary
"""
"""The unique keys of a table: whether each is the primary key, whether all of its columns are NOT NULL, and its
columns."""
TYPE_OF_COLUMN = """
SELECT t.typname::text FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
WHERE a.attrelid = to_regclass($1) AND a.attname = $2
"""
PLACE_OF_TABLE = """
SELECT n.nspname::text, c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = to_regclass($1)
"""
COLUMNS = """
SELECT a.attname::text, t.typname::text, format_type(a.atttypid, a.atttypmod)::text,
       a.attnotnull AND NOT a.atthasdef AND a.attidentity = ''
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""
"""The columns of a table: name, short and full name of the type, and whether each row must give a value."""
TARGET_COLUMNS = """
SELECT a.attname::text, t.typname::text, format_type(a.atttypid, a.atttypmod)::text,
       b.typname::text, format_type(b.oid, -1)::text, a.atttypmod >= 0 OR t.typtype = 'd',
       a.attnotnull AND NOT a.atthasdef AND a.attidentity = ''
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid, LATERAL (
    WITH RECURSIVE d AS (
        SELECT t.oid, t.typname, t.typtype, t.typbasetype
        UNION ALL SELECT n.oid, n.typname, n.typtype, n.typbasetype FROM d JOIN pg_type n ON n.oid = d.typbasetype
    ) SELECT d.oid, d.typname FROM d WHERE d.typtype <> 'd'
) AS b
WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""
"""The columns of a table: name, short and full name of the type, both again without domains and limits, whether it has
any of these, and whether each row must give a value."""
WRITERS = """
SELECT DISTINCT virtualtransaction::text FROM pg_locks
WHERE locktype = 'relation' AND granted AND pid IS DISTINCT FROM pg_backend_pid()
  AND mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND relation IN (SELECT relid::oid FROM pg_partition_tree(to_regclass($1)) UNION SELECT to_regclass($1)::oid)
"""
"""Transactions that may add rows to a table: a statement takes its lock before it draws numbers, and keeps the lock."""
OID_OF_TABLE = "SELECT to_regclass($1)::oid::bigint"
ABOUT_TABLE = """
SELECT c.relkind::text, c.relreplident::text, n.nspname::text, c.relname::text, c.oid::bigint
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass($1)
"""
"""A table's kind, replica identity, schema and name, and its oid, which no later table of the same name has."""
LOGGED_COLUMNS = """
SELECT a.attname::text, to_jsonb(a)->>'attgenerated' <> '' FROM pg_attribute a
WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""
"""The columns of a table, and whether each is generated, and so missing in the log. (It uses JSON because older servers
have no column attgenerated.)"""
PUBLISHED = "SELECT schemaname::text, tablename::text FROM pg_publication_tables WHERE pubname = $1"
IS_PUBLICATION = "SELECT count(*) FROM pg_publication WHERE pubname = $1"
DATABASE = "SELECT current_database()::text"
SLOT = """
SELECT s.plugin::text, s.database::text, s.confirmed_flush_lsn::text, to_jsonb(s)->>'wal_status'
FROM pg_replication_slots s WHERE s.slot_name = $1
"""
MAKE_SLOT = "SELECT lsn::text FROM pg_create_logical_replication_slot($1, 'pgoutput')"
LET_GO = "SELECT end_lsn::text FROM pg_replication_slot_advance($1, $2::pg_lsn)"
LOG_ENDS = "SELECT pg_current_wal_insert_lsn()::text, pg_current_wal_flush_lsn()::text"
TAKE_SNAPSHOT = """
SELECT txid_current_snapshot()::text, pg_current_wal_insert_lsn()::text,
       (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
"""
NEXT_TRANSACTION = "SELECT txid_current()"
OLDEST_TRANSACTION = "SELECT txid_snapshot_xmin(txid_current_snapshot())"
STATE = """
CREATE TABLE IF NOT EXISTS {state} (
    name text PRIMARY KEY, source text NOT NULL, target text NOT NULL, places text NOT NULL, records bigint NOT NULL,
    round bigint NOT NULL, changed timestamptz NOT NULL DEFAULT now()
)
"""
"""The table with the progress of each copy."""
BEGIN = """
INSERT INTO {state} (name, source, target, places, records, round) VALUES ($1, $2, $3, '{{}}', 0, 0)
ON CONFLICT DO NOTHING
"""
HOW_FAR = "SELECT source, target, places, records, round FROM {state} WHERE name = $1"
GO_ON = """
UPDATE {state} SET places = $1, records = $2, round = round + 1, changed = now() WHERE name = $3 AND round = $4
RETURNING round
"""


class Rows(NamedTuple):
    """The source of rows, and the key by which they are read."""

    source: str
    """The FROM item."""
    columns: tuple[str, ...]
    """Expressions to select, each with its name."""
    key: tuple[str, ...]


def quoted(name: str) -> str:
    """Quote the name of a table or column. Raises `InvalidArgument` if it is not a valid name."""
    if not name or "\0" in name:
        raise InvalidArgument(f"{name!r} is not a table or column name")
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """Return a text as an SQL literal, which PostgreSQL converts to the type that it is compared with."""
    if "\0" in value:
        raise InvalidArgument("a value of the key has a NUL, which PostgreSQL does not take")
    return "'" + value.replace("'", "''") + "'"


def table_name(text: str) -> str:
    """Quote the parts of ``schema.table`` or ``table``."""
    return ".".join(quoted(part) for part in text.split("."))


def column(name: str) -> str:
    """Return a column of the rows with the alias; without it, ORDER BY would mean the selected text of the column."""
    return f"{ALIAS}.{quoted(name)}"


def _key(key: Sequence[str]) -> str:
    return ", ".join(map(column, key))


def within(key: Sequence[str], start: Sequence[str] | None, end: Sequence[str] | None) -> str:
    """Return the WHERE clause for rows after `start` up to `end`; None: there is no such bound."""
    bounds = [(">", start), ("<=", end)]
    found = [f"({_key(key)}) {sign} ({', '.join(map(literal, bound))})" for sign, bound in bounds if bound is not None]
    return " WHERE " + " AND ".join(found) if found else ""


def page(rows: Rows, start: Sequence[str] | None, end: Sequence[str] | None, limit: int | None) -> str:
    """Return the query for rows in the order of the key, with the key's values as text in additional columns."""
    keys = [f"{column(name)}::text AS {KEY_PREFIX}{number}" for number, name in enumerate(rows.key)]
    text = f"SELECT {', '.join([*rows.columns, *keys])} FROM {rows.source} AS {ALIAS}{within(rows.key, start, end)}"
    return f"{text} ORDER BY {_key(rows.key)}" + (f" LIMIT {limit}" if limit else "")


def columns_of(rows: str) -> str:
    """Return a query that has no rows, but all columns."""
    return f"SELECT * FROM {rows} AS {ALIAS} LIMIT 0"


def last_key(rows: Rows) -> str:
    """Return the query for the key of the last row, as text."""
    keys = ", ".join(f"{column(name)}::text" for name in rows.key)
    order = ", ".join(f"{column(name)} DESC" for name in rows.key)
    return f"SELECT {keys} FROM {rows.source} AS {ALIAS} ORDER BY {order} LIMIT 1"


def peek(slot: str, publication: str, messages_max: int) -> str:
    """Return the query for a slot's messages, up to the end of the transaction that has message `messages_max`."""
    return (
        f"SELECT data FROM pg_logical_slot_peek_binary_changes({literal(slot)}, NULL, {messages_max},"
        f" 'proto_version', '1', 'publication_names', {literal(quoted(publication))})"
    )


def names_of_types(types: Sequence[tuple[int, int]]) -> str:
    """Return the query for the names of types, in order; each is given by its oid and modifier."""
    return f"SELECT {', '.join(f'format_type({oid}, {modifier})::text' for oid, modifier in types)}"


def estimate(rows: Rows, start: Sequence[str] | None) -> str:
    """Return the query that estimates how many rows come after `start`."""
    return f"EXPLAIN (FORMAT JSON) SELECT 1 FROM {rows.source} AS {ALIAS}{within(rows.key, start, None)}"


def lossy(rows: str, conditions: Sequence[str]) -> str:
    """Return the query for the first row (counted from 1) that meets a condition, and for that condition (from 0)."""
    cases = " ".join(f"WHEN {condition} THEN {number}" for number, condition in enumerate(conditions))
    numbered = f"(SELECT row_number() OVER () AS __kera_n, * FROM {rows}) AS {ALIAS}"
    which = f"SELECT __kera_n, CASE {cases} END AS which FROM {numbered}"
    return f"SELECT __kera_n, which::bigint FROM ({which}) AS found WHERE which IS NOT NULL ORDER BY __kera_n LIMIT 1"


def type_of(field: pa.Field) -> tuple[str, frozenset[str]]:
    """Return what `TYPES` has for a column's type. Raises `SchemaMismatch` for a type that a table cannot have."""
    kind = field.type
    found = TYPES.get(str(kind))
    if found is not None:
        return found
    if pa.types.is_timestamp(kind):
        return (
            ("timestamp with time zone", frozenset({"timestamptz"}))
            if kind.tz
            else ("timestamp without time zone", frozenset({"timestamp"}))
        )
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision}, {kind.scale})", frozenset({"numeric"})
    if pa.types.is_list(kind) and not pa.types.is_nested(kind.value_type):
        inner, _ = type_of(pa.field(field.name, kind.value_type))
        return f"{inner}[]", frozenset()
    raise SchemaMismatch(f"column {field.name!r} is {kind}, for which a table has no type", column=field.name)


def create_table(name: str, schema: pa.Schema) -> str:
    """Return the statement for a table with the columns of a stream. Raises `SchemaMismatch`."""
    return f"CREATE TABLE {name} ({', '.join(f'{quoted(field.name)} {type_of(field)[0]}' for field in schema)})"
