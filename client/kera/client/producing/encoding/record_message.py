"""Records of the default schema as an Arrow IPC message, written without Arrow.

Arrow makes an array of each column, and copies them into the message; for a chunk of few records, that is most of the
cost. Only the buffers and a few numbers in a message depend on the records; the rest is a table (a flatbuffer) that the
schema determines. A test checks that the bytes are equal to those that Arrow writes.

    0     always the same
    40    length of the body
    72    number of records
    88    offset in the body and length of each of the 19 buffers
    400   length and number of nulls of each of the 8 arrays: timestamp, keys, keys.item, value, headers,
          headers.entries, headers.entries.key, headers.entries.value
    528   the body: the buffers, each padded to 8 bytes
"""

from __future__ import annotations

import functools
import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import pyarrow as pa

_FEW = 100
"""Up to this many items, Python makes a list faster than numpy makes an array."""
_OFFSET_MAX = (1 << 31) - 1
_TABLE = struct.Struct("<40sq24sq8s38q8s16q")
_START = bytes.fromhex("ffffffff0802000014000000000000000c0016000600050008000c000c0000000003040018000000")
_BATCH = bytes.fromhex("00000a0018000c00040008000a0000004c01000010000000")
_BUFFERS = struct.pack("<ii", 0, 19)
_ARRAYS = struct.pack("<ii", 0, 8)


def write_message(timestamps_us: Any, values: Sequence[bytes], keys: Sequence[Sequence[bytes]] | None) -> pa.Buffer:
    """Return the message of records without headers; `keys` is None if no record has any.

    `timestamps_us`: a buffer of numbers of 64 bits. Raises `TypeError` if a value or the keys of a record are None;
    `OverflowError` for 2 GiB of values or keys.
    """
    ends, value_bytes = _offsets(values)
    if keys is None:
        table, middle, padding, rest = _constants(len(values), value_bytes, None)
        return pa.py_buffer(b"".join((table, timestamps_us, middle, ends, padding, *values, rest)))
    items = list(chain.from_iterable(keys))
    (lists, _), (item_ends, key_bytes) = _offsets(keys), _offsets(items)
    table, *around, padding, rest = _constants(len(values), value_bytes, (len(items), key_bytes))
    varying: Any = ((lists,), (item_ends,), items, (ends,))
    between = [piece for constant, some in zip(around, varying, strict=True) for piece in (constant, *some)]
    return pa.py_buffer(b"".join((table, timestamps_us, *between, padding, *values, rest)))


@functools.lru_cache(maxsize=64)
def _constants(rows: int, value_bytes: int, keyed: tuple[int, int] | None) -> tuple[bytes, ...]:
    """Return the constant bytes before each buffer that depends on the records, and after the last: the table, buffers
    of zeros, padding.

    `keyed`: the number of keys in all records, and their bytes. The cache pays off because small chunks at a low rate
    often have the same number of rows and bytes.
    """
    nulls, no_lists = (rows + 7) // 8, 4 * rows + 4
    if keyed is None:
        key_arrays = (rows, rows, 0, 0)
        key_buffers = [(nulls, False), (no_lists, False), (0, False), (4, False), (0, False)]
    else:
        items, key_bytes = keyed
        key_arrays = (rows, 0, items, 0)
        key_buffers = [(0, False), (4 * rows + 4, True), (0, False), (4 * items + 4, True), (key_bytes, True)]
    header_buffers = [(size, False) for size in (nulls, no_lists, 0, 0, 4, 0, 0, 4, 0)]
    values = [(0, False), (4 * rows + 4, True), (value_bytes, True)]
    table: list[int] = []
    around, constant, at = [], b"", 0
    for size, varies in [(0, False), (8 * rows, True), *key_buffers, *values, *header_buffers]:
        table += (at, size)
        at += (size + 7) & -8
        if varies:
            around.append(constant)
            constant = bytes(-size % 8)
        else:
            constant += bytes((size + 7) & -8)
    around[0] = _TABLE.pack(
        _START, at, _BATCH, rows, _BUFFERS, *table, _ARRAYS, rows, 0, *key_arrays, rows, 0, rows, rows, 0, 0, 0, 0, 0, 0
    )
    return (*around, constant)


def _offsets(items: Sequence[Any]) -> tuple[bytes, int]:
    """Return the offsets at which items begin and the last one ends, as numbers of 32 bits; and the end of the last."""
    if len(items) <= _FEW:
        few = array("i", accumulate(map(len, items), initial=0))
        return few.tobytes(), few[-1]
    lengths = np.fromiter(map(len, items), np.int32, len(items))
    size = int(lengths.sum(dtype=np.int64))
    if size > _OFFSET_MAX:
        raise OverflowError(f"{size} bytes are more than offsets of 32 bits can tell")
    ends = np.zeros(len(items) + 1, np.int32)
    np.cumsum(lengths, out=ends[1:])
    return ends.tobytes(), size
