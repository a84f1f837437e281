"""Rows as a multiset: which of these rows are among those, each counted as often as it comes. Pure.

This is for the rare case: an attempt finds that an earlier one has stored rows in another order. Then each row is
looked at by itself, and remembered by 16 bytes of a hash of it (two different rows with one hash are not expected in
the life of a cluster).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from hashlib import blake2b

import numpy as np
import pyarrow as pa

DIGEST_BYTES = 16


class RowCounts:
    """A multiset of rows, all of one schema. Columns in `ignored` do not count."""

    def __init__(self, ignored: Collection[str] = ()) -> None:
        self._ignored = frozenset(ignored)
        self._counts: Counter[bytes] = Counter()
        self.total = 0
        """How many rows it has."""

    def add(self, rows: pa.RecordBatch) -> None:
        """Put in all of `rows`."""
        self._counts.update(self._digests(rows))
        self.total += rows.num_rows

    def take(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Take out those of `rows` that are in it; gives the others, in their order."""
        if not self.total or not rows.num_rows:
            return rows
        counts = self._counts
        others = []
        for at, digest in enumerate(self._digests(rows)):
            left = counts.get(digest)
            if not left:
                others.append(at)
            elif left == 1:
                del counts[digest]
            else:
                counts[digest] = left - 1
        self.total -= rows.num_rows - len(others)
        return rows if len(others) == rows.num_rows else rows.take(pa.array(np.array(others, np.int64)))

    def equal(self, ours: pa.RecordBatch, stored: pa.RecordBatch) -> bool:
        """Whether two batches are the same, row by row, as far as columns count."""
        return bool(self._counted(ours).equals(self._counted(stored)))

    def _counted(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        ignored = [name for name in rows.schema.names if name in self._ignored]
        return rows.drop_columns(ignored) if ignored else rows

    def _digests(self, rows: pa.RecordBatch) -> list[bytes]:
        # By what Python shows of the values: that tells apart what differs, and, unlike ==, has one text for NaN.
        columns = [column.to_pylist() for column in self._counted(rows).columns]
        if not columns:
            return [b""] * rows.num_rows
        return [blake2b(repr(row).encode(), digest_size=DIGEST_BYTES).digest() for row in zip(*columns, strict=True)]
