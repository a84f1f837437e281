"""What bytes of Avro may ask of their reader, and values of their writer.

Most schemas bound that by themselves: each value takes at least a byte, and none has another of its own kind in it.
Others do not, and values of those are walked through first, in Python:

    a record that may contain itself     every byte can be one level deeper: at most `DEPTH_MAX`
    arrays of what takes no bytes        ten bytes can be 2^63 nulls: at most `ITEMS_MAX`
    decimals                             a megabyte of digits takes a minute and more: at most `DECIMAL_BYTES_MAX` each
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEPTH_MAX = 64
ITEMS_MAX = 100_000
DECIMAL_BYTES_MAX = 128
"""Three hundred digits."""
_FIXED_BYTES = {"null": 0, "boolean": 1, "float": 4, "double": 8}
_VARINT_BYTES_MAX = 10


class Limits:
    """Of what is written with a schema, as fastavro has parsed it."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._named: dict[str, Any] = {}
        self._find_names(schema)
        self.recursive = any(self._contains(each, name, set()) for name, each in self._named.items())
        self.unbounded = self.recursive or self._has_more(schema, set())

    def check_bytes(self, data: bytes) -> None:
        """Raises `ValueError` for bytes that ask for too much, or end too early."""
        if self.unbounded:
            _Walk(self._named, data).through(self._schema, 0)

    def check_value(self, value: Any) -> None:
        """Raises `ValueError` for a value that is nested too deeply, or contains itself."""
        if self.recursive:
            _check_depth(value)

    def _find_names(self, schema: Any) -> None:
        if isinstance(schema, list):
            for each in schema:
                self._find_names(each)
        elif isinstance(schema, Mapping):
            if "name" in schema and schema.get("type") in _NAMED:
                self._named[schema["name"]] = schema
            for each in children(schema):
                self._find_names(each)

    def _contains(self, schema: Any, name: str, seen: set[str]) -> bool:
        """Whether a value of `schema` may have one of the record `name` in it."""
        for child in children(self._resolved(schema)):
            known = self._resolved(child)
            called = known.get("name") if isinstance(known, Mapping) and known.get("type") in _NAMED else None
            if called == name:
                return True
            if called in seen:
                continue
            if self._contains(known, name, seen | {called} if called else seen):
                return True
        return False

    def _has_more(self, schema: Any, seen: set[str]) -> bool:
        """Whether values may take more of their reader than their bytes are, besides by containing themselves."""
        known = self._resolved(schema)
        if isinstance(known, Mapping):
            if known.get("type") in _NAMED:
                if known["name"] in seen:
                    return False
                seen.add(known["name"])
            if known.get("logicalType") == "decimal":
                return True
            if known.get("type") == "array" and self._takes_nothing(known["items"], set()):
                return True
        return any(self._has_more(child, seen) for child in children(known))

    def _takes_nothing(self, schema: Any, seen: set[str]) -> bool:
        """Whether a value may take no bytes."""
        known = self._resolved(schema)
        if isinstance(known, str):
            return known == "null"
        if not isinstance(known, Mapping):
            return False  # a union has the number of its branch
        kind = known["type"]
        if kind == "fixed":
            return bool(known["size"] == 0)
        if kind in {"record", "error"}:
            if known["name"] in seen:
                return True
            return all(self._takes_nothing(field["type"], seen | {known["name"]}) for field in known["fields"])
        return isinstance(kind, str | list | Mapping) and kind not in _WITH_LENGTH and self._takes_nothing(kind, seen)

    def _resolved(self, schema: Any) -> Any:
        return self._named.get(schema, schema) if isinstance(schema, str) else schema


_NAMED = ("record", "error", "enum", "fixed")
_WITH_LENGTH = ("array", "map", "enum", "bytes", "string", "int", "long", "float", "double", "boolean")


def children(schema: Any) -> list[Any]:
    """The schemas that values of this one are made of."""
    if isinstance(schema, list):
        return schema
    if not isinstance(schema, Mapping):
        return []
    kind = schema["type"]
    if kind in {"record", "error"}:
        return [field["type"] for field in schema["fields"]]
    if kind == "array":
        return [schema["items"]]
    if kind == "map":
        return [schema["values"]]
    return [kind] if isinstance(kind, list | Mapping) else []


