"""Which streamlet a record goes to: by its primary key, or spread evenly. Pure functions.

The partitioner is part of the contract between all producers of a stream: by default CRC-32C of the key's bytes, modulo
M. Two others place keys as Kafka's clients do (`PARTITIONERS`). A key of a typed column is first converted to bytes:
text to UTF-8, any other value but binary to its text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kera.core.errors import SchemaMismatch
from kera.core.format.checksum import crc32c, crc32c_each
from kera.core.format.key_hashes import crc32, crc32_each, murmur2, murmur2_each

Numbers: TypeAlias = npt.NDArray[np.int64]
"""A column of numbers: streamlets, or a number for each streamlet."""


class Partitioner(NamedTuple):
    """How keys decide streamlets. The sender in C (``core/native/key_hash.c``) knows the same partitioners by name."""

    name: str
    hash_of: Callable[[bytes], int]
    hash_each: Callable[[Any, Any], bytes]
    """Hashes each piece of a buffer: see `crc32c_each`."""
    mask: int = (1 << 32) - 1
    """The bits of the hash that count."""
    takes_empty: bool = True
    """Whether an empty key decides the streamlet; if not, its record is placed like a record without a key."""

    def decides(self, key: bytes) -> bool:
        """Return whether the streamlet depends on `key`."""
        return self.takes_empty or len(key) > 0


CRC32C = Partitioner("crc32c", crc32c, crc32c_each)
PARTITIONERS = {
    partitioner.name: partitioner
    for partitioner in (
        CRC32C,
        Partitioner("murmur2_random", murmur2, murmur2_each, mask=(1 << 31) - 1),
        Partitioner("consistent_random", crc32, crc32_each, takes_empty=False),
    )
}
"""The partitioners by name. ``murmur2_random`` is the default of Kafka in Java, ``consistent_random`` of librdkafka."""


def streamlet_of(key: bytes, streamlets: int, partitioner: Partitioner = CRC32C) -> int:
    """Return the streamlet of a key that decides."""
    return (partitioner.hash_of(key) & partitioner.mask) % streamlets


def streamlet_of_keys(keys: Sequence[bytes], streamlets: int, partitioner: Partitioner) -> int | None:
    """Return the streamlet of a record with these keys; None: they do not decide it."""
    return streamlet_of(keys[0], streamlets, partitioner) if keys and partitioner.decides(keys[0]) else None


class Partition(NamedTuple):
    """Rows by streamlet."""

    batch: pa.RecordBatch
    streamlets: Numbers
    ends: Numbers
    """The end of each streamlet's rows, in their order."""
    order: Numbers | None = None
    """An order of the rows of `batch` that keeps each streamlet's rows together; None: `batch` is in that order."""
    sized: bool = False
    """Whether the rows up to each end fit into a chunk."""

    def grouped(self) -> Partition:
        """Return the partition with the rows of its batch in `order`.

        Takes all rows once, to be sliced later: a take for each streamlet would cost as much as a take of all rows.
        """
        if self.order is None:
            return self
        batch, rows = self.batch, pa.array(self.order)
        # Columns of nothing but nulls stay: they look the same in any order.
        columns = [column if column.null_count == len(column) else column.take(rows) for column in batch.columns]
        return self._replace(batch=pa.RecordBatch.from_arrays(columns, schema=batch.schema), order=None)

    def rows(self, start: int, end: int) -> Partition:
        """Return the rows from `start` to `end` in `order`; the caller replaces `streamlets` and `ends`."""
        if self.order is None:
            return self._replace(batch=self.batch.slice(start, end - start))
        return self._replace(order=self.order[start:end])

    def parts(self) -> list[tuple[int, pa.RecordBatch]]:
        """Return the rows of each streamlet as a batch."""
        batch = self.grouped().batch
        streamlets = self.streamlets.tolist()
        if len(streamlets) == 1:
            return [(streamlets[0], batch)]
        bounds = pairwise([0, *self.ends.tolist()])
        return [
            (streamlet, batch.slice(start, end - start))
            for streamlet, (start, end) in zip(streamlets, bounds, strict=True)
        ]


