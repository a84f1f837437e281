"""The type of a column for a JSON Schema.

A part of a schema without exactly one type becomes a column of text, with the JSON of the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from kera.core.errors import InvalidArgument
from kera.spark_connector.decoding.types import Fields, refused

_PRIMITIVE = {"integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}
_FORMATS = {"date": pa.date32(), "date-time": pa.timestamp("us", tz="UTC")}
"""Types of text formats."""
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


def arrow_type_of(definition: str) -> pa.DataType:
    """Return the type of a schema's values. Raises `InvalidArgument` with the path of a part without a column type."""
    try:
        schema = json.loads(definition)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"this is not a valid JSON Schema: {error}") from error
    kind = _of(schema, schema, Fields(), "", 0)
    if not pa.types.is_nested(kind):
        raise refused("", "its values are neither objects nor arrays; cast them yourself: substring(value, 6)")
    return kind


def _of(schema: Any, root: Any, fields: Fields, path: str, depth: int) -> pa.DataType:
    fields.take(path, depth)
    if not isinstance(schema, Mapping):
        return pa.string()
    other = _other(schema, root, path)
    if other is not None:
        return _of(other, root, fields, path, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kinds = [each for each in kind if each != "null"]
        kind = kinds[0] if len(kinds) == 1 else None
    if kind == "array":
        return pa.list_(_of(schema.get("items"), root, fields, f"{path}[]", depth + 1))
    if kind == "object":
        return _of_object(schema, root, fields, path, depth)
    if kind == "string":
        return _FORMATS.get(str(schema.get("format")), pa.string())
    return _PRIMITIVE.get(str(kind), pa.string())


def _other(schema: Mapping[str, Any], root: Any, path: str) -> Any:
    """Return the schema that `schema` refers to (its ``$ref``, or the only alternative besides null).

    Empty if there are several alternatives; None if it refers to no other schema.
    """
    if "$ref" in schema:
        return _referred(schema["$ref"], root, path)
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            others = [each for each in schema[name] if each != {"type": "null"}]
            return others[0] if len(others) == 1 else {}
    return None


def _of_object(schema: Mapping[str, Any], root: Any, fields: Fields, path: str, depth: int) -> pa.DataType:
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and properties:
        return pa.struct(
            [
                pa.field(name, _of(each, root, fields, f"{path}.{name}" if path else name, depth + 1))
                for name, each in properties.items()
            ]
        )
    return pa.map_(pa.string(), _of(schema.get("additionalProperties"), root, fields, f"{path}{{}}", depth + 1))


def _referred(reference: Any, root: Any, path: str) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise refused(path, f"it refers to {reference!r}, which is not in the schema")
    first, *parts = unquote(reference.removeprefix("#")).split("/")
    if first:
        raise refused(path, f"it refers to {reference!r}: write the place of that schema, as in #/$defs/{first}")
    found = root
    for part in parts:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if _INDEX.fullmatch(name) and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    if found is None:
        raise refused(path, f"it refers to {reference!r}, which is not in the schema")
    return found
