"""Converts the defaults of Avro fields to the values that a reader or a writer works with.

A schema has defaults as JSON: bytes as text with one character for each byte, a date as a number of days. fastavro
passes this JSON on. The functions here replace each default in a parsed schema by the value that it represents:

    `for_writing`    the value that the writer takes for a missing field: bytes, numbers, text, records with all fields
    `for_reading`    the value that the reader would return if it had been written: dates, decimals, UUIDs

fastavro itself checks some defaults, too strictly (1 as the default of a double) and too loosely (a boolean for an
int). So `set_aside` hides them while it parses, and this module checks them by the specification.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from kera.client.serializers.avro_limits import DECIMAL_BYTES_MAX
from kera.client.serializers.refusing import library, words

VALUES_MAX = 100_000
"""Maximum for all defaults of a schema: a few records that contain each other twice make millions of values."""
_SHOWN_CHARS_MAX = 80
_ASIDE = "kera_default"
_FIELD_OF_VALUE = "value"
_INT_BITS = {"int": 31, "long": 63}
_NOT_FINITE = {"NaN", "Infinity", "-Infinity"}


def set_aside(schema: Any) -> Any:
    """Return a copy of a schema in JSON form whose defaults are hidden from fastavro, for `restore`."""
    if isinstance(schema, list | tuple):
        return [set_aside(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    copied = dict(schema)
    for name in ("type", "items", "values"):
        if name in copied:
            copied[name] = set_aside(copied[name])
    if isinstance(copied.get("fields"), list | tuple):
        copied["fields"] = [_field_aside(each) for each in copied["fields"]]
    return copied


def _field_aside(field: Any) -> Any:
    if not isinstance(field, Mapping):
        return field
    copied = {name: each for name, each in field.items() if name != "default"}
    if "default" in field:
        copied[_ASIDE] = field["default"]
    if "type" in copied:
        copied["type"] = set_aside(copied["type"])
    return copied


def restore(schema: Any) -> list[tuple[str, dict[str, Any]]]:
    """Put the defaults of a parsed schema back. Returns its fields with a default, each with its path."""
    found: list[tuple[str, dict[str, Any]]] = []
    _restore(schema, found)
    return found


def _restore(schema: Any, found: list[tuple[str, dict[str, Any]]]) -> None:
    if isinstance(schema, list):
        for each in schema:
            _restore(each, found)
    elif isinstance(schema, Mapping):
        for name in ("items", "values"):
            if name in schema:
                _restore(schema[name], found)
        for field in schema.get("fields", ()):
            if _ASIDE in field:
                field["default"] = field.pop(_ASIDE)
                found.append((f"{schema['name']}.{field['name']}", field))
            _restore(field["type"], found)


class Readable(NamedTuple):
    """The properties of a schema's defaults that a reader needs."""

    shared: bool
    """Whether some are mappings or lists, which the values of all records would share: each value needs `a_copy`."""
    why_not: str
    """The defaults that cannot be read, with reasons; empty if all can."""


class _Unreadable(ValueError):
    """A default has no value in Python."""


