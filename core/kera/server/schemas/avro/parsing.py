"""Parses definitions of Avro, as strictly as its specification demands. Pure.

It is stricter in one point: names that a reader in Python would not find are refused here, and not only when the first
value is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from kera.core.base.strict_json import shown
from kera.core.errors import InvalidSchema
from kera.core.schemas.json_text import parsed_json
from kera.server.schemas.avro.types import (
    PRIMITIVES,
    Array,
    AvroSchema,
    Enum,
    Field,
    Fixed,
    Logical,
    Map,
    Named,
    Primitive,
    Record,
    Reference,
    Type,
    Union,
)

TYPES_MAX = 10_000
"""Maximum of types and fields in a definition."""
VALUES_MAX = 100_000
"""Maximum of values in defaults, where each value counts once for each type that it is checked against."""
FIXED_BYTES_MAX = 1 << 20
"""Maximum size of a type ``fixed``."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FULL_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*\.)*[A-Za-z_][A-Za-z0-9_]*")
_COMPLEX = frozenset({"record", "error", "enum", "fixed", "array", "map"})
PATH_CHARS_MAX = 200
_LOGICAL = {
    "decimal": {"bytes", "fixed"},
    "uuid": {"string", "fixed"},
    "date": {"int"},
    "time-millis": {"int"},
    "time-micros": {"long"},
    "timestamp-millis": {"long"},
    "timestamp-micros": {"long"},
    "timestamp-nanos": {"long"},
    "local-timestamp-millis": {"long"},
    "local-timestamp-micros": {"long"},
    "local-timestamp-nanos": {"long"},
    "duration": {"fixed"},
}
"""Logical types of the specification, and the types that can have them; others have no meaning, and are ignored."""
_INTS = {"int": 31, "long": 63}


def parsed_avro(definition: str) -> AvroSchema:
    """Parse the schema in `definition`. Raises `InvalidSchema`."""
    # A schema that is only a name needs its quotes, as JSON does.
    return _Parser().schema(parsed_json(definition, "the schema"))


