"""Columns of PostgreSQL as columns of Arrow: the type that each becomes, and the values that this type cannot hold.

A value is copied unchanged, or the copy ends with an error that shows it. Types that Arrow lacks become text, in
PostgreSQL's form. Some Arrow types cannot hold every value of PostgreSQL's type: Arrow has no infinite date, and no
array with several dimensions. The driver would return another value for these. So for each column that may have such
values, the query also selects their text in an additional column (`ODD_PREFIX`), which is null for other values.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from kera.connect.postgres import sql
from kera.connect.postgres.connection import Database
from kera.connect.postgres.conversions import value_text
from kera.core.errors import SchemaMismatch

ODD_PREFIX = "__kera_odd_"
"""Prefix of columns with values that do not fit; the number of the original column follows."""
_TYPE_NAME = b"POSTGRESQL:type"
"""The driver's metadata of a column with its type in PostgreSQL."""
_AS_NUMBERS = {"oid": "bigint", "_oid": "bigint[]"}
"""Unsigned types, which the driver returns as signed numbers."""
_AS_TEXT = {"money": "numeric::text", "_money": "numeric[]::text", "char": "text", "_char": "text[]"}
"""Types whose values the driver changes: money loses its decimal point, and an empty "char" becomes a NUL."""
_VECTORS = {"int2vector", "oidvector"}
"""Arrays that start with element 0."""
_AFTER_ALL = "294247-01-10 04:00:54.775808"
"""The first time that does not fit into 64-bit microseconds since 1970."""
_ODD = {
    "date": "NOT isfinite({0})",
    "timestamp": f"NOT isfinite({{0}}) OR {{0}} >= timestamp '{_AFTER_ALL}'",
    "timestamptz": f"NOT isfinite({{0}}) OR {{0}} >= timestamptz '{_AFTER_ALL}+00'",
    "time": "{0} = time '24:00'",
}
"""The condition for values that Arrow's type cannot hold, by type; also for elements of arrays."""


class Columns(NamedTuple):
    """The columns of some rows."""

    schema: pa.Schema
    """The schema of the copied columns."""
    expressions: tuple[str, ...]
    """Expressions to select: each column of `schema` under its name, and then the columns of `ODD_PREFIX`."""


def columns_of(database: Database, source: str, wanted: pa.Schema | None) -> Columns:
    """Return the columns of the rows of `source`.

    `wanted`: the columns of the target, if it exists. A column that is text in the target is selected as text, and a
    column that is a decimal in the target becomes a decimal.
    """
    with database.batches(sql.columns_of(source), 1 << 20) as reader:
        found = reader.schema
    expressions, odd, fields = [], [], []
    for number, field in enumerate(found):
        column, target = sql.column(field.name), _type_in(wanted, field.name)
        cast, kind = _selected(field, target)
        expressions.append(f"{column}{cast} AS {sql.quoted(field.name)}")
        fields.append(pa.field(field.name, kind))
        if not cast and (condition := _odd(field, column)):
            odd.append(f"CASE WHEN {condition} THEN {column}::text END AS {ODD_PREFIX}{number}")
    return Columns(pa.schema(fields), (*expressions, *odd))


def _type_in(schema: pa.Schema | None, name: str) -> pa.DataType | None:
    return schema.field(name).type if schema is not None and name in schema.names else None


def _selected(field: pa.Field, target: pa.DataType | None) -> tuple[str, pa.DataType]:
    """Return the cast with which a column is selected, and its type in Arrow."""
    name = _type_name(field)
    as_decimal = target if target is not None and pa.types.is_decimal(target) else pa.string()
    if name in _AS_TEXT:
        cast = _AS_TEXT[name]
        return f"::{cast}", pa.list_(pa.string()) if cast == "text[]" else as_decimal
    if not _is_native(field.type) or name in _VECTORS:
        return "::text", as_decimal
    if target == pa.string() and not pa.types.is_string(field.type):
        return "::text", pa.string()
    if name in _AS_NUMBERS:
        return f"::{_AS_NUMBERS[name]}", pa.list_(pa.int64()) if name.startswith("_") else pa.int64()
    return "", _plain(field.type)


