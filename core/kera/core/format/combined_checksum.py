"""The checksum of chunks that follow each other, made of the checksums that are in their headers.

CRC-32C is linear: what has checksum a, with bytes behind it that have checksum b, has a·x^(8·bytes) + b, modulo the
polynomial. So the checksum of a segment needs no look at payloads, which are long out of the processor's caches.

Promises:

* It is that of the bytes, as long as these are what their producers' and the broker's checksums say.
* It is of what was checked when it came, and not of what has become of it in memory: where a bit of a chunk has flipped
  since, in header or payload, the bytes do not match it, and who reads them looks at each chunk.

A placed header whose own checksums are right adds the same whatever it says: bytes with their own CRC behind them all
have the same one, and a header is twice such bytes. So only the checksum of the payload is read of it.
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
"""x to the eighth: what a byte behind it does to a checksum."""
_DIGITS = 256
"""Powers are looked up by the bytes of their exponent."""

_Numbers = NDArray[np.uint32]


@accelerated()
def combined_checksum(view: Any, start: int, ends: array[int], checksum: int) -> int:
    """`checksum`, taken on over the placed chunks from `start` on, of which each ends where the next begins: at `ends`.

    `ends` ascend and are within `view`, whose items are bytes. Raises ``ValueError`` where they are not.
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
    """The products of polynomials modulo that of the checksum, pair by pair."""
    total = np.zeros_like(b)
    for bit in range(31, -1, -1):
        total ^= (a >> np.uint32(bit) & np.uint32(1)) * b
        b = b >> np.uint32(1) ^ _POLYNOMIAL * (b & np.uint32(1))
    return total


def _powers(exponents: NDArray[np.int64]) -> _Numbers:
    """The polynomials that stand for so many bytes each."""
    found = np.full(len(exponents), _ONE, np.uint32)
    for place, table in enumerate(_tables()):
        digits = exponents >> 8 * place & (_DIGITS - 1)
        if digits.any():
            found = _product(found, table[digits])
    return found


@cache
def _tables() -> list[_Numbers]:
    """The powers with an exponent of one byte that is not 0, for each place of four."""
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
    """The checksum that is the same for any placed header whose own checksums are right."""
    with_own = np.array([crc32c(bytes(4))], np.uint32)  # of nothing, and its checksum
    return int((_product(with_own, _powers(np.array([HEADER_BYTES - PLACEMENT_AT]))) ^ with_own)[0])