class _Parser:
    def __init__(self) -> None:
        self._named: dict[str, Named] = {}
        self._left = TYPES_MAX
        self._values_left = VALUES_MAX
        self._of_kind: dict[str, Callable[[dict[str, Any], str, str], Type]] = {
            **dict.fromkeys(sorted(PRIMITIVES), self._primitive),
            "record": self._record,
            "error": self._record,
            "enum": self._enum,
            "fixed": self._fixed,
            "array": self._array,
            "map": self._map,
        }

    def schema(self, document: Any) -> AvroSchema:
        return AvroSchema(self._type(document, "", ""), self._named)

    def _type(self, document: Any, namespace: str, path: str) -> Type:
        self._count()
        if isinstance(document, str):
            return self._by_name(document, namespace, path)
        if isinstance(document, list):
            return self._union(document, namespace, path)
        if not isinstance(document, dict):
            raise _invalid(path, f"{shown(document)} is not a type: it is a name, an object or a list")
        kind = document.get("type")
        of_kind = self._of_kind.get(kind) if isinstance(kind, str) else None
        if of_kind is not None:
            return of_kind(document, namespace, path)
        known = ", ".join(self._of_kind)
        raise _invalid(
            path,
            f'{shown(kind)} is not a "type" of an object: {known}. Refer to a type that is defined earlier by its'
            " name alone",
        )

    def _primitive(self, document: dict[str, Any], _: str, path: str) -> Primitive:
        return Primitive(document["type"], _logical(document, document["type"], path))

    def _array(self, document: dict[str, Any], namespace: str, path: str) -> Array:
        return Array(self._type(_needed(document, "items", path), namespace, f"{path}[]"))

    def _map(self, document: dict[str, Any], namespace: str, path: str) -> Map:
        return Map(self._type(_needed(document, "values", path), namespace, f"{path}{{}}"))

    def _by_name(self, name: str, namespace: str, path: str) -> Type:
        if name in PRIMITIVES:
            return Primitive(name)
        full = name if "." in name or not namespace else f"{namespace}.{name}"
        if full not in self._named:
            raise _invalid(path, f"there is no type {shown(full)} before it is used")
        return Reference(full)

    def _union(self, document: list[Any], namespace: str, path: str) -> Union:
        if not document:
            raise _invalid(path, "a union needs a type")
        branches, seen = [], set()
        for each in document:
            branch = self._type(each, namespace, path)
            if isinstance(branch, Union):
                raise _invalid(path, "a union has no unions in it")
            key = branch.name if isinstance(branch, Named | Reference) else _kind_of(branch)
            if key in seen:
                raise _invalid(path, f"the union has {shown(key)} twice")
            seen.add(key)
            branches.append(branch)
        return Union(branches)

    def _record(self, document: dict[str, Any], namespace: str, path: str) -> Record:
        name, namespace, aliases = self._name(document, namespace, path)
        record = Record(name, aliases)
        self._named[name] = record  # before its fields, which may refer to it
        fields = _needed(document, "fields", path)
        if not isinstance(fields, list):
            raise _invalid(path, f'"fields" of record {name} are a list')
        seen: set[str] = set()
        for each in fields:
            self._count()
            if not isinstance(each, dict):
                raise _invalid(path, f"a field of record {name} is an object, not {shown(each)}")
            field_name = each.get("name")
            if not isinstance(field_name, str) or not _NAME.fullmatch(field_name):
                raise _invalid(path, f"a field of record {name} cannot be called {shown(field_name)}")
            below = f"{path}.{field_name}" if path else field_name
            field_aliases = _aliases(each, path=below)
            for known in (field_name, *field_aliases):
                if known in seen:
                    raise _invalid(path, f"record {name} has two fields {shown(known)}, aliases counted")
                seen.add(known)
            kind = self._type(_needed(each, "type", below), namespace, below)
            if "default" in each:
                self._check_default(kind, each["default"], below)
            record.fields.append(
                Field(field_name, frozenset(field_aliases), kind, "default" in each, each.get("default"))
            )
        return record

    def _enum(self, document: dict[str, Any], namespace: str, path: str) -> Enum:
        name, _, aliases = self._name(document, namespace, path)
        symbols = _needed(document, "symbols", path)
        if not isinstance(symbols, list) or not symbols:
            raise _invalid(path, f'"symbols" of enum {name} are a list of names')
        for symbol in symbols:
            if not isinstance(symbol, str) or not _NAME.fullmatch(symbol):
                raise _invalid(path, f"enum {name} cannot have a symbol {shown(symbol)}")
        if len(set(symbols)) < len(symbols):
            raise _invalid(path, f"enum {name} has a symbol twice")
        default = document.get("default")
        if "default" in document and default not in symbols:
            raise _invalid(path, f"the default {shown(default)} of enum {name} is not one of its symbols")
        enum = self._named[name] = Enum(name, aliases, symbols, default)
        return enum

    def _fixed(self, document: dict[str, Any], namespace: str, path: str) -> Fixed:
        name, _, aliases = self._name(document, namespace, path)
        size = _needed(document, "size", path)
        if not _is_int(size) or not 0 < size <= FIXED_BYTES_MAX:
            raise _invalid(path, f"fixed {name} takes 1 to {FIXED_BYTES_MAX} bytes, not {shown(size)}")
        fixed = self._named[name] = Fixed(name, aliases, size, _logical(document, "fixed", path, size))
        return fixed

    def _name(self, document: dict[str, Any], namespace: str, path: str) -> tuple[str, str, frozenset[str]]:
        """Return the full name, the namespace for nested types, and the aliases."""
        name, within = _needed(document, "name", path), document.get("namespace", namespace)
        if not isinstance(name, str) or not _FULL_NAME.fullmatch(name):
            raise _invalid(path, f"a type cannot be called {shown(name)}")
        if not isinstance(within, str) or (within and not _FULL_NAME.fullmatch(within)):
            raise _invalid(path, f"a namespace cannot be called {shown(within)}")
        if "." in name:
            within = name.rpartition(".")[0]
        elif within:
            name = f"{within}.{name}"
        if name in PRIMITIVES or name in _COMPLEX:
            raise _invalid(path, f"{name} is the name of a type already")
        if name in self._named:
            raise _invalid(path, f"there are two types {name}")
        return name, within, frozenset(_aliases(document, path=path, full=True))

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise InvalidSchema(f"the schema has more than {TYPES_MAX} types and fields", limit=TYPES_MAX)

    def _check_default(self, kind: Type, value: Any, path: str) -> None:
        if not self._takes(kind, value):
            raise _invalid(path, f"the default {shown(value)} is not a value of its type")

    def _takes(self, kind: Type, value: Any) -> bool:
        """Return whether `value` is a valid default for a type."""
        self._values_left -= 1
        if self._values_left < 0:
            raise InvalidSchema(f"the defaults have more than {VALUES_MAX} values", limit=VALUES_MAX)
        match kind:
            case Reference(name):
                takes = self._takes(self._named[name], value)
            case Union(branches):
                takes = any(self._takes(branch, value) for branch in branches)
            case Array(items):
                takes = isinstance(value, list) and all(self._takes(items, each) for each in value)
            case Map(values):
                takes = isinstance(value, dict) and all(self._takes(values, each) for each in value.values())
            case Enum(_, _, symbols):
                takes = value in symbols
            case Fixed(_, _, size):
                takes = _is_bytes(value) and len(value) == size
            case Record(_, _, fields):
                takes = isinstance(value, dict) and all(
                    self._takes(field.type, value[field.name]) if field.name in value else field.has_default
                    for field in fields
                )
            case _:
                takes = _primitive_takes(kind.kind, value)
        return takes


