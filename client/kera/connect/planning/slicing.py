"""Rows in slices that fit into a chunk each."""

from __future__ import annotations

from itertools import pairwise

import pyarrow as pa


def ends_of_slices(rows: int, count: int) -> list[int]:
    """Where `count` slices of `rows` rows begin and end: `count` + 1 numbers, the first one is 0."""
    return [rows * number // count for number in range(count + 1)]


def slices(rows: pa.RecordBatch, count: int) -> list[pa.RecordBatch]:
    """`rows` in `count` slices of about as many rows; none has any if there are fewer rows than slices."""
    return [rows.slice(start, end - start) for start, end in pairwise(ends_of_slices(rows.num_rows, count))]


def slices_needed(rows: pa.RecordBatch, bytes_max: int) -> int:
    """Into how many slices `rows` are cut so that none of several rows has more than `bytes_max`."""
    count: int = max(1, min(rows.num_rows, -(-rows.nbytes // bytes_max)))
    while count < rows.num_rows and any(each.nbytes > bytes_max for each in slices(rows, count)):
        count = min(rows.num_rows, 2 * count)
    return count
