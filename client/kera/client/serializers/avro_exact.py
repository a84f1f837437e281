"""Checks that an Avro value will be read as the value that was written.

fastavro also writes values that it changes. It takes a time without a zone for one in the zone of the machine, cuts
microseconds off a `timestamp-millis`, rounds an integer that a double cannot hold, and writes a UUID that no reader
can parse. So values of schemas with such types are read again after they were written, and compared.

Exceptions: a float may become the nearest value of its type, and a number may stand for a date or a time, also for one
that Python cannot represent.
"""

from __future__ import annotations

import datetime
import io
import math
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from kera.client.serializers.avro_limits import children

_INEXACT_TYPES = {"float", "double"}
_INEXACT_LOGICAL_TYPES = {
    "date",
    "time-millis",
    "time-micros",
    "timestamp-millis",
    "timestamp-micros",
    "local-timestamp-millis",
    "local-timestamp-micros",
    "uuid",
}


def may_change_values(schema: Any) -> bool:
    """Return whether the writer takes values of this parsed schema that are read as other values."""
    if isinstance(schema, str):
        return schema in _INEXACT_TYPES
    if isinstance(schema, Mapping):
        kind = schema["type"]
        if schema.get("logicalType") in _INEXACT_LOGICAL_TYPES or (isinstance(kind, str) and kind in _INEXACT_TYPES):
            return True
    return any(may_change_values(each) for each in children(schema))


class ValueChanged(ValueError):
    """A part of a value would be read as another value."""

    def __init__(self, field: str, reason: str) -> None:
        """`field` is its path, such as ``lines[0].price``."""
        super().__init__(reason)
        self.field = field


def check_reads_same(value: Any, written: io.BytesIO, read: Callable[[io.BytesIO], Any]) -> None:
    """Raise `ValueChanged` if `read` makes another value of the `written` bytes."""
    written.seek(0)
    try:
        found = read(written)
    except Exception as error:  # fastavro raises any error of Python for a date or time that Python cannot represent
        if "UUID" in str(error):
            raise ValueChanged("", "it has a text that is not a UUID where its type is uuid") from error
        return
    _check_same(value, found, "")


def _check_same(value: Any, read: Any, path: str) -> None:
    if isinstance(read, Mapping):
        for name, each in read.items():
            if name in value:  # otherwise the field has its default
                _check_same(value[name], each, f"{path}.{name}" if path else name)
    elif isinstance(read, list):
        for index, each in enumerate(read):
            _check_same(value[index], each, f"{path}[{index}]")
    else:
        _check_part(value, read, path)


def _check_part(value: Any, read: Any, path: str) -> None:
    if type(value) is float:
        if math.isinf(read) != math.isinf(value) or (read == 0) != (value == 0):
            raise ValueChanged(path, f"it is {value}, which is out of the range of its type")
    elif isinstance(read, float):
        if read != value:
            raise ValueChanged(path, f"it is {value}, which a floating-point number cannot hold exactly")
    elif isinstance(read, datetime.date | datetime.time):
        if not isinstance(value, int):
            _check_time(value, read, path)
    elif isinstance(read, uuid.UUID) and uuid.UUID(str(value)) != read:
        raise ValueChanged(path, f"it is {value}, and would be read as {read}")


def _check_time(value: Any, read: Any, path: str) -> None:
    has_zone, reads_zone = (getattr(each, "tzinfo", None) is not None for each in (value, read))
    if has_zone and not reads_zone:
        raise ValueChanged(path, f"it is {value}, and its type has no time zone")
    if reads_zone and not has_zone:
        raise ValueChanged(path, f"it is {value}, which has no time zone, and its type needs one")
    if value != read:
        raise ValueChanged(path, f"it is {value}, and would be read as {read}")
