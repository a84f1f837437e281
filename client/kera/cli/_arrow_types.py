"""Columns of typed streams as text: ``fare:float64``, ``pickup:timestamp[us, UTC]``, ``tags:list<string>``.

The names are Arrow's own, as its schemas print them, so that what ``kera stream describe`` shows can be given
to ``kera stream create``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kera.cli._run import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

_ZONED = re.compile(r"timestamp\[(s|ms|us|ns),\s*(?:tz=)?([^\]]+)\]")
_LIST = re.compile(r"list<(?:item:\s*)?(.+)>")
_DECIMAL = re.compile(r"decimal(?:128)?\((\d+),\s*(\d+)\)")


def parse_columns(columns: Iterable[str], *, option: str = "--column") -> pa.Schema:
    """A schema from ``name:type`` texts, values of `option`. Raises `UsageError` naming the one that is wrong."""
    import pyarrow as pa

    fields = []
    for column in columns:
        name, colon, kind = column.partition(":")
        if not (name and colon and kind):
            raise UsageError(f"{option} {column}: write NAME:TYPE, as in fare:float64", column=column)
        fields.append(pa.field(name, _parse_type(kind.strip(), column, option)))
    return pa.schema(fields)


def _parse_type(text: str, column: str, option: str) -> Any:
    import pyarrow as pa

    if match := _ZONED.fullmatch(text):
        return pa.timestamp(match[1], tz=match[2].strip())
    if match := _LIST.fullmatch(text):
        return pa.list_(_parse_type(match[1].strip(), column, option))
    if match := _DECIMAL.fullmatch(text):
        return pa.decimal128(int(match[1]), int(match[2]))
    try:
        return pa.type_for_alias(text)
    except ValueError:
        known = "int64, float64, string, bool, timestamp[us, UTC]"
        message = f"{option} {column}: Arrow has no type {text}; try {known}"
        raise UsageError(message, column=column) from None
