"""Helpers, for all systems, to copy records of streams without a schema as Arrow."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from kera.core.format.schema import DEFAULT_SCHEMA


def is_default(schema: pa.Schema) -> bool:
    """Return whether rows of `schema` are records of the default schema: time, keys, value, headers, or some of it."""
    return all(
        field.name in DEFAULT_SCHEMA.names and field.type == DEFAULT_SCHEMA.field(field.name).type for field in schema
    )


def key_lists(keys: pa.Array) -> pa.Array:
    """Return the column `keys` of records with one key each, or with no key where `keys` is null."""
    there = keys.is_valid()
    ends = pc.cumulative_sum(there.cast(pa.int32()))
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
    return pa.ListArray.from_arrays(offsets, keys.drop_null().cast(pa.binary()), mask=keys.is_null())
