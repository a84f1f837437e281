"""Limits on the cost of Avro bytes, values and schemas for the program that handles them.

Most schemas limit the cost: each value takes about as many bytes as it has parts, and does not contain another value of
its own type. Values of other schemas are first walked through, in Python:

    a record that may contain itself     every byte can be one level deeper: at most `DEPTH_MAX`
    parts that take no bytes             ten bytes can be 2^63 nulls: some for each byte, and `PARTS_SPARE` more
    decimals                             a megabyte of digits takes a minute and more: at most `DECIMAL_BYTES_MAX` each

The schema is not trusted either. So it is analysed once for each of its types: a few types that contain each other
twice make millions of parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

DEPTH_MAX = 64
PARTS_PER_BYTE = 4
"""If values of a schema may have more parts per byte in arrays and maps, they are walked through, which takes about a
microsecond for each part. Most values have one or two; each part takes some 40 bytes of memory."""
PARTS_OF_FEW_BYTES = 64
"""Maximum parts per byte of a schema's smallest value, without the contents of arrays and maps; a schema that allows
more is refused."""
PARTS_SPARE = 1_000
PARTS_OF_NOTHING_MAX = 100
"""Maximum number of parts without bytes in a value: each record has one."""
DECIMAL_BYTES_MAX = 128
"""Maximum size of a decimal: three hundred digits."""
_FIXED_BYTES = {"null": 0, "boolean": 1, "float": 4, "double": 8}
_VARINT_BYTES_MAX = 10


class _Size(NamedTuple):
    """The size of a schema's values, without the contents of arrays and maps."""

    bytes_min: int
    parts_max: int
    excess: int
    """Number of parts that a value may have beyond `PARTS_PER_BYTE` for each of its bytes. It holds for one value,
    whereas `bytes_min` and `parts_max` may be of different values."""


class Limits:
    """The limits on data of a schema that fastavro has parsed."""

    def __init__(self, schema: Any) -> None:
        """Raise `ValueError` for a schema with values of almost no bytes and very many parts."""
        self._schema = schema
        self._named: dict[str, Any] = {}
        self._sizes: dict[str, _Size] = {}
        self._find_names(schema)
        self.recursive = self._has_cycle()
        size = self._size(schema)
        if size.parts_max > PARTS_OF_NOTHING_MAX + PARTS_OF_FEW_BYTES * size.bytes_min:
            raise ValueError(f"a value of {size.bytes_min} bytes may have {size.parts_max} parts")
        self.unbounded = self.recursive or self._has_more(schema)

    def check_bytes(self, data: bytes) -> None:
        """Raise `ValueError` for bytes that would cost too much, or end too early."""
        if self.unbounded:
            _Walk(self._named, data).through(self._schema, 0)

    def check_value(self, value: Any) -> None:
        """Raise `ValueError` for a value that is nested too deeply, or contains itself."""
        if self.recursive:
            # A record and the union or list that contains it are two levels of values.
            check_depth(value, 2 * DEPTH_MAX)

    def _find_names(self, schema: Any) -> None:
        if isinstance(schema, list):
            for each in schema:
                self._find_names(each)
        elif isinstance(schema, Mapping):
            if "name" in schema and schema.get("type") in _NAMED:
                self._named[schema["name"]] = schema
            for each in children(schema):
                self._find_names(each)

    def _has_cycle(self) -> bool:
        """Return whether a value of some type may contain another value of this type."""
        done: set[str] = set()

        def leads_back(schema: Any, within: tuple[str, ...]) -> bool:
            known = self._resolved(schema)
            called = known["name"] if isinstance(known, Mapping) and known.get("type") in _NAMED else None
            if called in within:
                return True
            if called in done:
                return False
            inner = within if called is None else (*within, called)
            found = any(leads_back(child, inner) for child in children(known))
            if called is not None:
                done.add(called)
            return found

        return leads_back(self._schema, ())

    def _size(self, schema: Any) -> _Size:
        known = self._resolved(schema)
        if isinstance(known, str):
            return _one_part(_FIXED_BYTES.get(known, 1))
        if isinstance(known, list):
            sizes = [self._size(each) for each in known]
            return _Size(
                1 + min((each.bytes_min for each in sizes), default=0),
                1 + max((each.parts_max for each in sizes), default=0),
                1 - PARTS_PER_BYTE + max((each.excess for each in sizes), default=0),
            )
        kind = known["type"]
        if kind == "fixed":
            return _one_part(known["size"])
        if kind in {"record", "error"}:
            found = self._sizes.get(known["name"])
            if found is None:
                self._sizes[known["name"]] = _one_part(1)  # for itself within itself: walked through anyway
                sizes = [self._size(field["type"]) for field in known["fields"]]
                found = _Size(
                    sum(each.bytes_min for each in sizes),
                    1 + sum(each.parts_max for each in sizes),
                    1 + sum(each.excess for each in sizes),
                )
                self._sizes[known["name"]] = found
            return found
        return self._size(kind) if isinstance(kind, list | Mapping) else _one_part(_FIXED_BYTES.get(kind, 1))

    def _has_more(self, schema: Any, seen: set[str] | None = None) -> bool:
        """Return whether values may cost their reader more than their bytes suggest, except by recursion."""
        seen = set() if seen is None else seen
        known = self._resolved(schema)
        if isinstance(known, Mapping):
            kind = known.get("type")
            if kind in _NAMED:
                if known["name"] in seen:
                    return False
                seen.add(known["name"])
            if known.get("logicalType") == "decimal":
                return True
            if kind == "array" and self._size(known["items"]).excess > 0:
                return True
            if kind == "map" and self._size(known["values"]).excess > PARTS_PER_BYTE:  # each value has a key
                return True
        return any(self._has_more(child, seen) for child in children(known))

    def _resolved(self, schema: Any) -> Any:
        return self._named.get(schema, schema) if isinstance(schema, str) else schema