def _type_name(field: pa.Field) -> str:
    name: bytes = (field.metadata or {}).get(_TYPE_NAME, b"")
    return name.decode()


def _is_native(kind: pa.DataType) -> bool:
    """Return whether Arrow has the type of a PostgreSQL column, and all of its values can be checked."""
    if pa.types.is_list(kind):
        return _is_native(kind.value_type)
    if pa.types.is_struct(kind):
        return all(_is_native(field.type) and _is_plain(field) for field in kind)
    return not (isinstance(kind, pa.BaseExtensionType) or pa.types.is_interval(kind) or pa.types.is_duration(kind))


def _is_plain(field: pa.Field) -> bool:
    """Return whether Arrow's type of a part of a composite can hold all of its values."""
    if pa.types.is_struct(field.type):
        return True  # its parts are checked separately
    kind = field.type
    certain = pa.types.is_boolean(kind) or pa.types.is_floating(kind) or pa.types.is_binary(kind)
    return certain or _type_name(field) in {"int2", "int4", "int8", "text", "varchar", "bpchar"}


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return `kind` without the driver's metadata on the values of a list."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _plain(field.type)) for field in kind])
    return pa.list_(_plain(kind.value_type)) if pa.types.is_list(kind) else kind


def _odd(field: pa.Field, column: str) -> str:
    """Return the condition for values that the column's Arrow type cannot hold; empty: it can hold all."""
    name = _type_name(field)
    if not pa.types.is_list(field.type):
        return _ODD.get(name, _ODD_BY_TYPE.get(field.type, "")).format(column)
    bounds = f"array_ndims({column}) > 1 OR array_lower({column}, 1) <> 1"
    of_element = _ODD.get(name.removeprefix("_"), _ODD_BY_TYPE.get(field.type.value_type, "")).format("each")
    return f"{bounds} OR EXISTS (SELECT FROM unnest({column}) AS each WHERE {of_element})" if of_element else bounds


_ODD_BY_TYPE = {
    pa.date32(): _ODD["date"],
    pa.timestamp("us"): _ODD["timestamp"],
    pa.timestamp("us", tz="UTC"): _ODD["timestamptz"],
    pa.time64("us"): _ODD["time"],
}
"""The conditions by Arrow type, for types with other names, such as domains."""


def conformed(rows: pa.RecordBatch, schema: pa.Schema, shown: str) -> pa.RecordBatch:
    """Return `rows` with the columns of `schema`. Raises `SchemaMismatch` for a value that does not fit its type."""
    for name in rows.schema.names:
        if name.startswith(ODD_PREFIX) and rows.column(name).null_count < rows.num_rows:
            _refuse(rows, int(name.removeprefix(ODD_PREFIX)), rows.column(name), shown)
    columns = []
    for field in schema:
        column = rows.column(field.name)
        try:
            columns.append(column if column.type == field.type else column.cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            at = next((at for at in range(len(column)) if not _fits(column[at], field.type)), 0)
            raise SchemaMismatch(
                f"{shown}: column {field.name!r} of {_row(rows, at)} has {value_text(column[at])}, which does"
                f" not fit {field.type}: {error}",
                column=field.name,
            ) from error
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _fits(value: pa.Scalar, kind: pa.DataType) -> bool:
    try:
        value.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    return True


def _refuse(rows: pa.RecordBatch, number: int, odd: pa.Array, shown: str) -> None:
    at = odd.is_valid().index(True).as_py()
    field = rows.schema[number]
    raise SchemaMismatch(
        f"{shown}: column {field.name!r} of {_row(rows, at)} has {odd[at].as_py()}, which {_plain(field.type)} cannot"
        f" hold. A column of type string in the stream takes it as text, and so does query= with {field.name}::text",
        column=field.name,
    )


def _row(rows: pa.RecordBatch, at: int) -> str:
    """Describe a row for a message, by its key if that was selected."""
    key = [rows.column(name)[at].as_py() for name in rows.schema.names if name.startswith(sql.KEY_PREFIX)]
    return f"the row with key {', '.join(map(str, key))}" if key else f"row {at + 1}"
