"""Encodes values as Avro, with a schema that may have more precise types than the values.

JSON has no dates, decimals or bytes, and PostgreSQL's numerics and times arrive as text. So text is converted to the
schema's type if that is exact: ISO 8601 becomes a date or a time, digits become a decimal. All other values must have
the schema's type already. A field that the schema lacks is an error, so that no field is left out.
"""

from __future__ import annotations

import datetime
import json
import struct
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, TypeAlias

from kera.client.serializers import AvroSerializer, Context
from kera.client.serializers.refusing import library
from kera.connect.values.encoding import UnknownField
from kera.core.errors import CannotEncode

FLOAT_DIGITS_EXACT = 15
"""Number of decimal digits that a float keeps exactly."""
_FLOATS = {"float": struct.Struct("<f"), "double": struct.Struct("<d")}
Shape: TypeAlias = Callable[[Any, str], Any]
"""Converts a value, given its path, into one that the serializer takes. Raises `ValueError`, `UnknownField`."""


class AvroEncoder:
    """Encodes values with one schema."""

    def __init__(self, definition: str, context: Context, *, exact: bool = False) -> None:
        """`exact`: values already have the schema's types, because the schema was derived from their columns.

        Raises `InvalidArgument` for a definition that is not a valid Avro schema.
        """
        self._serializer = AvroSerializer(definition, framed=False)
        self._context = context
        self._shape = None if exact else Shapes(definition, self._fits).shape

    def __call__(self, value: Any) -> bytes:
        """Encode a value into its payload. Raises `CannotEncode`, `UnknownField`."""
        if self._shape is not None:
            try:
                value = self._shape(value, "")
            except UnknownField:
                raise
            except ValueError as error:
                raise CannotEncode(str(error)) from error
        return self._serializer.payload(value, self._context)

    @staticmethod
    def _fits(value: Any, schema: Any) -> bool:
        validate = library("fastavro.validation", "--value avro").validate
        return bool(validate(value, schema, raise_errors=False, disable_tuple_notation=True))


class Shapes:
    """Converts values to the types of one schema."""

    def __init__(self, definition: str, fits: Callable[[Any, Any], bool]) -> None:
        """`fits`: returns whether a value fits a schema, to choose the branch of a union."""
        fastavro = library("fastavro", "--value avro")
        self._named: dict[str, Any] = {}
        self._schema = fastavro.parse_schema(json.loads(definition), named_schemas=self._named)
        self._fits = fits

    def shape(self, value: Any, path: str) -> Any:
        """See `Shape`."""
        return self._of(self._schema, value, path)

    def _of(self, schema: Any, value: Any, path: str) -> Any:
        if isinstance(schema, str):
            schema = self._named.get(schema, {"type": schema})
        if value is None:
            return None  # the serializer reports a null that the schema does not allow, with the field
        if isinstance(schema, list):
            return self._of_union(schema, value, path)
        kind = schema["type"]
        if isinstance(kind, dict | list):
            return self._of(kind, value, path)
        if isinstance(value, list | Mapping):
            return self._of_parts(schema, kind, value, path)
        return _leaf(kind, schema.get("logicalType"), value, path)

    def _of_parts(self, schema: Any, kind: str, value: Any, path: str) -> Any:
        if kind == "array" and isinstance(value, list):
            return [self._of(schema["items"], each, f"{path}[{at}]") for at, each in enumerate(value)]
        if kind == "map" and isinstance(value, Mapping):
            return {name: self._of(schema["values"], each, f"{path}{{{name}}}") for name, each in value.items()}
        if kind in {"record", "error"} and isinstance(value, Mapping):
            return self._of_record(schema, value, path)
        return value

    def _of_record(self, schema: Any, value: Mapping[str, Any], path: str) -> dict[str, Any]:
        fields = {field["name"]: field["type"] for field in schema["fields"]}
        for name in value:
            if name not in fields:
                raise UnknownField(f"{path}.{name}" if path else name)
        return {name: self._of(fields[name], each, f"{path}.{name}" if path else name) for name, each in value.items()}

    def _of_union(self, schemas: list[Any], value: Any, path: str) -> Any:
        others = [each for each in schemas if each != "null"]
        if len(others) == 1:
            return self._of(others[0], value, path)
        for each in others:
            try:
                shaped = self._of(each, value, path)
            except (ValueError, UnknownField):
                continue
            if self._fits(shaped, each):
                return shaped
        return value  # the serializer reports that no branch fits


def _leaf(kind: str, logical: str | None, value: Any, path: str) -> Any:
    try:
        if logical in _TEXT_TO:
            return _temporal(str(logical), value)
        if logical == "decimal":
            return _decimal(value)
    except (ValueError, InvalidOperation) as error:
        raise ValueError(f"field {path}: {error}") from error
    if kind in {"bytes", "fixed"} and isinstance(value, str):
        raise ValueError(f"field {path} is {kind}, for which JSON has no form: make it a string in the schema")
    if kind in _FLOATS and isinstance(value, int) and not isinstance(value, bool) and not _holds(kind, value):
        raise ValueError(f"field {path} is a {kind}, which cannot hold {value} exactly")
    return value


def _holds(kind: str, number: int) -> bool:
    """Return whether a float of this kind can be exactly `number`."""
    try:
        return bool(_FLOATS[kind].unpack(_FLOATS[kind].pack(float(number))) == (number,))
    except OverflowError:
        return False


_TEXT_TO: dict[str, Callable[[str], Any]] = {
    "date": datetime.date.fromisoformat,
    "time-millis": datetime.time.fromisoformat,
    "time-micros": datetime.time.fromisoformat,
    "timestamp-millis": datetime.datetime.fromisoformat,
    "timestamp-micros": datetime.datetime.fromisoformat,
    "local-timestamp-millis": datetime.datetime.fromisoformat,
    "local-timestamp-micros": datetime.datetime.fromisoformat,
}


def _temporal(logical: str, value: Any) -> Any:
    """Convert ISO 8601 text into a date or time; numbers, in the schema's unit, stay unchanged."""
    if isinstance(value, str):
        value = _TEXT_TO[logical](value)
    if isinstance(value, datetime.datetime) and "timestamp" in logical:
        local = logical.startswith("local-")
        if local and value.tzinfo is not None:
            raise ValueError(f"{value} has a time zone, which a {logical} cannot hold")
        if not local and value.tzinfo is None:
            raise ValueError(f"{value} has no time zone, and a {logical} needs one")
    if logical.endswith("-millis") and getattr(value, "microsecond", 0) % 1000:
        raise ValueError(f"{value} has microseconds, which a {logical} cannot hold")
    return value


def _decimal(value: Any) -> Any:
    """Convert text or a number into a decimal.

    A float becomes the decimal of its shortest text, if that has few enough digits to be the original text.
    """
    if isinstance(value, str):
        return _finite(Decimal(value))
    if isinstance(value, float):
        found = _finite(Decimal(repr(value)))
        if len(found.as_tuple().digits) > FLOAT_DIGITS_EXACT:
            raise ValueError(f"{value!r} has more digits than a number of JSON keeps: write it as text")
        return found
    return Decimal(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _finite(value: Decimal) -> Decimal:
    if not value.is_finite():
        raise ValueError(f"{value} is not a decimal number")
    return value
