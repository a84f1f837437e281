"""Infers the columns of files without types, so that no value of a sample changes.

Arrow infers types. It turns integers of more than 64 bits into floats, and drops leading zeros of numbers. If that
would change a value of the sample, the column gets a type that holds all values instead: larger integers, decimals, or,
in CSV, text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from pyarrow import types

from kera.client.json_form.leaves import claims_more
from kera.client.json_form.reading import is_exact, lines_of, wrong_line
from kera.client.json_form.records import FIELDS, PLACE_FIELDS
from kera.client.json_form.texts import Number, Symbol, cut, decoded, parsed_line
from kera.connect.files.numbers import FLOAT_DIGITS_SURE
from kera.core.errors import SchemaMismatch
from kera.core.format.schema import DEFAULT_SCHEMA

LINES_LOOKED_AT = 100
"""Number of lines that show whether lines are records in the form of ``kera consume --json``."""
DECIMAL128_DIGITS, DECIMAL256_DIGITS = 38, 76


def exact_type(texts: Iterable[str]) -> pa.DataType | None:
    """Return the numeric type that holds all of `texts`, which are JSON numbers, exactly; None: no type does."""
    whole = fraction = 0
    negative = is_float = False
    exact = True
    for text in texts:
        mantissa, _, exponent = text.lower().partition("e")
        before, point, behind = mantissa.removeprefix("-").partition(".")
        power = int(exponent or 0) if len(exponent) < 6 else 1 << 20
        digits = before + behind
        whole = max(whole, len(digits.lstrip("0")) - len(behind) + power if digits.strip("0") else 0)
        fraction = max(fraction, len(behind) - power)
        negative = negative or text.startswith("-")
        is_float = is_float or bool(point or exponent)
        own = Number(text) if point or exponent or len(text) > 99 else int(text)
        exact = exact and not claims_more(own, float(text), FLOAT_DIGITS_SURE)
    if is_float and exact:
        return pa.float64()
    if not is_float and whole <= 20:
        low, high = _bounds(texts)
        if low >= -(1 << 63) and high < 1 << 63:
            return pa.int64()
        if low >= 0 and high < 1 << 64:
            return pa.uint64()
    if whole + fraction <= DECIMAL128_DIGITS:
        return pa.decimal128(DECIMAL128_DIGITS, fraction)
    return pa.decimal256(DECIMAL256_DIGITS, fraction) if whole + fraction <= DECIMAL256_DIGITS else None


def _bounds(texts: Iterable[str]) -> tuple[int, int]:
    numbers = [int(text) for text in texts]
    return min(numbers, default=0), max(numbers, default=0)


# -- lines of JSON ---------------------------------------------------------------------------------------------------


def columns_of_lines(block: bytes) -> pa.Schema:
    """Return the columns of lines of JSON: the default schema, if they are records in the form of kera consume.

    Raises `SchemaMismatch`, which names the line, and Arrow's error for values of several types in a column.
    """
    rows: list[dict[str, Any]] = []
    for number, line in lines_of(block, 1):
        if len(rows) == LINES_LOOKED_AT:
            break
        rows.append(_row(number, line))
    names = {name for row in rows for name in row}
    if names <= FIELDS | PLACE_FIELDS and names & {"value", "value_base64"}:
        return DEFAULT_SCHEMA
    try:
        reading = pa.json.ReadOptions(use_threads=False, block_size=len(block) + 1)
        found = pa.json.read_json(pa.BufferReader(block), read_options=reading).schema
    except pa.ArrowInvalid as error:
        row = _ARROW_ROW.search(str(error))
        for at, (number, line) in enumerate(lines_of(block, 1)):
            _check_numbers(number, _row(number, line))
            if row is not None and at == int(row[1]):
                raise wrong_line(number, _ARROW_ROW.sub("", str(error))) from error
        raise
    if is_exact(block, found) and _LONG_FRACTION.search(block) is None:
        return found
    numbered = [(number, _row(number, line)) for number, line in lines_of(block, 1)]
    return pa.schema([_field(field, [(number, row.get(field.name)) for number, row in numbered]) for field in found])


_ARROW_ROW = re.compile(r",? in row ([0-9]+)")
_LONG_FRACTION = re.compile(rb'(?:":|[\[,])\s*-?[0-9]+\.[0-9]{6}')
"""A fraction of 6 digits or more. With fewer, a number of more than 15 digits is larger than `is_exact` accepts."""


def _row(number: int, line: bytes) -> dict[str, Any]:
    try:
        return parsed_line(decoded(line))
    except ValueError as error:
        raise wrong_line(number, error) from None


def _check_numbers(number: int, value: Any, path: str = "") -> None:
    """Raise `SchemaMismatch` for a number that is too large for every type."""
    if isinstance(value, dict):
        for name, each in value.items():
            _check_numbers(number, each, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for at, each in enumerate(value):
            _check_numbers(number, each, f"{path}[{at}]")
    elif isinstance(value, Number) and exact_type([value]) is None:
        raise _no_type(number, path, value)


def _no_type(number: int, path: str, value: str) -> SchemaMismatch:
    return wrong_line(number, f"column {path!r} is {cut(value)}, which no type of numbers holds: write it as text")


Numbered = Sequence[tuple[int, Any]]
"""Values with the numbers of their lines."""


def _field(field: pa.Field, values: Numbered, path: str = "") -> pa.Field:
    """Return `field` with types that hold all `values` exactly. Raises `SchemaMismatch`."""
    kind, path = field.type, f"{path}.{field.name}" if path else field.name
    there = [(number, value) for number, value in values if value is not None]
    if types.is_list(kind):
        inner = [(number, each) for number, value in there for each in value]
        return field.with_type(pa.list_(_field(kind.value_field, inner, path)))
    if types.is_struct(kind):
        parts = [kind.field(at) for at in range(kind.num_fields)]
        fields = [_field(part, [(number, value.get(part.name)) for number, value in there], path) for part in parts]
        return field.with_type(pa.struct(fields))
    if not types.is_float64(kind):
        return field
    numbers = [(number, str(value)) for number, value in there if not isinstance(value, Symbol)]
    found = exact_type([text for _, text in numbers])
    if len(numbers) < len(there):  # there are NaNs, which only floats have
        changed = [(number, text) for number, text in numbers if exact_type([f"{text}e0"]) != kind]
        if changed:
            raise _no_type(changed[0][0], path, changed[0][1])
        return field
    if found is None:
        number, text = next(((number, text) for number, text in numbers if exact_type([text]) is None), numbers[0])
        raise _no_type(number, path, text)
    return field.with_type(found)


# -- CSV -------------------------------------------------------------------------------------------------------------

_NUMBER = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?$"
_NO_NUMBER = r"^[-+]?([nN]a[nN]|NAN|[iI]nf|INF|[iI]nfinity)$"


def columns_of_csv(found: pa.Schema, texts: pa.RecordBatch) -> pa.Schema:
    """Return `found`, which Arrow inferred, with types that hold all values of a sample, `texts`.

    Numbers with leading zeros or a plus sign, such as codes, become text.
    """
    fields = []
    for field, column in zip(found, texts.columns, strict=True):
        kind = field.type
        if types.is_integer(kind) or types.is_floating(kind):
            kind = _kind_of(kind, column.drop_null())
        fields.append(field.with_type(kind))
    return pa.schema(fields)


def _kind_of(kind: pa.DataType, texts: pa.Array) -> pa.DataType:
    texts = pc.utf8_trim_whitespace(texts)
    if types.is_integer(kind):
        return kind if texts.cast(kind).cast(pa.string()).equals(texts) else pa.string()
    numbers = texts.filter(pc.match_substring_regex(texts, _NUMBER))
    words = pc.sum(pc.match_substring_regex(texts, _NO_NUMBER), min_count=0).as_py()
    if not len(numbers) or len(numbers) + words < len(texts):
        return pa.string()
    found = exact_type(numbers.to_pylist())
    if words:
        return kind if found == kind or found == pa.int64() else pa.string()
    if found is None or types.is_decimal256(found):  # Arrow's CSV reader lacks decimal256
        return pa.string()
    return found
