"""The type of a column for an Avro schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from kera.core.errors import InvalidArgument
from kera.spark_connector.decoding.types import Fields, refused

_PRIMITIVE = {
    "null": pa.null(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
    "enum": pa.string(),
    "fixed": pa.binary(),
}
_LOGICAL = {
    "date": pa.date32(),
    "timestamp-millis": pa.timestamp("us", tz="UTC"),
    "timestamp-micros": pa.timestamp("us", tz="UTC"),
    "local-timestamp-millis": pa.timestamp("us"),
    "local-timestamp-micros": pa.timestamp("us"),
    "uuid": pa.string(),
}
PRECISION_MAX = 38


def arrow_type_of(definition: str) -> pa.DataType:
    """Return the type of a schema's values. Raises `InvalidArgument` with the path of a part without a column type."""
    try:
        schema = json.loads(definition)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"this is not a valid Avro schema: {error}") from error
    return _Types().of(schema, "", ())


def may_have_times(definition: str) -> bool:
    """Return whether some value may be a time of day: Python reads it as a time, but its column has numbers."""
    return "time-millis" in definition or "time-micros" in definition


class _Types:
    def __init__(self) -> None:
        self._named: dict[str, Any] = {}
        self._fields = Fields()

    def of(self, schema: Any, path: str, within: tuple[str, ...], namespace: str = "") -> pa.DataType:
        self._fields.take(path, len(within))
        if isinstance(schema, list):
            return self._of_union(schema, path, within, namespace)
        if isinstance(schema, str):
            if schema in _PRIMITIVE:
                return _PRIMITIVE[schema]
            schema = self._named.get(_full(schema, namespace), self._named.get(schema, schema))
        kind = schema.get("type") if isinstance(schema, Mapping) else schema
        if not isinstance(schema, Mapping) or not isinstance(kind, str):
            raise refused(path, f"no type is called {kind!r}")
        if kind in {"record", "error"}:
            return self._of_record(schema, path, within, namespace)
        if kind == "array":
            return pa.list_(self.of(schema["items"], f"{path}[]", (*within, ""), namespace))
        if kind == "map":
            return pa.map_(pa.string(), self.of(schema["values"], f"{path}{{}}", (*within, ""), namespace))
        if kind in {"enum", "fixed"}:
            self._named[_full(schema["name"], schema.get("namespace", namespace))] = schema
        return self._of_leaf(schema, kind, path, within, namespace)

    def _of_leaf(
        self, schema: Mapping[str, Any], kind: str, path: str, within: tuple[str, ...], namespace: str
    ) -> pa.DataType:
        logical = schema.get("logicalType")
        if logical == "decimal" and kind in {"bytes", "fixed"}:
            precision, scale = schema.get("precision"), schema.get("scale", 0)
            if not isinstance(precision, int) or not 0 < precision <= PRECISION_MAX:
                raise refused(path, f"Spark's decimals have up to {PRECISION_MAX} digits, and it has {precision}")
            return pa.decimal128(precision, scale)
        if logical in _LOGICAL and kind in {"int", "long", "string"}:
            return _LOGICAL[logical]
        return self.of(kind, path, (*within, ""), namespace) if kind not in _PRIMITIVE else _PRIMITIVE[kind]

    def _of_record(self, schema: Mapping[str, Any], path: str, within: tuple[str, ...], namespace: str) -> pa.DataType:
        namespace = schema.get("namespace", namespace)
        name = _full(schema["name"], namespace)
        if name in within:
            raise refused(path, f"{name} contains itself")
        self._named[name] = {**schema, "namespace": namespace}
        inner = name.rpartition(".")[0] or namespace
        fields = []
        for field in schema["fields"]:
            where = f"{path}.{field['name']}" if path else field["name"]
            fields.append(pa.field(field["name"], self.of(field["type"], where, (*within, name), inner)))
        if not fields:
            raise refused(path, f"{name} has no fields")
        return pa.struct(fields)

    def _of_union(self, schema: list[Any], path: str, within: tuple[str, ...], namespace: str) -> pa.DataType:
        others = [each for each in schema if each not in ("null", {"type": "null"})]
        if len(others) != 1:
            raise refused(path, "a union of several types; only that of one type and null is one")
        return self.of(others[0], path, within, namespace)


def _full(name: str, namespace: str) -> str:
    return f"{namespace}.{name}" if namespace and "." not in name else name
