"""Columns of typed streams as text: ``fare:float64``, ``pickup:timestamp[us, UTC]``, ``tags:list<string>``.

The names of types are Arrow's own (`kera.core.format.arrow_types`), so that what ``kera stream describe`` shows can be
given to ``kera stream create``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kera.cli._run import UsageError

if TYPE_CHECKING:
    import pyarrow as pa


def parse_columns(columns: Iterable[str], *, option: str = "--column") -> pa.Schema:
    """A schema from ``name:type`` texts, values of `option`. Raises `UsageError` naming the one that is wrong."""
    import pyarrow as pa

    from kera.core.format.arrow_types import arrow_type

    fields = []
    for column in columns:
        name, colon, kind = column.partition(":")
        if not (name and colon and kind):
            raise UsageError(f"{option} {column}: write NAME:TYPE, as in fare:float64", column=column)
        found = arrow_type(kind.strip())
        if found is None:
            known = "int64, float64, string, bool, timestamp[us, UTC]"
            message = f"{option} {column}: Arrow has no type {kind.strip()}; try {known}"
            raise UsageError(message, column=column)
        fields.append(pa.field(name, found))
    return pa.schema(fields)
