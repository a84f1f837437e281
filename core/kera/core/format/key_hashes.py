"""Hashes of record keys that Kafka's clients use, bit for bit: CRC-32 (zlib, librdkafka) and MurmurHash2 (Java)."""

from __future__ import annotations

from array import array
from itertools import pairwise
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kera.core.native import accelerated

__all__ = ["crc32", "crc32_each", "murmur2", "murmur2_each"]

_SEED = 0x9747B28C
_FACTOR = 0x5BD1E995
_UINT32_MAX = (1 << 32) - 1


@accelerated()
def murmur2(key: bytes) -> int:
    """Return what ``Utils.murmur2`` of Kafka's client in Java returns, as an unsigned number of 32 bits."""
    size, mask = len(key), _UINT32_MAX
    value = _SEED ^ size & mask
    whole = size - size % 4
    for word in np.frombuffer(key, "<u4", whole // 4).tolist():
        word = word * _FACTOR & mask  # noqa: PLW2901 - the algorithm's own variable
        word = (word ^ word >> 24) * _FACTOR & mask  # noqa: PLW2901
        value = value * _FACTOR & mask ^ word
    if whole < size:
        value = (value ^ int.from_bytes(key[whole:], "little")) * _FACTOR & mask
    value = (value ^ value >> 13) * _FACTOR & mask
    return value ^ value >> 15


@accelerated()
def murmur2_each(data: bytes | memoryview, offsets: array[int] | npt.NDArray[np.int32]) -> bytes:
    """Return `murmur2` of each piece of `data` between consecutive `offsets` (32 bits, ascending), in 32 bits each."""
    return array("I", (murmur2(piece) for piece in _pieces(data, offsets))).tobytes()


@accelerated()
def crc32_each(data: bytes | memoryview, offsets: array[int] | npt.NDArray[np.int32]) -> bytes:
    """Return `crc32` of each piece, see `murmur2_each`."""
    return array("I", map(crc32, _pieces(data, offsets))).tobytes()


def _pieces(data: bytes | memoryview, offsets: array[int] | npt.NDArray[np.int32]) -> list[bytes]:
    bounds = np.asarray(offsets).tolist()
    if bounds and not 0 <= bounds[0] <= bounds[-1] <= len(data):
        raise ValueError("offsets beyond the data")
    return [bytes(data[start:end]) for start, end in pairwise(bounds)]
