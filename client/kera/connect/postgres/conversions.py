"""Conversions of values for a table, and the conditions under which a conversion would change a value.

Many casts of PostgreSQL round, truncate or drop data without an error: 1.26 becomes 1.3 in a numeric(4,1), 'abcdef'
becomes 'abc' in a varchar(3), and a column without a time zone ignores a value's zone. `Conversion.loss` is the SQL
condition for values that a cast would change. The driver changes other values, because it counts times from another
year; `fitting` refuses these. This module uses no connection.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from kera.connect.postgres import sql
from kera.core.errors import SchemaMismatch

_NUMBERS = {"int2", "int4", "int8", "float4", "float8", "numeric", "money", "oid"}
_NUMBERS_IN = {"smallint", "integer", "bigint", "real", "double precision", "numeric"}
_TIMES = {"date", "time", "timetz", "timestamp", "timestamptz"}
_TIMES_IN = {"date", "time", "timestamp with time zone", "timestamp without time zone"}
_SECONDS_TOO_FINE = r"{v} ~ '\.\d{{6}}0*[1-9]'"
_LOSS_OF_TEXT = {
    **dict.fromkeys(
        ("float4", "float8"),
        "CASE WHEN {v} ~* 'inf|nan' THEN false ELSE {v}::{base}::text::numeric <> {v}::numeric END",
    ),
    **dict.fromkeys(("char", "name"), "{v}::{base}::text <> {v}"),
    **dict.fromkeys(("timestamptz", "timetz", "interval"), _SECONDS_TOO_FINE),
    "timestamp": _SECONDS_TOO_FINE + " OR {v}::timestamptz::timestamp <> {v}::timestamp",
    "time": _SECONDS_TOO_FINE + r" OR {v} ~ '^\s*\d+-\d|[-+]\d+(:\d+)*\s*$'",
    "date": "{v} ~ ':' AND {v}::timestamp <> {v}::date::timestamp",
}
"""The condition for texts that a cast would change, by the name of the target type."""
DATES = -2_440_588, 2_145_042_905
"""PostgreSQL's first and last day, counted from 1970. Days outside would become other values, such as infinity."""
TIMES_US_MIN = -210_866_803_200_000_000
DAY_US = 86_400_000_000


class Target(NamedTuple):
    """A column of the table."""

    type_name: str
    """The short name of the type, which may be a domain."""
    type: str
    """The full name of the type, with its precision or length."""
    base_name: str
    """The short name of the domain's base type, or of the type itself."""
    base: str
    """The full name of the base type, without precision or length."""
    is_limited: bool
    """Whether the type has a precision or length, or is a domain."""


class Conversion(NamedTuple):
    """The conversion of a stream's column into a table's column."""

    name: str
    """Name of both columns."""
    source: str
    """The SQL type of the stream's column."""
    target: Target

    @property
    def is_none(self) -> bool:
        """Whether the driver can write the values into the table without a conversion."""
        return self.source == self.target.type

    @property
    def expression(self) -> str:
        """The SQL expression for the converted value."""
        value, target = sql.quoted(self.name), self.target
        if target.base_name == "money":
            return f"{value}::numeric::{target.type}"  # the cast of a text depends on the locale
        if target.base_name == "numeric" and self.source in ("real", "double precision"):
            return f"{value}::text::{target.type}"  # a direct cast keeps only 6 or 15 digits
        return f"{value}::{target.type}"

    @property
    def loss(self) -> str:
        """The SQL condition for values that the conversion changes; empty: it changes no value."""
        value, target = sql.quoted(self.name), self.target
        source = self.source.partition("(")[0]
        found = []
        if target.is_limited and target.base_name != "money":
            found.append(f"{self.expression}::{target.base} IS DISTINCT FROM {self._unlimited}")
        if (source in _NUMBERS_IN and target.base_name in _NUMBERS) or (
            source in _TIMES_IN and target.base_name in _TIMES
        ):
            back = "numeric" if target.base_name == "money" else source
            found.append(f"{self.expression}::{back} IS DISTINCT FROM {value}::{back}")
        if source == "text" and target.base_name == "money":
            found.append(f"{self.expression}::numeric IS DISTINCT FROM {value}::numeric")
        elif source == "text" and target.base_name in _LOSS_OF_TEXT:
            found.append(_LOSS_OF_TEXT[target.base_name].format(v=value, base=target.base))
        return " OR ".join(f"({condition})" for condition in found)

    @property
    def _unlimited(self) -> str:
        """The SQL expression for the value in the target's type without limits."""
        return self._replace(target=self.target._replace(type=self.target.base)).expression


def fitting(rows: pa.RecordBatch, shown: str) -> pa.RecordBatch:
    """Return `rows` with times in microseconds. Raises `SchemaMismatch` for a value that PostgreSQL cannot hold."""
    columns = []
    for field, column in zip(rows.schema, rows.columns, strict=True):
        kind = _in_microseconds(field.type)
        try:
            fit = column if kind == field.type else column.cast(kind)
        except pa.ArrowInvalid as error:
            row = next(row for row in range(len(column)) if not _casts(column[row], kind))
            raise _unfit(field, column, row, shown, "does not fit into PostgreSQL's microseconds") from error
        misfit, why = _misfit(fit)
        if misfit is not None:
            raise _unfit(field, column, misfit, shown, why)
        columns.append(fit)
    return pa.RecordBatch.from_arrays(columns, names=rows.schema.names)


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(_in_microseconds(kind.value_type))
    return pa.timestamp("us", kind.tz) if pa.types.is_timestamp(kind) else kind


def _casts(value: pa.Scalar, kind: pa.DataType) -> bool:
    try:
        pa.array([value], value.type).cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


def _misfit(column: pa.Array) -> tuple[int | None, str]:
    """Return the first row with a value that PostgreSQL cannot hold, and why; None: it can hold all."""
    kind, why = column.type, "is out of PostgreSQL's range"
    if pa.types.is_list(kind):
        at, why = _misfit(column.flatten())
        return None if at is None else pc.list_parent_indices(column)[at].as_py(), why
    if pa.types.is_timestamp(kind):
        bad = pc.less(column.cast(pa.int64()), TIMES_US_MIN)
    elif pa.types.is_date32(kind):
        days = column.cast(pa.int32())
        bad = pc.or_(pc.less(days, DATES[0]), pc.greater(days, DATES[1]))
    elif pa.types.is_time64(kind):
        us = column.cast(pa.int64())
        bad = pc.or_(pc.less(us, 0), pc.greater(us, DAY_US))
    elif pa.types.is_string(kind):
        bad, why = pc.match_substring(column, "\0"), "has a NUL, which PostgreSQL does not take in text"
    else:
        return None, why
    at = bad.index(True).as_py()
    return (None if at < 0 else at), why


def _unfit(field: pa.Field, column: pa.Array, at: int, shown: str, why: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"{shown}: column {field.name!r} of record {at + 1} of a piece has {value_text(column[at])}, which {why}",
        column=field.name,
    )


def value_text(value: pa.Scalar) -> str:
    """Return a value for a message, in one line of bounded length; a time out of Python's range appears as a number."""
    if pa.types.is_string(value.type):
        return repr(value.as_py())[:200]
    try:
        return " ".join(str(value).split())[:200]
    except (OverflowError, ValueError):
        return " ".join(pa.array([value], value.type).to_string().split())[:200]
