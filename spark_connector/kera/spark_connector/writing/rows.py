"""A multiset of rows, which counts how often each row occurs. Pure.

It is for the rare case that an earlier attempt has stored the rows in another order. Then rows are compared one by one,
and each stored row is remembered as a hash of 16 bytes (two different rows with the same hash are not expected in the
life of a cluster).
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
        """The number of rows."""

    def add(self, rows: pa.RecordBatch) -> None:
        """Add all of `rows`."""
        self._counts.update(self._digests(rows))
        self.total += rows.num_rows

    def take(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Remove those of `rows` that the multiset has. Return the others, in the same order."""
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
        """Return whether two batches have the same rows in the same order, without the ignored columns."""
        return bool(self._counted(ours).equals(self._counted(stored)))

    def _counted(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        ignored = [name for name in rows.schema.names if name in self._ignored]
        return rows.drop_columns(ignored) if ignored else rows

    def _digests(self, rows: pa.RecordBatch) -> list[bytes]:
        # Hashes Python's repr of the values: it differs for different values, and, unlike ==, is equal for NaN.
        columns = [column.to_pylist() for column in self._counted(rows).columns]
        if not columns:
            return [b""] * rows.num_rows
        return [blake2b(repr(row).encode(), digest_size=DIGEST_BYTES).digest() for row in zip(*columns, strict=True)]
