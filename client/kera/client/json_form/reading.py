"""Reads lines of JSON as rows of a schema.

Arrow's reader is used if its result is certain to be exact: it supports most types, but not all, and accepts some
numbers that a column cannot hold. Otherwise, lines are parsed one by one (`texts`, `building`): this is exact, supports
all types, and names the line and the field of an error.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from pyarrow import types

from kera.client.json_form.building import column_of
from kera.client.json_form.leaves import Misfit
from kera.client.json_form.texts import BOM, cut, decoded, parsed_line
from kera.client.json_form.writing import has_names_twice
from kera.core.errors import SchemaMismatch


def rows_of_lines(block: bytes, schema: pa.Schema, first_line: int = 1) -> pa.RecordBatch:
    """Return a row of `schema` for each JSON object in the lines of `block`; blank lines are left out.

    `first_line` is the number of the first line. Raises `SchemaMismatch`, which names the line.
    """
    found = _by_arrow(block, schema)
    return _by_line(block, schema, first_line) if found is None else found


def lines_of(block: bytes, first_line: int) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the text of each line that is not blank."""
    if first_line == 1:
        block = block.removeprefix(BOM)
    for number, line in enumerate(block.split(b"\n"), first_line):
        if line.strip():
            yield number, line


def wrong_line(number: int, reason: object) -> SchemaMismatch:
    """Return the error for a line."""
    return SchemaMismatch(f"line {number}: {reason}", line=number)


def is_exact(block: bytes, schema: pa.Schema) -> bool:
    """Return whether Arrow certainly reads the lines of `block` as rows of `schema` without changing a value."""
    return _by_arrow(block, schema) is not None


# -- by line ---------------------------------------------------------------------------------------------------------


def _by_line(block: bytes, schema: pa.Schema, first_line: int) -> pa.RecordBatch:
    numbers: list[int] = []
    rows: list[dict[str, Any]] = []
    known = set(schema.names)
    for number, line in lines_of(block, first_line):
        try:
            row = parsed_line(decoded(line))
        except ValueError as error:
            raise wrong_line(number, error) from None
        if unknown := row.keys() - known:
            raise wrong_line(
                number, f"there is no column {cut(min(unknown))!r} in the stream; it has {', '.join(schema.names)}"
            )
        numbers.append(number)
        rows.append(row)
    columns = []
    for field in schema:
        try:
            columns.append(column_of(field, [row.get(field.name) for row in rows]))
        except Misfit as error:
            raise wrong_line(numbers[error.at], f"column {field.name + error.path!r} is {error.reason}") from None
    return pa.RecordBatch.from_arrays(columns, schema=schema)


# -- by Arrow --------------------------------------------------------------------------------------------------------


def _by_arrow(block: bytes, schema: pa.Schema) -> pa.RecordBatch | None:
    """Return the rows if Arrow has certainly read them exactly; else None."""
    fields = [_readable(field) for field in schema]
    exponent_digits = min(_exponent_digits(field.type) for field in schema) if len(schema) else 0
    if not fields or any(field is None for field in fields) or _has_long_numbers(block, exponent_digits):
        return None
    try:
        table = pa.json.read_json(
            io.BytesIO(block),
            read_options=pa.json.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=pa.json.ParseOptions(explicit_schema=pa.schema(fields), unexpected_field_behavior="error"),
        )
        batches = table.combine_chunks().to_batches()
        if not batches:
            return None
        columns = [_cast(column, field.type) for column, field in zip(batches[0].columns, schema, strict=True)]
        sure = all(_is_sure(column, field) for column, field in zip(columns, schema, strict=True))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError):
        return None
    if not sure or not _is_a_row_per_line(block, len(columns[0])):
        return None
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _is_a_row_per_line(block: bytes, rows: int) -> bool:
    """Return whether there are as many rows as lines: no object spans several lines or shares a line."""
    lines = block.count(b"\n") + (not block.endswith(b"\n"))
    exact = rows == lines and b"\n\n" not in block
    return exact or rows == sum(1 for line in block.split(b"\n") if line.strip())


def _readable(field: pa.Field) -> pa.Field | None:
    """Return the field with the type that Arrow's reader should read, before `_cast`; None: it cannot read it."""
    kind = _readable_type(field.type)
    return None if kind is None else pa.field(field.name, kind)


def _readable_type(kind: pa.DataType) -> pa.DataType | None:
    if isinstance(kind, pa.BaseExtensionType):
        return None
    if types.is_struct(kind):
        fields = [_readable(kind.field(at)) for at in range(kind.num_fields)]
        plain = bool(fields) and all(field is not None for field in fields) and not has_names_twice(kind)
        return pa.struct(fields) if plain else None
    if types.is_list(kind):
        inner = _readable(kind.value_field)
        return None if inner is None else pa.list_(inner)
    return next((read(kind) for is_one, read in _READABLE if is_one(kind)), None)