def _check_depth(value: Any) -> None:
    """Level by level, as Python's own recursion would end before ours counts."""
    level, depth, looked_at = [value], 0, 0
    while level:
        depth += 1
        if depth > 2 * DEPTH_MAX:  # a record and its union or list are two levels of values
            raise ValueError(f"it is nested more than {DEPTH_MAX} levels deep, or contains itself")
        below: list[Any] = []
        for each in level:
            if isinstance(each, Mapping):
                below.extend(child for child in each.values() if isinstance(child, _CONTAINERS))
            else:
                below.extend(child for child in each if isinstance(child, _CONTAINERS))
        looked_at += len(below)
        if looked_at > _VALUES_MAX:  # one that has itself in it twice doubles with each level
            raise ValueError(f"it has more than {_VALUES_MAX} values with others in them, or contains itself")
        level = below


_CONTAINERS = (Mapping, list, tuple)
_VALUES_MAX = 1_000_000


class _Walk:
    """Through the bytes of a value, without making anything of them."""

    def __init__(self, named: Mapping[str, Any], data: bytes) -> None:
        self._named = named
        self._data = data
        self._at = 0
        self._items = 0
        """Of arrays, that took no bytes."""

    def through(self, schema: Any, depth: int) -> None:
        """Raises `ValueError`."""
        if depth > 3 * DEPTH_MAX:  # a record, its union and the list that it is in are three levels of schemas
            raise ValueError(f"it is nested more than {DEPTH_MAX} levels deep")
        if isinstance(schema, str):
            schema = self._named.get(schema, schema)
        if isinstance(schema, list):
            branch = self._long()
            if not 0 <= branch < len(schema):
                raise ValueError(f"it is of branch {branch} of a union of {len(schema)}")
            self.through(schema[branch], depth + 1)
            return
        kind = schema["type"] if isinstance(schema, Mapping) else schema
        if isinstance(kind, list | Mapping):
            self.through(kind, depth + 1)
        elif kind in {"record", "error"}:
            for field in schema["fields"]:
                self.through(field["type"], depth + 1)
        elif kind == "array":
            self._blocks(schema["items"], depth, keyed=False)
        elif kind == "map":
            self._blocks(schema["values"], depth, keyed=True)
        else:
            self._leaf(kind, schema)

    def _leaf(self, kind: str, schema: Any) -> None:
        if kind in _FIXED_BYTES:
            self._skip(_FIXED_BYTES[kind])
        elif kind in {"int", "long", "enum"}:
            self._long()
        else:
            length = schema["size"] if kind == "fixed" else self._long()
            if isinstance(schema, Mapping) and schema.get("logicalType") == "decimal" and length > DECIMAL_BYTES_MAX:
                raise ValueError(f"a decimal has {length} bytes, and at most {DECIMAL_BYTES_MAX} are taken")
            self._skip(length)

    def _blocks(self, items: Any, depth: int, *, keyed: bool) -> None:
        while (count := self._long()) != 0:
            if count < 0:
                count = -count
                self._long()
            for _ in range(count):
                before = self._at
                if keyed:
                    self._skip(self._long())
                self.through(items, depth + 1)
                if self._at == before:
                    self._items += 1
                    if self._items > ITEMS_MAX:
                        raise ValueError(f"it has more than {ITEMS_MAX} items that take no bytes")

    def _skip(self, count: int) -> None:
        if not 0 <= count <= len(self._data) - self._at:
            raise ValueError(f"it declares {count} bytes, and {len(self._data) - self._at} are there")
        self._at += count

    def _long(self) -> int:
        value = 0
        for index, byte in enumerate(self._data[self._at : self._at + _VARINT_BYTES_MAX]):
            value |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                self._at += index + 1
                return (value >> 1) ^ -(value & 1)
        raise ValueError("it ends within a number")
