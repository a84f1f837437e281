"""Which streamlet a record goes to: by its primary key, or spread evenly. Pure functions.

The hash is part of the contract between all producers of a stream: CRC-32C of the key's bytes, modulo M. A key of a
typed column is first brought to bytes: text as UTF-8, binary as it is, anything else as the text of its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kera.core.checksum import crc32c
from kera.core.errors import SchemaMismatch


def streamlet_of(key: bytes, streamlets: int) -> int:
    """The streamlet of a key."""
    return crc32c(key) % streamlets


class Partition(NamedTuple):
    """Rows by streamlet: those of each follow each other."""

    batch: pa.RecordBatch
    streamlets: Sequence[int]
    ends: Sequence[int]
    """Where in `batch` the rows of each streamlet end."""
    order: npt.NDArray[np.int64] | None = None
    """Where each row was in the batch that was partitioned; None: where it is now."""

    def parts(self) -> list[tuple[int, pa.RecordBatch]]:
        """The rows of each streamlet as a batch."""
        if len(self.streamlets) == 1:
            return [(self.streamlets[0], self.batch)]
        bounds = pairwise([0, *self.ends])
        return [
            (streamlet, self.batch.slice(start, end - start))
            for streamlet, (start, end) in zip(self.streamlets, bounds, strict=True)
        ]


def partition_by_key(batch: pa.RecordBatch, keys: pa.Array, streamlets: int, keyless: int) -> Partition:
    """The rows of `batch` by streamlet, those of each in their order; rows without a key go to streamlet `keyless`.

    Hashes each distinct key once, so its cost hardly depends on the number of rows.
    """
    if streamlets == 1:
        return whole(batch, 0)
    if pa.types.is_nested(keys.type):
        raise SchemaMismatch(f"a key column of type {keys.type} cannot partition a stream; use a scalar column")
    encoded = pc.dictionary_encode(keys)
    hashes = [keyless if key is None else streamlet_of(key, streamlets) for key in _as_bytes(encoded.dictionary)]
    small = np.uint16 if streamlets <= 1 << 16 else np.int64  # numpy sorts small numbers in linear time
    table = np.array([*hashes, keyless], dtype=small)
    places = table[pc.fill_null(encoded.indices, len(hashes)).to_numpy(zero_copy_only=False)]
    order = np.argsort(places, kind="stable")
    used, starts = np.unique(places[order], return_index=True)
    if len(used) == 1:
        return whole(batch, int(used[0]))
    grouped = batch.take(pa.array(order))  # once, and cut: a take for each streamlet would cost as much as all rows
    return Partition(grouped, used.tolist(), [*starts[1:].tolist(), len(order)][: len(used)], order)


def whole(batch: pa.RecordBatch, streamlet: int) -> Partition:
    """All rows of `batch` in one streamlet."""
    return Partition(batch, (streamlet,), (batch.num_rows,))


def primary_keys(keys: pa.Array) -> pa.Array:
    """The first key of each row of a ``list<binary>`` column; null for a row without keys."""
    if isinstance(keys, pa.ChunkedArray):
        keys = keys.combine_chunks()
    lengths = pc.fill_null(pc.list_value_length(keys), 0)
    present = pc.greater(lengths, 0)
    rows = pc.indices_nonzero(present)
    first = pc.list_element(keys.take(rows), 0) if len(rows) else pa.array([], pa.binary())
    places = pc.if_else(present, pc.subtract(pc.cumulative_sum(pc.cast(present, pa.int64())), 1), None)
    return first.take(places)


def _as_bytes(values: pa.Array) -> list[bytes | None]:
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return [None if value is None else value.encode() for value in values.to_pylist()]
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return values.to_pylist()  # type: ignore[no-any-return]
    return [None if value is None else str(value).encode() for value in values.to_pylist()]
