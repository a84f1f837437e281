"""The rules of Arrow schemas: columns may only be added, as nullable ones, and types may only become wider. Pure."""

from __future__ import annotations

import base64
import binascii
from collections import Counter

import pyarrow as pa

from kera.core.errors import InvalidSchema, SchemaMismatch
from kera.core.format.schema import schema_from_bytes
from kera.server.schemas.differences import Pair, below

COLUMNS_MAX = 10_000
"""Maximum of columns in a schema, nested ones included."""
DEPTH_MAX = 32
"""Maximum depth of nested columns."""
_INTEGERS = {
    pa.int8(): (7, True),
    pa.int16(): (15, True),
    pa.int32(): (31, True),
    pa.int64(): (63, True),
    pa.uint8(): (8, False),
    pa.uint16(): (16, False),
    pa.uint32(): (32, False),
    pa.uint64(): (64, False),
}
"""Bits of a value without its sign, and whether it may be negative."""
_FLOATS = {pa.float16(): 11, pa.float32(): 24, pa.float64(): 53}
"""Number of bits up to which all whole numbers can be represented."""
_LARGE = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}


def parsed_arrow(definition: str) -> pa.Schema:
    """Parse the schema in `definition`. Raises `InvalidSchema`."""
    try:
        data = base64.b64decode(definition, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidSchema(f"the definition of an Arrow schema is its bytes in base64: {error}") from None
    try:
        schema = schema_from_bytes(data)
    except SchemaMismatch as error:
        raise InvalidSchema(error.message) from None
    if not schema.names:
        raise InvalidSchema("the schema has no column")
    name, count = Counter(schema.names).most_common(1)[0]
    if count > 1:
        raise InvalidSchema(f"the schema has {count} columns named {name!r}", column=name)
    left = COLUMNS_MAX
    for field in schema:
        left = _counted(field, left, 0)
    return schema


def _counted(field: pa.Field, left: int, depth: int) -> int:
    if left <= 0 or depth > DEPTH_MAX:
        raise InvalidSchema(
            f"the schema has more than {COLUMNS_MAX} columns, or more than {DEPTH_MAX} within each other"
        )
    left -= 1
    for at in range(field.type.num_fields):
        left = _counted(field.type.field(at), left, depth + 1)
    return left


def compare(writer: pa.Schema, reader: pa.Schema, pair: Pair) -> None:
    """Report in `pair` why `reader` cannot read data that were written with `writer`."""
    _columns(dict(zip(writer.names, writer, strict=True)), dict(zip(reader.names, reader, strict=True)), pair, "")


def _columns(writes: dict[str, pa.Field], reads: dict[str, pa.Field], pair: Pair, path: str) -> None:
    for name, field in writes.items():
        pair.step()
        if name in reads:
            _field(field, reads[name], pair, below(path, name))
        elif pair.new_reads:
            pair.say(below(path, name), "is gone: columns are only added")
    for name, field in reads.items():
        pair.step()
        if name not in writes and not field.nullable:
            pair.say(
                below(path, name),
                pair.either(reads="is new, and may not be null", writes="is gone, and could not be null"),
            )


def _field(writes: pa.Field, reads: pa.Field, pair: Pair, path: str) -> None:
    with pair.level():
        if writes.nullable and not reads.nullable:
            pair.differ(path, writes="may be null", reads="may not be null")
        _types(writes.type, reads.type, pair, path)


def _types(writes: pa.DataType, reads: pa.DataType, pair: Pair, path: str) -> None:
    if writes.equals(reads) and not pa.types.is_nested(writes):
        return
    if pa.types.is_struct(writes) and pa.types.is_struct(reads):
        _columns({each.name: each for each in writes}, {each.name: each for each in reads}, pair, path)
    elif _is_list(writes) and _is_list(reads) and not _is_narrower_list(writes, reads):
        _field(writes.value_field, reads.value_field, pair, f"{path}[]")
    elif pa.types.is_map(writes) and pa.types.is_map(reads):
        _field(writes.key_field, reads.key_field, pair, f"{path}{{key}}")
        _field(writes.item_field, reads.item_field, pair, f"{path}{{}}")
    elif not writes.equals(reads) and not _is_wider(writes, reads):
        pair.differ(path, writes=writes, reads=reads)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_narrower_list(writes: pa.DataType, reads: pa.DataType) -> bool:
    if pa.types.is_fixed_size_list(reads):
        return not pa.types.is_fixed_size_list(writes) or bool(writes.list_size != reads.list_size)
    return bool(pa.types.is_large_list(writes) and pa.types.is_list(reads))


def _is_wider(writes: pa.DataType, reads: pa.DataType) -> bool:
    """Return whether all values of `writes` are also values of `reads`."""
    if writes in _INTEGERS:
        bits, signed = _INTEGERS[writes]
        if reads in _INTEGERS:
            more, may_be_below = _INTEGERS[reads]
            return bits <= more and (may_be_below or not signed)
        return reads in _FLOATS and bits <= _FLOATS[reads]
    if writes in _FLOATS:
        return reads in _FLOATS and _FLOATS[writes] <= _FLOATS[reads]
    if pa.types.is_decimal(writes) and pa.types.is_decimal(reads):
        before, after = writes.precision - writes.scale, reads.precision - reads.scale
        return bool(writes.scale <= reads.scale and before <= after)
    return bool(_LARGE.get(writes) == reads or writes == pa.null())
