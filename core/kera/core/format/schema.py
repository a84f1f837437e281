"""Schemas of streams: the default one, and schemas as bytes.

A stream has either the default schema, which takes any record (timestamp, keys, value, headers), or its own schema (a
*typed* stream). Chunks never carry a schema; they name it by its id.
"""

from __future__ import annotations

import pyarrow as pa

from kera.core.errors import SchemaMismatch

DEFAULT_SCHEMA = pa.schema(
    [
        pa.field("timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("keys", pa.list_(pa.binary())),
        pa.field("value", pa.binary()),
        pa.field("headers", pa.map_(pa.string(), pa.binary())),
    ]
)
"""The records of streams without their own schema; a record has zero or more keys, the first is the primary one."""


def schema_to_bytes(schema: pa.Schema) -> bytes:
    """Return `schema` as an Arrow IPC message."""
    return schema.serialize().to_pybytes()  # type: ignore[no-any-return]


def schema_from_bytes(data: bytes) -> pa.Schema:
    """Return the schema in an Arrow IPC message. Raises `SchemaMismatch` for other bytes, and for names that are not
    text.
    """
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(data))
        for field in schema:
            _look_at_names(field)
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        raise SchemaMismatch(f"not an Arrow schema: {error}") from error
    return schema


def _look_at_names(field: pa.Field) -> None:
    """Look at all names in a field, so that one that is not UTF-8 raises `UnicodeDecodeError` now.

    Arrow accepts any bytes as a name, and raises this error only when a name is looked at.
    """
    str(field.name)
    kind = field.type.storage_type if isinstance(field.type, pa.BaseExtensionType) else field.type
    if pa.types.is_timestamp(kind):
        str(kind.tz)
    elif pa.types.is_dictionary(kind):
        _look_at_names(pa.field("", kind.value_type))
    for at in range(kind.num_fields):
        _look_at_names(kind.field(at))