_READABLE: list[tuple[Any, Any]] = [
    # The reader expects a number of days, or of seconds; the cast accepts 2026-01-02.
    (types.is_date32, lambda _: pa.string()),
    (types.is_time, lambda _: pa.string()),
    (types.is_duration, lambda _: pa.int64()),
    # It refuses digits below the unit, even zeros.
    (lambda kind: types.is_timestamp(kind) and kind.unit in ("s", "ms"), lambda kind: pa.timestamp("us", kind.tz)),
    *(
        (is_one, lambda kind: kind)
        for is_one in (
            types.is_boolean,
            types.is_integer,
            types.is_float32,
            types.is_float64,
            types.is_decimal,
            types.is_string,
            types.is_large_string,
            types.is_binary,
            types.is_large_binary,
            types.is_timestamp,
        )
    ),
]


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert a column that was read to its type in the stream. Raises Arrow's errors."""
    if column.type == kind:
        return column
    if types.is_time(kind):
        # Arrow has no cast from text to a time of day.
        moments = pc.binary_join_element_wise("1970-01-01T", column, "").cast(pa.timestamp(kind.unit))
        return moments.cast(kind)
    if types.is_list(kind):
        inner = _cast(column.values, kind.value_type)
        mask = column.is_null() if column.null_count else None
        return pa.ListArray.from_arrays(column.offsets, inner, type=kind, mask=mask)
    if types.is_struct(kind):
        inner_fields = [kind.field(at) for at in range(kind.num_fields)]
        parts = [_cast(column.field(at), field.type) for at, field in enumerate(inner_fields)]
        mask = column.is_null() if column.null_count else None
        return pa.StructArray.from_arrays(parts, fields=inner_fields, mask=mask)
    return column.cast(kind)


_ANY_DIGITS = 4
"""A number of digits that no valid exponent of a float has."""


def _exponent_digits(kind: pa.DataType) -> int:
    """Return the least number of digits of an exponent that may be out of range for a float of the type."""
    if types.is_floating(kind):
        return 3 if types.is_float64(kind) else 2
    return min((_exponent_digits(kind.field(at).type) for at in range(kind.num_fields)), default=_ANY_DIGITS)


_INTEGERS_EXACT = {32: 2.0**24, 64: 2.0**53}
"""The bound below which a float holds all integers exactly, by its number of bits."""


def _is_sure(column: pa.Array, field: pa.Field) -> bool:
    """Return whether no value can have changed, and there is no null that the field forbids.

    Raises `pa.ArrowInvalid` for a value that the type does not have.
    """
    kind = field.type
    if column.null_count and not field.nullable:
        return False
    if types.is_floating(kind):
        low, high = (each.as_py() for each in pc.min_max(column).values())
        bound = _INTEGERS_EXACT[kind.bit_width]
        return low is None or bool(-bound < low and high < bound)  # false for NaN
    if types.is_decimal(kind):
        column.validate(full=True)  # the reader accepts 1E20, which has 21 digits, for a type of 20 digits
        return True
    if types.is_list(kind):
        return _is_sure(column.values, kind.value_field)
    if types.is_struct(kind):
        parts = column.flatten() if not column.null_count else [column.field(at) for at in range(kind.num_fields)]
        return all(_is_sure(part, kind.field(at)) for at, part in enumerate(parts))
    return True


_EXPONENT, _POINT, _DIGIT = 1, 2, 3
_KINDS = bytes(
    _DIGIT if chr(byte).isdecimal() else _POINT if byte == ord(".") else _EXPONENT if chr(byte) in "eE" else 0
    for byte in range(256)
)
"""The kind of each byte, as a part of a number."""


def _has_long_numbers(block: bytes, exponent_digits: int) -> bool:
    """Return whether there may be a number with a fraction or an exponent that no float has.

    Looks for more than 17 digits, and for exponents of `exponent_digits`. `_is_sure` checks integers.
    """
    if exponent_digits >= _ANY_DIGITS:
        return False
    kinds = np.frombuffer(block.translate(_KINDS), np.uint8)
    digit = kinds == _DIGIT
    exponent = np.flatnonzero((kinds[1:-3] == _EXPONENT) & digit[:-4])
    if len(exponent) and _has_exponent(block, digit, exponent + 1, exponent_digits):
        return True
    within = kinds >= _POINT
    edges = np.flatnonzero(within[1:] != within[:-1])
    if len(edges) % 2:  # no JSON object begins or ends with a digit, so this is not one
        return True
    begins, ends = edges[::2] + 1, edges[1::2] + 1
    lengths = ends - begins
    long = (lengths > 18) | (lengths == 18) & (kinds[ends] == _EXPONENT)
    if not long.any():
        return False
    data = np.frombuffer(block, np.uint8)
    begins, ends, lengths = begins[long], ends[long], lengths[long]
    tiny = (lengths == 19) & (data[begins] == ord("0")) & (data[begins + 1] == ord("."))
    return any(_is_long(block, int(begins[at]), int(ends[at])) for at in np.flatnonzero(~tiny))


def _has_exponent(block: bytes, digit: Any, at: Any, digits: int) -> bool:
    """Return whether at least `digits` digits follow one of the exponents at `at`."""
    data = np.frombuffer(block, np.uint8)
    signed = (data[at + 1] == ord("-")) | (data[at + 1] == ord("+"))
    behind = at + 1 + signed
    behind = behind[behind + digits <= len(data)]
    return bool(np.logical_and.reduce([digit[behind + number] for number in range(digits)]).any())


_RUN_MAX = 40
"""Maximum length of a run: with more zeros behind the point, a number may be smaller than the smallest float32."""


def _is_long(block: bytes, begin: int, end: int) -> bool:
    """Return whether a run of digits and points may be part of a non-integer number of more than 17 digits."""
    if block[begin - 1 : begin] == b'"' == block[end : end + 1]:
        return False
    if end - begin > _RUN_MAX:
        return True
    digits = block[begin:end].lstrip(b"0.").replace(b".", b"")
    return len(digits) > 17 and (b"." in block[begin:end] or block[end : end + 1] in b"eE")
