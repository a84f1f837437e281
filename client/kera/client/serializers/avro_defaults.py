"""Defaults of Avro fields, as the values that a reader or a writer works with.

A schema writes defaults as JSON: bytes as text with one character for each byte, a date as a number of days. fastavro
hands them on like that. The functions here replace each default in a parsed schema by the value it stands for:

    `for_writing`    what the writer takes in place of a missing field: bytes, numbers, text, records with all fields
    `for_reading`    what the reader would give if that very value had been written: dates, decimals, UUIDs

fastavro itself checks some defaults, too strictly (a double's default 1) and too loosely (a boolean for an int). So
`set_aside` hides them while it parses, and they are checked here, by the specification.
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
"""Maximum over all defaults of a schema: a few records that have each other twice are millions of values."""
_SHOWN_CHARS_MAX = 80
_ASIDE = "kera_default"
_FIELD_OF_VALUE = "value"
_INT_BITS = {"int": 31, "long": 63}
_NOT_FINITE = {"NaN", "Infinity", "-Infinity"}


def set_aside(schema: Any) -> Any:
    """A copy of `schema`, as JSON has it, whose fields keep their defaults where `restore` finds them."""
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
    """Puts the defaults of a parsed schema back. Returns its fields that have one, each with its path."""
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
    """Some are mappings or lists, which the values of all records share: each value needs `a_copy`."""
    why_not: str
    """Which defaults cannot be read; empty if all can."""


class _Unreadable(ValueError):
    """A default has no value in Python."""


class Defaults:
    """The defaults of one parsed schema, whose named types are `named`."""

    def __init__(self, schema: Any, named: dict[str, Any]) -> None:
        """Raises `ValueError` for a default that is not a value of its field's type."""
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
        """Replaces the defaults in the schema by what fastavro's writer takes."""
        for path, field in self._fields:
            field["default"] = self._values[path]

    def for_reading(self) -> Readable:
        """Replaces the defaults in the schema by what fastavro's reader gives for such a value.

        A default that Python has no value for, such as a date in the year 20000, is taken out of the schema: values
        that need it cannot be read, and `Readable.why_not` says why.
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
        """A default, written and read: what it would be if a writer had given it. Raises `_Unreadable`."""
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
        except Exception as error:  # it raises whatever Python does with what it has no value for
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
        """The default of the first branch that it is a value of: until version 1.12 of the specification that is the
        first one.
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
    """A default is not a value of the type. Its text goes on behind the default."""


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
    """`value` with mappings and lists of its own."""
    if isinstance(value, dict):
        return {name: a_copy(each) for name, each in value.items()}
    if isinstance(value, list):
        return [a_copy(each) for each in value]
    return value
