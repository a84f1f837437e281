"""Derives the Avro and JSON schemas for columns of Arrow.

A nullable column becomes an optional field with the default null. So it can be removed later, and a reader of a column
that is added later can also read values without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from kera.core.errors import SchemaMismatch

_AVRO_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_AVRO_TYPES: dict[pa.DataType, Any] = {
    pa.bool_(): "boolean",
    **dict.fromkeys((pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint16()), "int"),
    **dict.fromkeys((pa.int64(), pa.uint32()), "long"),
    **dict.fromkeys((pa.float16(), pa.float32()), "float"),
    pa.float64(): "double",
    **dict.fromkeys((pa.string(), pa.large_string(), pa.string_view()), "string"),
    **dict.fromkeys((pa.binary(), pa.large_binary(), pa.binary_view()), "bytes"),
    pa.date32(): {"type": "int", "logicalType": "date"},
    pa.date64(): {"type": "int", "logicalType": "date"},
    pa.time32("s"): {"type": "int", "logicalType": "time-millis"},
    pa.time32("ms"): {"type": "int", "logicalType": "time-millis"},
    pa.time64("us"): {"type": "long", "logicalType": "time-micros"},
}


def avro_schema_of(columns: pa.Schema, name: str) -> dict[str, Any]:
    """Return an Avro record `name`. Raises `SchemaMismatch` for a column with a name or type that Avro lacks."""
    return _avro_record(name, list(columns), "")


def _avro_record(name: str, fields: list[pa.Field], path: str) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [avro_field(field, name, path) for field in fields]}


def avro_field(field: pa.Field, record: str, path: str = "") -> dict[str, Any]:
    """Return the field of `record` for a column; `path` leads to the record. Raises `SchemaMismatch`."""
    where = f"{path}.{field.name}" if path else field.name
    if not _AVRO_NAME.fullmatch(field.name):
        raise SchemaMismatch(
            f"column {where!r} has a name that Avro does not allow (letters, digits and _, no digit first): rename it,"
            " or write --value json",
            column=where,
        )
    kind = _avro_type(field.type, f"{record}_{field.name}", where)
    return {"name": field.name, "type": ["null", kind], "default": None} if field.nullable else _required(field, kind)


def _required(field: pa.Field, kind: Any) -> dict[str, Any]:
    return {"name": field.name, "type": kind}


def _avro_type(kind: pa.DataType, name: str, where: str) -> Any:
    if pa.types.is_dictionary(kind):
        found = _avro_type(kind.value_type, name, where)
    elif _is_list(kind):
        found = {"type": "array", "items": _optional(kind.value_field, name, f"{where}[]")}
    elif _is_text_map(kind):
        found = {"type": "map", "values": _optional(kind.item_field, name, f"{where}{{}}")}
    elif pa.types.is_struct(kind):
        found = _avro_record(name, list(kind), where)
    else:
        found = _avro_leaf(kind)
    if found is None:
        raise _no_type(where, kind, "Avro")
    return found


def _avro_leaf(kind: pa.DataType) -> Any:
    if pa.types.is_fixed_size_binary(kind):
        return "bytes"
    if pa.types.is_timestamp(kind):
        unit = "millis" if kind.unit in ("s", "ms") else "micros"
        return {"type": "long", "logicalType": f"{'' if kind.tz else 'local-'}timestamp-{unit}"}
    if pa.types.is_decimal(kind) and kind.scale >= 0:
        return {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
    return _AVRO_TYPES.get(kind)


def _optional(field: pa.Field, name: str, where: str) -> Any:
    kind = _avro_type(field.type, name, where)
    return ["null", kind] if field.nullable else kind


def json_schema_of(columns: pa.Schema) -> dict[str, Any]:
    """Return a JSON Schema of an object with a property for each column. Raises `SchemaMismatch`."""
    return _json_object(list(columns), "")


def _json_object(fields: list[pa.Field], path: str) -> dict[str, Any]:
    properties = {field.name: json_property(field, path) for field in fields}
    required = [field.name for field in fields if not field.nullable]
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def json_property(field: pa.Field, path: str = "") -> dict[str, Any]:
    """Return the schema of a column's values; `path` leads to the object. Raises `SchemaMismatch`."""
    where = f"{path}.{field.name}" if path else field.name
    found = _json_type(field.type, where)
    return {**found, "type": ["null", found["type"]]} if field.nullable else found


def _json_type(kind: pa.DataType, where: str) -> dict[str, Any]:
    if pa.types.is_dictionary(kind):
        found: dict[str, Any] | None = _json_type(kind.value_type, where)
    elif _is_list(kind):
        found = {"type": "array", "items": json_property(kind.value_field.with_name("[]"), where)}
    elif _is_text_map(kind):
        found = {"type": "object", "additionalProperties": json_property(kind.item_field.with_name("{}"), where)}
    elif pa.types.is_struct(kind):
        found = _json_object(list(kind), where)
    else:
        found = next((schema for is_one, schema in _JSON_TYPES if is_one(kind)), None)
    if found is None:
        raise _no_type(where, kind, "JSON")
    return found


def _is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def _is_bytes(kind: pa.DataType) -> bool:
    return kind in (pa.binary(), pa.large_binary(), pa.binary_view()) or pa.types.is_fixed_size_binary(kind)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text_map(kind: pa.DataType) -> bool:
    return bool(pa.types.is_map(kind) and _is_text(kind.key_type))


_JSON_TYPES: list[tuple[Callable[[pa.DataType], bool], dict[str, Any]]] = [
    (pa.types.is_boolean, {"type": "boolean"}),
    (pa.types.is_integer, {"type": "integer"}),
    (pa.types.is_floating, {"type": "number"}),
    (lambda kind: pa.types.is_timestamp(kind) and kind.tz is not None, {"type": "string", "format": "date-time"}),
    (pa.types.is_date, {"type": "string", "format": "date"}),
    (_is_bytes, {"type": "string", "contentEncoding": "base64"}),
    (lambda kind: _is_text(kind) or pa.types.is_decimal(kind), {"type": "string"}),
    (lambda kind: pa.types.is_timestamp(kind) or pa.types.is_time(kind), {"type": "string"}),
]
"""The JSON types by condition; the first that fits counts."""


def _no_type(where: str, kind: pa.DataType, language: str) -> SchemaMismatch:
    return SchemaMismatch(f"column {where!r} is {kind}, for which {language} has no type", column=where)


def plain_values(column: pa.Array) -> list[Any]:
    """Return the values of a column in the form of the schemas above, with maps as dictionaries.

    Raises Arrow's error for a time out of Python's range, and `ValueError` for a map with a key twice.
    """
    values = column.to_pylist()
    return [_plain(value, column.type) for value in values] if _has_map(column.type) else values


def _has_map(kind: pa.DataType) -> bool:
    return bool(pa.types.is_map(kind)) or any(_has_map(kind.field(at).type) for at in range(kind.num_fields))


def _plain(value: Any, kind: pa.DataType) -> Any:
    if value is None or not _has_map(kind):
        return value
    if pa.types.is_map(kind):
        found = {name: _plain(each, kind.item_type) for name, each in value}
        if len(found) < len(value):
            raise ValueError("a map has a key twice")
        return found
    if pa.types.is_struct(kind):
        return {field.name: _plain(value[field.name], field.type) for field in kind}
    return [_plain(each, kind.value_type) for each in value]
