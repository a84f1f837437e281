"""Records that are numbers: what a record's value says of it, and how millions of them are kept in a few bytes each.

A record is known by its producer and by which of that producer's records it is; both are in its value, as text of a
fixed width that people can read too. So a column of values becomes an array of numbers without a loop.
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
"""Maximum of records of a producer, or of an entry."""
UNSEEN = -1
STRANGE = -2
"""Stands for a value that is none of ours."""
TOKEN_BYTES = 8
_PRODUCER_DIGITS, _RECORD_DIGITS = 5, 13
VALUE_BYTES = TOKEN_BYTES + 1 + _PRODUCER_DIGITS + 1 + _RECORD_DIGITS
"""The shortest value there is."""
_SLASHES = (TOKEN_BYTES, TOKEN_BYTES + 1 + _PRODUCER_DIGITS)
_PADDING = ord(".")


def packed(producer: int, number: int) -> int:
    """A record as one number."""
    return producer << 40 | number


def unpacked(value: int) -> tuple[int, int]:
    """Its producer, and which of that producer's records it is."""
    return value >> 40, value & (RECORDS_MAX - 1)


class Values:
    """The values of one check: made, and recognized."""

    def __init__(self, token: str, value_bytes: int) -> None:
        """`token`: what others' values do not begin with, `TOKEN_BYTES` long; values have `value_bytes`."""
        self._token = token
        self.value_bytes = value_bytes
        self._start = np.frombuffer(token.encode(), np.uint8)
        self._padding = "." * (value_bytes - VALUE_BYTES)

    def make(self, producer: int, number: int) -> bytes:
        """The value of a record."""
        return f"{self._token}/{producer:05}/{number:013}{self._padding}".encode()

    def recognize(self, column: pa.Array) -> Numbers:
        """A column of binary values as packed numbers, `STRANGE` for those that are none of ours."""
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
        """Whether a value that is none of ours is one of another check."""
        form = rf"[0-9a-f]{{{TOKEN_BYTES}}}/\d{{5}}/\d{{13}}\.*"
        return isinstance(value, bytes) and re.fullmatch(form.encode(), value) is not None


def _decimal(digits: npt.NDArray[np.uint8]) -> tuple[Numbers, npt.NDArray[np.bool_]]:
    """Numbers that are written in rows of digits, and which of the rows are such."""
    values = digits.astype(np.int64) - ord("0")
    powers = 10 ** np.arange(digits.shape[1] - 1, -1, -1, dtype=np.int64)
    return values @ powers, np.all((values >= 0) & (values <= 9), axis=1)


class Column:
    """An array that grows; what nobody has set yet is `fill`."""

    __slots__ = ("_array", "_fill", "size")

    def __init__(self, dtype: Any, fill: int) -> None:
        self._fill = fill
        self._array = np.full(1024, fill, dtype)
        self.size = 0

    def grow(self, size: int) -> None:
        """Have at least so many."""
        if size > len(self._array):
            larger = np.full(max(size, len(self._array) * 3 // 2), self._fill, self._array.dtype)
            larger[: self.size] = self._array[: self.size]
            self._array = larger
        self.size = max(self.size, size)

    @property
    def values(self) -> npt.NDArray[Any]:
        """All of them, in place."""
        return self._array[: self.size]

    @property
    def memory_bytes(self) -> int:
        """That it takes."""
        return self._array.nbytes