def partition_by_key(
    batch: pa.RecordBatch, keys: pa.Array, streamlets: int, keyless: int, partitioner: Partitioner = CRC32C
) -> Partition:
    """Partition the rows of `batch` by streamlet, keeping their order; rows without a key go to streamlet `keyless`.

    Python code runs per key only if keys are neither text nor binary, and then once for each distinct key.
    """
    if streamlets == 1:
        return whole(batch, 0)
    if pa.types.is_nested(keys.type):
        raise SchemaMismatch(f"a key column of type {keys.type} cannot partition a stream; use a scalar column")
    if not batch.num_rows:
        return Partition(batch, _numbers(), _numbers())
    small = np.uint16 if streamlets <= 1 << 16 else np.int64  # numpy sorts small numbers in linear time
    hashes = _hashes(keys, partitioner) & np.uint32(partitioner.mask)
    places = (hashes % streamlets).astype(small)
    if not partitioner.takes_empty and _has_length(keys.type):
        places[pc.fill_null(pc.binary_length(keys), 0).to_numpy(zero_copy_only=False) == 0] = keyless
    elif keys.null_count:
        places[pc.is_null(keys).to_numpy(zero_copy_only=False)] = keyless
    order = np.argsort(places, kind="stable")
    places = places[order]
    ends = np.append(np.flatnonzero(places[1:] != places[:-1]) + 1, len(places))
    if len(ends) == 1:
        return whole(batch, int(places[0]))
    return Partition(batch, places[ends - 1].astype(np.int64), ends, order)


def whole(batch: pa.RecordBatch, streamlet: int) -> Partition:
    """Return a partition of all rows of `batch` to one streamlet."""
    return Partition(batch, _numbers(streamlet), _numbers(batch.num_rows))


def _numbers(*numbers: int) -> Numbers:
    return np.array(numbers, np.int64)


def primary_keys(keys: pa.Array) -> pa.Array:
    """Return the first key of each row of a ``list<binary>`` column; null for a row without keys."""
    if isinstance(keys, pa.ChunkedArray):
        keys = keys.combine_chunks()
    if not keys.null_count and np.all(np.diff(keys.offsets) == 1):
        return keys.flatten()  # the usual case: one key in each row
    lengths = pc.fill_null(pc.list_value_length(keys), 0)
    present = pc.greater(lengths, 0)
    rows = pc.indices_nonzero(present)
    first = pc.list_element(keys.take(rows), 0) if len(rows) else pa.array([], pa.binary())
    places = pc.if_else(present, pc.subtract(pc.cumulative_sum(pc.cast(present, pa.int64())), 1), None)
    return first.take(places)


def _hashes(keys: pa.Array, partitioner: Partitioner) -> npt.NDArray[np.uint32]:
    """Return the hash of each key; it is arbitrary for a missing key."""
    if pa.types.is_string(keys.type) or pa.types.is_binary(keys.type):
        _, offsets, data = keys.buffers()
        if not len(keys) or data is None:  # all are empty or null
            return np.full(len(keys), partitioner.hash_of(b""), np.uint32)
        bounds = np.frombuffer(offsets, np.int32, len(keys) + 1, 4 * keys.offset)
        return np.frombuffer(partitioner.hash_each(memoryview(data), bounds), np.uint32)
    encoded = pc.dictionary_encode(keys)
    distinct = [0 if key is None else partitioner.hash_of(key) for key in _as_bytes(encoded.dictionary)]
    table = np.array([*distinct, 0], np.uint32)
    indices: npt.NDArray[np.int32] = pc.fill_null(encoded.indices, len(distinct)).to_numpy(zero_copy_only=False)
    return table[indices]


def _has_length(kind: pa.DataType) -> bool:
    """Return whether values of a type can be empty."""
    is_text_or_bytes = (
        pa.types.is_string,
        pa.types.is_binary,
        pa.types.is_large_string,
        pa.types.is_large_binary,
        pa.types.is_fixed_size_binary,
    )
    return any(is_it(kind) for is_it in is_text_or_bytes)


def _as_bytes(values: pa.Array) -> list[bytes | None]:
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return [None if value is None else value.encode() for value in values.to_pylist()]
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return values.to_pylist()  # type: ignore[no-any-return]
    return [None if value is None else str(value).encode() for value in values.to_pylist()]
