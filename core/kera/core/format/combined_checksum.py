"""The checksum of consecutive chunks, computed from the checksums in their headers.

CRC-32C is linear: data with checksum a, followed by bytes with checksum b, has the checksum a·x^(8·bytes) + b, modulo
the polynomial. So the checksum of a segment can be computed without its payloads, which have long left the processor's
caches.

Promises:

* It is the checksum of the bytes, as long as these match the checksums of their producers and of the broker.
* It covers the data as they were when they arrived and were checked, and not what has become of them in memory: if a
  bit of a chunk has flipped since, in header or payload, the bytes do not match it, and their reader checks each chunk.

A placed header whose own checksums are right contributes the same, whatever its content: any bytes followed by their
own CRC have the same CRC, and a header consists of two such pieces. So only the payload's checksum is read from it.
"""

from __future__ import annotations

import struct
from array import array
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kera.core.format.checksum import crc32c
from kera.core.format.chunk import HEADER_BYTES, PAYLOAD_CRC_AT, PLACEMENT_AT
from kera.core.native import accelerated

_POLYNOMIAL = np.uint32(0x82F63B78)
_ONE = 0x80000000
"""Bits are reflected: the highest is the coefficient of 1."""
_BYTE = 0x00800000
"""x to the eighth: the factor by which a byte that follows changes a checksum."""
_DIGITS = 256
"""Size of a table of powers: they are looked up by the bytes of their exponent."""

_Numbers = NDArray[np.uint32]


@accelerated()
def combined_checksum(view: Any, start: int, ends: array[int], checksum: int) -> int:
    """Extend `checksum` over consecutive placed chunks: the first begins at `start`, and each ends at one of `ends`.

    `ends` must ascend and lie within `view`, whose items are bytes. Raises ``ValueError`` if they do not.
    """
    after = np.array(ends, np.int64)
    if not len(after):
        return checksum
    before = np.concatenate([[start], after[:-1]])
    if start < 0 or (after - before).min() < HEADER_BYTES or after[-1] > len(view):
        raise ValueError(f"no chunks end there: from {start} on in {len(view)} bytes")
    found = [struct.unpack_from("<I", view, at + PAYLOAD_CRC_AT)[0] for at in before.tolist()]
    headers = _product(np.full(len(after), _header_checksum(), np.uint32), _powers(after - before - HEADER_BYTES))
    parts = _product(headers ^ np.array(found, np.uint32), _powers(after[-1] - after))
    first = _product(np.array([checksum], np.uint32), _powers(after[-1:] - start))
    return int(np.bitwise_xor.reduce(parts) ^ first[0])


def _product(a: _Numbers, b: _Numbers) -> _Numbers:
    """Multiply polynomials pair by pair, modulo the polynomial of the checksum."""
    total = np.zeros_like(b)
    for bit in range(31, -1, -1):
        total ^= (a >> np.uint32(bit) & np.uint32(1)) * b
        b = b >> np.uint32(1) ^ _POLYNOMIAL * (b & np.uint32(1))
    return total


def _powers(exponents: NDArray[np.int64]) -> _Numbers:
    """Return, for each number of bytes in `exponents`, the factor by which they change a checksum before them."""
    found = np.full(len(exponents), _ONE, np.uint32)
    for place, table in enumerate(_tables()):
        digits = exponents >> 8 * place & (_DIGITS - 1)
        if digits.any():
            found = _product(found, table[digits])
    return found


@cache
def _tables() -> list[_Numbers]:
    """Return, for each of an exponent's four bytes, the powers for all values of this byte, the others being 0."""
    tables, base = [], np.array([_BYTE], np.uint32)
    for _ in range(4):
        table = np.array([_ONE], np.uint32)
        while len(table) < _DIGITS:
            table = np.concatenate([table, _product(table, base.repeat(len(table)))])
            base = _product(base, base)
        tables.append(table)
    return tables


@cache
def _header_checksum() -> int:
    """Return the checksum of a placed header whose own checksums are right; it is the same for all of them."""
    with_own = np.array([crc32c(bytes(4))], np.uint32)  # of no bytes, followed by their checksum
    return int((_product(with_own, _powers(np.array([HEADER_BYTES - PLACEMENT_AT]))) ^ with_own)[0])
