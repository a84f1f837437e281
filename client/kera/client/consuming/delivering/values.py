"""Columns as Python values, also for times that Python cannot represent.

A time in Arrow may lie outside of the years 1 to 9999, which is the range of `datetime`. Such a value becomes an
integer: the number of the column's units since 1970 (for a time of day: since midnight). Arrow converts other values.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

_NO_PYTHON_VALUE = (OverflowError, ValueError, SystemError)
"""Errors that Arrow raises for a time that `datetime` cannot represent; they depend on the type."""


def rows_of(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows of a batch."""
    try:
        return batch.to_pylist()  # type: ignore[no-any-return]
    except _NO_PYTHON_VALUE:
        names = batch.schema.names
        return [dict(zip(names, row, strict=True)) for row in zip(*map(values_of, batch.columns), strict=True)]


def values_of(column: pa.Array) -> list[Any]:
    """Return the values of a column."""
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except _NO_PYTHON_VALUE:
        return [_value(scalar) for scalar in column]


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except _NO_PYTHON_VALUE:
        kind = scalar.type
        if pa.types.is_temporal(kind):
            return scalar.value
        if pa.types.is_struct(kind):
            return {name: _value(value) for name, value in scalar.items()}
        if pa.types.is_map(kind):
            return [(_value(entry["key"]), _value(entry["value"])) for entry in scalar.values]
        return [_value(each) for each in scalar.values]
