"""Helpers for the column types of schemas, and the conversion of values into ones that Arrow takes for such types.

All fields are nullable: writers decide which values are present, and queries in Spark have to check.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import time
from typing import Any

import pyarrow as pa

from kera.core.errors import InvalidArgument

DEPTH_MAX = 32
"""Maximum nesting depth of a column's values."""

FIELDS_MAX = 10_000
"""Maximum number of fields, nested ones included: a few types that each contain another twice make millions."""

Plain = Callable[[Any], Any]


def refused(path: str, why: str) -> InvalidArgument:
    """Return the error for a schema with a part, at `path`, that cannot be a column."""
    return InvalidArgument(f"{path or 'the schema'} cannot be a column: {why}", field=path)


class Fields:
    """Checks the number of fields and their depth."""

    def __init__(self) -> None:
        self._left = FIELDS_MAX

    def take(self, path: str, depth: int) -> None:
        """Count one more field. Raises `InvalidArgument` if there are too many, or if it is too deep."""
        self._left -= 1
        if self._left < 0:
            raise refused(path.partition(".")[0], f"it has more than {FIELDS_MAX} fields, with those within others")
        if depth > DEPTH_MAX:
            raise refused(path, f"it is nested more than {DEPTH_MAX} levels deep, or contains itself")


def plain_of(kind: pa.DataType, *, times: bool = False) -> Plain | None:
    """Return a function that turns a Python value (mappings for structs and maps) into one that `pa.array` takes.

    None: `pa.array` takes the values unchanged. `times`: values may be times of day, whose columns have numbers.
    """
    if pa.types.is_struct(kind):
        fields = [(field.name, plain_of(field.type, times=times)) for field in kind]
        changed = [(name, plain) for name, plain in fields if plain is not None]
        return _of_struct(changed) if changed else None
    if pa.types.is_list(kind):
        item = plain_of(kind.value_type, times=times)
        return None if item is None else _of_list(item)
    if pa.types.is_map(kind):
        return _of_map(plain_of(kind.item_type, times=times) or _as_it_is)
    if times and kind in _OF_TIMES:
        return _OF_TIMES[kind]
    return str if pa.types.is_string(kind) else None


def _milliseconds(value: Any) -> Any:
    """Return the number of an Avro ``time-millis``, because Spark before 4.1 has no type for a time of day."""
    return _microseconds(value) // 1000 if isinstance(value, time) else value


def _microseconds(value: Any) -> Any:
    if not isinstance(value, time):
        return value
    return ((value.hour * 60 + value.minute) * 60 + value.second) * 1_000_000 + value.microsecond


_OF_TIMES: dict[pa.DataType, Plain] = {pa.int32(): _milliseconds, pa.int64(): _microseconds}


def _as_it_is(value: Any) -> Any:
    return value


def _of_struct(fields: list[tuple[str, Plain]]) -> Plain:
    def plain(value: Any) -> Any:
        made = dict(value)
        for name, of_field in fields:
            if made.get(name) is not None:
                made[name] = of_field(made[name])
        return made

    return plain


def _of_list(item: Plain) -> Plain:
    def plain(value: Any) -> Any:
        return [None if each is None else item(each) for each in value]

    return plain


def _of_map(item: Plain) -> Plain:
    def plain(value: Any) -> Any:
        return [(name, None if each is None else item(each)) for name, each in value.items()]

    return plain
