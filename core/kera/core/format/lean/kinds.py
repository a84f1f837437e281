"""The kinds of nodes of Arrow's types, and the properties of schemas."""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import types

from kera.core.format.lean.layout import LARGE, NESTED, WIDTHS, WITH_PLACES, Kind
from kera.core.native import native

SCHEMAS_KEPT = 256

_BITS = 8
_VIEW_BYTES = 16
_KINDS = (
    (Kind.NULL, types.is_null),
    (Kind.BITS, types.is_boolean),
    (Kind.BINARY, types.is_binary),
    (Kind.TEXT, types.is_string),
    (Kind.LARGE_BINARY, types.is_large_binary),
    (Kind.LARGE_TEXT, types.is_large_string),
    (Kind.LIST, types.is_list),
    (Kind.LIST, types.is_map),
    (Kind.LARGE_LIST, types.is_large_list),
    (Kind.FIXED_LIST, types.is_fixed_size_list),
    (Kind.STRUCT, types.is_struct),
    (Kind.FIXED, types.is_fixed_size_binary),
)
_BY_WIDTH = {width: kind for kind, width in WIDTHS.items()}


def storage_of(kind: pa.DataType) -> pa.DataType:
    """Return the storage type of an extension type; any other type is returned unchanged."""
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return kind


def kind_of(kind: pa.DataType) -> Kind | None:
    """Return the kind of node of a type that is not an extension; None: lean payloads cannot have the type."""
    for found, is_of in _KINDS:
        if is_of(kind):
            return found
    if types.is_primitive(kind) or types.is_decimal(kind):
        return _BY_WIDTH.get(kind.bit_width // _BITS, Kind.FIXED)
    return None


def within(kind: pa.DataType) -> list[pa.DataType]:
    """Return the types of the nodes within a node of this type."""
    if types.is_map(kind):
        return [pa.struct([kind.key_field, kind.item_field])]
    return [kind.field(at).type for at in range(kind.num_fields)]


def null_bytes(kind: pa.DataType) -> int:
    """Return the size of a null of a type in Arrow, at least a byte, including nested values."""
    kind = storage_of(kind)
    found = kind_of(kind)
    if found in WITH_PLACES:
        return 8 if found in LARGE else 4
    if found is Kind.FIXED_LIST:
        return 1 + int(kind.list_size) * null_bytes(kind.value_type)
    if found is Kind.STRUCT or types.is_union(kind):
        return 1 + sum(map(null_bytes, within(kind)))
    if found is None:
        return _VIEW_BYTES
    return 1 if found in (Kind.NULL, Kind.BITS) else max(1, bytes_of(kind))


def bytes_of(kind: pa.DataType) -> int:
    """Return the width of a fixed-width type in bytes. Arrow's number of bits overflows from 2^28 bytes on."""
    return int(kind.byte_width if types.is_fixed_size_binary(kind) else kind.bit_width // _BITS)


class Known(NamedTuple):
    """The properties of a schema. The schema is kept, as comparing schemas costs more than checking a payload.

    The native core finds `type` by its index in this tuple.
    """

    schema: pa.Schema
    type: Any
    """See `native.lean_type`. None: there is no native core, or it does not support the schema."""
    is_lean: bool
    """Whether the schema can have lean payloads: those with views, unions, runs and dictionaries cannot."""
    ruled: tuple[int, ...]
    """Columns that do not allow all values that their bytes can hold: decimals, times of a day, keys of maps."""


_known: dict[int, Known] = {}


def known_of(schema: pa.Schema) -> Known:
    """Return the properties of a schema from a cache."""
    known = _known.get(id(schema))
    if known is None:
        if len(_known) >= SCHEMAS_KEPT:
            _known.clear()
        known = _known[id(schema)] = learn(schema)
    return known


def learn(schema: pa.Schema) -> Known:
    """Return the properties of a schema for a caller that keeps them."""
    lean = all(map(_is_lean, schema.types))
    found = native.lean_type(schema) if native is not None and lean else None
    ruled = tuple(column for column, kind in enumerate(schema.types) if _has_rules(kind))
    return Known(schema, found, lean, ruled)


def is_lean(schema: pa.Schema) -> bool:
    """Return whether a schema can have lean payloads: those with views, unions, runs and dictionaries cannot."""
    return known_of(schema).is_lean


def _is_lean(kind: pa.DataType) -> bool:
    kind = storage_of(kind)
    found = kind_of(kind)
    if found is None:
        return False
    return found not in NESTED or all(map(_is_lean, within(kind)))


def _has_rules(kind: pa.DataType) -> bool:
    kind = storage_of(kind)
    if types.is_decimal(kind) or types.is_time(kind) or types.is_date64(kind) or types.is_map(kind):
        return True
    found = kind_of(kind)
    return found is not None and found in NESTED and any(map(_has_rules, within(kind)))