def _one_part(bytes_min: int) -> _Size:
    return _Size(bytes_min, 1, 1 - PARTS_PER_BYTE * bytes_min)


_NAMED = ("record", "error", "enum", "fixed")


def children(schema: Any) -> list[Any]:
    """Return the schemas of the parts of a schema's values."""
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


def check_depth(value: Any, depth_max: int) -> None:
    """Raise `ValueError` for a value (of mappings and lists) that is nested too deeply, or contains itself.

    Goes level by level, because Python's limit on recursion may be reached before `depth_max`.
    """
    level: list[Any] = [value] if isinstance(value, _CONTAINERS) else []
    depth, looked_at = 0, 0
    while level:
        depth += 1
        if depth > depth_max + 1:
            raise ValueError("it is nested too deeply, or contains itself")
        below: list[Any] = []
        for each in level:
            if isinstance(each, Mapping):
                below.extend(child for child in each.values() if isinstance(child, _CONTAINERS))
            else:
                below.extend(child for child in each if isinstance(child, _CONTAINERS))
        looked_at += len(below)
        if looked_at > _VALUES_MAX:  # a value that contains itself twice doubles with each level
            raise ValueError(f"it has more than {_VALUES_MAX} values with others in them, or contains itself")
        level = below


_CONTAINERS = (Mapping, list, tuple)
_VALUES_MAX = 1_000_000


class _Walk:
    """A walk through the bytes of a value that makes no objects of them."""

    def __init__(self, named: Mapping[str, Any], data: bytes) -> None:
        self._named = named
        self._data = data
        self._at = 0
        self._parts = PARTS_SPARE + PARTS_PER_BYTE * len(data)
        """Number of parts that may still come."""

    def through(self, schema: Any, depth: int) -> None:
        """Walk through a value of a schema. Raises `ValueError`."""
        if depth > 3 * DEPTH_MAX:  # a record, its union and its list are three levels of schemas
            raise ValueError(f"it is nested more than {DEPTH_MAX} levels deep")
        self._parts -= 1
        if self._parts < 0:
            raise ValueError(f"{len(self._data)} bytes have too many parts of no size")
        if isinstance(schema, str):
            schema = self._named.get(schema, schema)
        if isinstance(schema, list):
            branch = self._long()
            if not 0 <= branch < len(schema):
                raise ValueError(f"it names branch {branch} of a union of {len(schema)}")
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
                if keyed:
                    self._skip(self._long())
                self.through(items, depth + 1)

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