def _primitive_takes(kind: str, value: Any) -> bool:
    match kind:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "int" | "long":
            return _is_int(value) and -(1 << _INTS[kind]) <= value < 1 << _INTS[kind]
        case "float" | "double":
            return _is_int(value) or isinstance(value, float)
        case "bytes":
            return _is_bytes(value)
        case _:
            return isinstance(value, str)


def _kind_of(kind: Type) -> str:
    if isinstance(kind, Primitive):
        return kind.kind
    return "array" if isinstance(kind, Array) else "map"


def _logical(document: dict[str, Any], kind: str, path: str, size: int = 0) -> Logical | None:
    name = document.get("logicalType")
    if not isinstance(name, str) or kind not in _LOGICAL.get(name, ()):
        return None
    if name != "decimal":
        return Logical(name)
    precision, scale = document.get("precision", 0), document.get("scale", 0)
    if not _is_int(precision) or not _is_int(scale) or not 0 <= scale <= precision or not precision:
        raise _invalid(path, "a decimal needs a precision of at least 1, and a scale from 0 to that")
    if kind == "fixed" and precision > math.floor(math.log10(2) * (8 * size - 1)):
        raise _invalid(path, f"a decimal of precision {precision} does not fit into {size} bytes")
    return Logical(name, precision, scale)


def _aliases(document: dict[str, Any], *, path: str, full: bool = False) -> list[str]:
    aliases = document.get("aliases", [])
    pattern = _FULL_NAME if full else _NAME
    if not isinstance(aliases, list) or not all(isinstance(each, str) and pattern.fullmatch(each) for each in aliases):
        raise _invalid(path, '"aliases" are a list of names')
    return aliases


def _needed(document: dict[str, Any], key: str, path: str) -> Any:
    if key not in document:
        raise _invalid(path, f'"{key}" is missing')
    return document[key]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_bytes(value: Any) -> bool:
    """Return whether a default is valid for bytes: text in which each character stands for a byte."""
    return isinstance(value, str) and all(ord(each) <= 0xFF for each in value)


def _invalid(path: str, reason: str) -> InvalidSchema:
    path = path if len(path) <= PATH_CHARS_MAX else f"{path[:PATH_CHARS_MAX]}…"
    return InvalidSchema(f"field {path}: {reason}" if path else f"the schema: {reason}", path=path)
