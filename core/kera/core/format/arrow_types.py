"""Arrow types by their names, as Arrow's schemas print them: ``float64``, ``timestamp[us, UTC]``, ``list<string>``.

Also empty batches with columns of any type.
"""

from __future__ import annotations

import re

import pyarrow as pa

COMMON = ("string", "int64", "int32", "float64", "bool", "timestamp[us, UTC]", "date32", "binary", "list<string>")
"""Names to offer to users who choose a type."""
NAME_LENGTH_MAX = 256
_ZONED = re.compile(r"timestamp\[(s|ms|us|ns),\s*(?:tz=)?([^\]]+)\]")
_LIST = re.compile(r"list<(?:item:\s*)?(.+)>")
_DECIMAL = re.compile(r"decimal(?:128)?\((\d{1,3}),\s*(\d{1,3})\)")


def arrow_type(text: str) -> pa.DataType | None:
    """Return the type that `text` names; None: Arrow has no type of that name."""
    if len(text) > NAME_LENGTH_MAX:
        return None
    if match := _LIST.fullmatch(text):
        of = arrow_type(match[1].strip())
        return None if of is None else pa.list_(of)
    try:
        if match := _ZONED.fullmatch(text):
            return pa.timestamp(match[1], tz=match[2].strip())
        if match := _DECIMAL.fullmatch(text):
            return pa.decimal128(int(match[1]), int(match[2]))
        return pa.type_for_alias(text)
    except ValueError:
        return None


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch without rows, also with unions and runs, of which pyarrow cannot make arrays from values."""
    return pa.RecordBatch.from_arrays([_empty(kind) for kind in schema.types], schema=schema)


def _empty(kind: pa.DataType) -> pa.Array:
    try:
        return pa.array([], kind)
    except pa.ArrowNotImplementedError:
        return pa.nulls(0, kind)
