"""Cuts rows into slices, each of which fits into a chunk."""

from __future__ import annotations

from itertools import pairwise

import pyarrow as pa


def ends_of_slices(rows: int, count: int) -> list[int]:
    """Return where `count` slices of `rows` rows begin and end: `count` + 1 numbers, of which the first is 0."""
    return [rows * number // count for number in range(count + 1)]


def slices(rows: pa.RecordBatch, count: int) -> list[pa.RecordBatch]:
    """Cut `rows` into `count` slices of about equal numbers of rows; some are empty if there are fewer rows."""
    return [rows.slice(start, end - start) for start, end in pairwise(ends_of_slices(rows.num_rows, count))]


def slices_needed(rows: pa.RecordBatch, bytes_max: int) -> int:
    """Return the number of slices in which only a slice of a single row may be larger than `bytes_max`."""
    count: int = max(1, min(rows.num_rows, -(-rows.nbytes // bytes_max)))
    while count < rows.num_rows and any(each.nbytes > bytes_max for each in slices(rows, count)):
        count = min(rows.num_rows, 2 * count)
    return count
