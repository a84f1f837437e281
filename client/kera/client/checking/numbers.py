"""Records as numbers: the contents of a record's value, and columns that keep millions of records in a few bytes each.

A record is identified by its producer and its number among that producer's records. Both are in its value, as readable
text of a fixed width. So a column of values becomes an array of numbers without a loop.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Numbers = npt.NDArray[np.int64]

PRODUCERS_MAX = 1 << 15
RECORDS_MAX = 1 << 40
"""Maximum number of records of a producer, or of an entry."""
UNSEEN = -1
STRANGE = -2
"""Stands for a value that is not of this check."""
TOKEN_BYTES = 8
_PRODUCER_DIGITS, _RECORD_DIGITS = 5, 13
VALUE_BYTES = TOKEN_BYTES + 1 + _PRODUCER_DIGITS + 1 + _RECORD_DIGITS
"""Minimum length of a value."""
_SLASHES = (TOKEN_BYTES, TOKEN_BYTES + 1 + _PRODUCER_DIGITS)
_PADDING = ord(".")


def packed(producer: int, number: int) -> int:
    """Return a record as one number."""
    return producer << 40 | number


def unpacked(value: int) -> tuple[int, int]:
    """Return the producer of a packed record, and its number among that producer's records."""
    return value >> 40, value & (RECORDS_MAX - 1)


class Values:
    """Makes and recognizes the values of one check."""

    def __init__(self, token: str, value_bytes: int) -> None:
        """`token`: unique start of this check's values, `TOKEN_BYTES` long; values have `value_bytes`."""
        self._token = token
        self.value_bytes = value_bytes
        self._start = np.frombuffer(token.encode(), np.uint8)
        self._padding = "." * (value_bytes - VALUE_BYTES)

    def make(self, producer: int, number: int) -> bytes:
        """Return the value of a record."""
        return f"{self._token}/{producer:05}/{number:013}{self._padding}".encode()

    def recognize(self, column: pa.Array) -> Numbers:
        """Convert a column of binary values to packed numbers, `STRANGE` for values that are not of this check."""
        if column.type != pa.binary():
            column = column.cast(pa.binary())
        _, offsets_buffer, data = column.buffers()
        offsets = np.frombuffer(offsets_buffer, np.int32)[column.offset : column.offset + len(column) + 1]
        found: Numbers = np.full(len(column), STRANGE, np.int64)
        at = np.flatnonzero(np.diff(offsets) == self.value_bytes)
        if not len(at):
            return found
        text = np.frombuffer(data, np.uint8)
        if len(at) == len(column):
            rows = text[offsets[0] : offsets[-1]].reshape(len(column), self.value_bytes)
        else:
            rows = text[offsets[at][:, np.newaxis] + np.arange(self.value_bytes)]
        first, second = _SLASHES
        producers, producers_are = _decimal(rows[:, first + 1 : second])
        numbers, numbers_are = _decimal(rows[:, second + 1 : VALUE_BYTES])
        ours = producers_are & numbers_are & (producers < PRODUCERS_MAX) & (numbers < RECORDS_MAX)
        ours &= (rows[:, :TOKEN_BYTES] == self._start).all(axis=1) & (rows[:, VALUE_BYTES:] == _PADDING).all(axis=1)
        ours &= (rows[:, [first, second]] == ord("/")).all(axis=1)
        found[at[ours]] = (producers << 40 | numbers)[ours]
        return found

    def is_of_another(self, value: object) -> bool:
        """Return whether a value that is not of this check is of another check."""
        form = rf"[0-9a-f]{{{TOKEN_BYTES}}}/\d{{5}}/\d{{13}}\.*"
        return isinstance(value, bytes) and re.fullmatch(form.encode(), value) is not None


def _decimal(digits: npt.NDArray[np.uint8]) -> tuple[Numbers, npt.NDArray[np.bool_]]:
    """Convert rows of digits to numbers; also return which rows have only digits."""
    values = digits.astype(np.int64) - ord("0")
    powers = 10 ** np.arange(digits.shape[1] - 1, -1, -1, dtype=np.int64)
    return values @ powers, np.all((values >= 0) & (values <= 9), axis=1)


class Column:
    """An array that grows; new items are `fill`."""

    __slots__ = ("_array", "_fill", "size")

    def __init__(self, dtype: Any, fill: int) -> None:
        self._fill = fill
        self._array = np.full(1024, fill, dtype)
        self.size = 0

    def grow(self, size: int) -> None:
        """Grow to at least `size` items."""
        if size > len(self._array):
            larger = np.full(max(size, len(self._array) * 3 // 2), self._fill, self._array.dtype)
            larger[: self.size] = self._array[: self.size]
            self._array = larger
        self.size = max(self.size, size)

    @property
    def values(self) -> npt.NDArray[Any]:
        """All items, as a view."""
        return self._array[: self.size]

    @property
    def memory_bytes(self) -> int:
        """Memory of the array."""
        return self._array.nbytes