class Defaults:
    """The defaults of one parsed schema, whose named types are `named`."""

    def __init__(self, schema: Any, named: dict[str, Any]) -> None:
        """Check the defaults. Raises `ValueError` for a default that is not a value of its field's type."""
        self._named = named
        self._left = VALUES_MAX
        self._fields = restore(schema)
        self._values: dict[str, Any] = {}
        for path, field in self._fields:
            try:
                self._values[path] = self._value(field["type"], field["default"])
            except _NoValue as error:
                raise ValueError(f"the default {_shown(field['default'])} of {path} {error}") from error

    def for_writing(self) -> None:
        """Replace the defaults in the schema by values for fastavro's writer."""
        for path, field in self._fields:
            field["default"] = self._values[path]

    def for_reading(self) -> Readable:
        """Replace the defaults in the schema by the values that fastavro's reader returns for them.

        Removes a default that Python has no value for, such as a date in the year 20000, from the schema: values that
        need it cannot be read, and `Readable.why_not` says why.
        """
        shared, why_not = False, []
        for path, field in self._fields:
            try:
                field["default"] = self._as_read(field["type"], self._values[path])
                shared = shared or isinstance(field["default"], dict | list)
            except _Unreadable as error:
                why_not.append(f"the default {_shown(field.pop('default'))} of {path} cannot be read: {error}")
        return Readable(shared, "; ".join(why_not))

    def _as_read(self, kind: Any, value: Any) -> Any:
        """Write a default and read it again: the value for readers. Raises `_Unreadable`."""
        fastavro = library("fastavro", "AvroDeserializer")
        record = {
            "type": "record",
            "name": "kera_default_of_a_field",
            "fields": [{"name": _FIELD_OF_VALUE, "type": kind}],
            "__fastavro_parsed": True,
            "__named_schemas": self._named,
        }
        written = io.BytesIO()
        try:
            fastavro.schemaless_writer(written, record, {_FIELD_OF_VALUE: value}, disable_tuple_notation=True)
            written.seek(0)
            return fastavro.schemaless_reader(written, record, None)[_FIELD_OF_VALUE]
        except Exception as error:  # fastavro raises any error of Python for a value that Python does not have
            raise _Unreadable(words(error)) from error

    def _value(self, kind: Any, default: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"the defaults have more than {VALUES_MAX} values")
        if isinstance(kind, list):
            return self._of_union(kind, default)
        if isinstance(kind, str) and kind in self._named:
            kind = self._named[kind]
        name = kind["type"] if isinstance(kind, Mapping) else kind
        if name in {"record", "error"}:
            return self._of_record(kind, default)
        if name in {"array", "map"}:
            return self._of_items(kind, default)
        if name in {"bytes", "fixed"}:
            return _bytes_of(kind if isinstance(kind, Mapping) else {}, name, default)
        if name == "enum" and default not in kind["symbols"]:
            raise _NoValue(f"is not a symbol of {kind['name']}")
        return _primitive(name, default)

    def _of_items(self, kind: Mapping[str, Any], default: Any) -> Any:
        if kind["type"] == "array":
            if not isinstance(default, list | tuple):
                raise _NoValue("is not an array")
            return [self._value(kind["items"], each) for each in default]
        if not isinstance(default, Mapping):
            raise _NoValue("is not a map")
        return {key: self._value(kind["values"], each) for key, each in default.items()}

    def _of_union(self, branches: list[Any], default: Any) -> Any:
        """Return the default as a value of the first branch that it fits.

        Until version 1.12 of the specification, it had to fit the first branch.
        """
        for branch in branches:
            try:
                return self._value(branch, default)
            except _NoValue:
                continue
        raise _NoValue("is a value of no branch of its union")

    def _of_record(self, kind: Mapping[str, Any], default: Any) -> dict[str, Any]:
        if not isinstance(default, Mapping):
            raise _NoValue("is not a record")
        value = {}
        for field in kind["fields"]:
            name = field["name"]
            if name in default:
                value[name] = self._value(field["type"], default[name])
            elif "default" in field:
                value[name] = self._value(field["type"], field["default"])
            else:
                raise _NoValue(f"lacks the field {name}, which has no default")
        return value


class _NoValue(ValueError):
    """A default is not a value of the type. The error's text follows the default in the message."""


def _bytes_of(kind: Mapping[str, Any], name: str, default: Any) -> bytes:
    if not isinstance(default, str):
        raise _NoValue("is not text, which stands for bytes")
    try:
        value = default.encode("latin-1")
    except UnicodeEncodeError:
        raise _NoValue("has characters behind U+00FF, which stand for no byte") from None
    if name == "fixed" and len(value) != kind["size"]:
        raise _NoValue(f"has {len(value)} bytes, and {kind['name']} has {kind['size']}")
    if kind.get("logicalType") == "decimal" and len(value) > DECIMAL_BYTES_MAX:
        raise _NoValue(f"is a decimal of {len(value)} bytes, and at most {DECIMAL_BYTES_MAX} are taken")
    return value


def _primitive(name: str, default: Any) -> Any:
    is_int = isinstance(default, int) and not isinstance(default, bool)
    match name:
        case "null":
            fits = default is None
        case "boolean":
            fits = isinstance(default, bool)
        case "int" | "long":
            fits = is_int and -(1 << _INT_BITS[name]) <= default < 1 << _INT_BITS[name]
        case "float" | "double":
            fits = is_int or isinstance(default, float) or (isinstance(default, str) and default in _NOT_FINITE)
            if fits:
                try:
                    struct.pack("<f" if name == "float" else "<d", float(default))
                except OverflowError:
                    raise _NoValue(f"is too large for a {name}") from None
                return float(default)
        case _:
            fits = isinstance(default, str)
    if not fits:
        raise _NoValue(f"is not of type {name}")
    return default


def _shown(default: Any) -> str:
    text = json.dumps(default, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[: _SHOWN_CHARS_MAX - 1]}…"


def a_copy(value: Any) -> Any:
    """Return `value` with copies of its mappings and lists."""
    if isinstance(value, dict):
        return {name: a_copy(each) for name, each in value.items()}
    if isinstance(value, list):
        return [a_copy(each) for each in value]
    return value
