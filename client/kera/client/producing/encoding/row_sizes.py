"""Estimates of the bytes that rows take in payloads of format version 2, before these are made: hardly ever too low.

The estimates decide where a chunk ends. A payload that turns out larger than its room is divided again.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kera.core.format.chunk import HEADER_BYTES

OVERHEAD_BYTES = 64
"""Size of a payload of a few columns, without their values."""
LENGTH_BYTES = 2
"""Size of the length of a text or binary value."""


def lean_room(chunk_bytes: int) -> int:
    """Return the bytes left for rows in a chunk of this size."""
    return max(1, chunk_bytes - HEADER_BYTES - OVERHEAD_BYTES)


def lean_bytes_of(batch: pa.RecordBatch) -> int:
    """Return the estimated bytes of all rows of a batch."""
    rows, size = batch.num_rows, 0
    for column in batch.columns:
        offsets = _offsets(column)
        if offsets is not None:
            size += int(offsets[rows]) - int(offsets[0]) + LENGTH_BYTES * rows
        elif not _is_one_value(column):
            size += column.nbytes
    return size


class RowSizes:
    """The sizes of a batch's rows, and of runs of rows."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        rows, each = batch.num_rows, 0.0
        up_to = np.zeros(rows + 1)
        for column in batch.columns:
            offsets = _offsets(column)
            if offsets is not None:
                up_to += offsets
                each += LENGTH_BYTES
            elif not _is_one_value(column):
                each += column.nbytes / rows
        self._up_to = up_to - up_to[0] + each * np.arange(rows + 1)
        """The bytes of the rows before each row, and of all rows."""
        self._same = rows > 0 and bool((np.diff(up_to) == (up_to[-1] - up_to[0]) / rows).all())
        """Whether all rows are of one size."""
        self._list: list[float] | None = None

    def largest(self, ends: npt.NDArray[np.int64]) -> float:
        """Return the bytes of the largest of the consecutive parts that end at `ends`."""
        return float(np.max(np.diff(self._up_to[ends], prepend=self._up_to[0]), initial=0.0))

    def ends(self, start: int, end: int, room: int) -> npt.NDArray[np.int64]:
        """Return where to cut the rows from `start` to `end`, so that each part fits into `room` or is one row.

        The last cut is `end`.
        """
        if self._same:
            return cut_evenly(start, end, int(room / self._up_to[1]) if self._up_to[1] else end - start)
        if self._list is None:
            self._list = self._up_to.tolist()
        up_to, found = self._list, []
        while start < end:
            start = max(start + 1, bisect_right(up_to, up_to[start] + room, start, end + 1) - 1)
            found.append(start)
        return np.array(found or [end], np.int64)


def cut_evenly(start: int, end: int, rows_max: int) -> npt.NDArray[np.int64]:
    """Return where to cut rows into parts of `rows_max` (at least one); the last cut is `end`."""
    cuts = np.arange(start, end, max(1, rows_max), dtype=np.int64)
    return np.append(cuts[1:], end)


def _offsets(column: pa.Array) -> npt.NDArray[np.int32] | None:
    """Return the offsets at which the values of a text or binary column begin and the last one ends; else None."""
    kind, rows = column.type, len(column)
    if not rows or column.null_count == rows or not (pa.types.is_string(kind) or pa.types.is_binary(kind)):
        return None
    return np.frombuffer(column.buffers()[1], np.int32, rows + 1, 4 * column.offset)


def _is_one_value(column: pa.Array) -> bool:
    """Return whether all rows have the same content (null, or one time), so that the column takes no space."""
    rows = len(column)
    if column.null_count == rows:
        return True
    if column.null_count or not pa.types.is_timestamp(column.type):
        return False
    numbers = np.frombuffer(column.buffers()[1], np.int64, rows, 8 * column.offset)
    return bool((numbers == numbers[0]).all())
