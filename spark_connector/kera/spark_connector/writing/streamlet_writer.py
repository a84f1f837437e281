"""Compare-and-append: stores the rows of one task for one streamlet exactly once, however often the task runs.

Spark runs a task again if it fails, if its executor is lost, and, with speculation, if it is slow; after a restart it
runs all tasks of a micro-batch again. An attempt that Spark has given up may still be alive. Spark promises only that
the rows of a partition are the same multiset each time (in a deterministic query): after a shuffle their order differs.
So numbering the rows does not help, nor does knowing that a chunk was sent before.

All attempts write under one name (producer id and epoch, see ``writers``), and the broker accepts chunk k of this name
only if exactly the chunks 0 … k-1 are stored. The algorithm of an attempt:

    k = 0
    while rows are left:
        append some of them as chunk k
        if there is a chunk k already:
            read it
            remove its rows from those that are left, also from those that are yet to come
        k = k + 1

Why this is exact: an attempt that appends chunk k has seen the chunks 0 … k-1, its own or others', and has removed
their rows from the multiset of all rows of the partition, which is the same for all attempts. So chunk k has only rows
that are missing in the chunks before it, and all stored chunks together never have a row more often than the partition.
An attempt ends when each of its rows is in a chunk that it has seen: then the chunks have all rows. No attempt has to
be fenced off for that, and any number of them may run side by side, end at any point and return.

A lost answer needs no special code: the chunk is sent again (``kera.client.producing.appender``), the broker already
has it, and the attempt reads it and recognizes its own rows. If the rows arrive in the same order as the first time,
chunks are equal or at least begin with the same rows, which a comparison of whole batches shows.

If a query is not deterministic (it uses a random number, or the time of day), earlier attempts may have stored rows
that this one does not have. Then all rows of this attempt are stored, but there are others, too: rows are stored at
least once, not exactly once. `surplus` has their number.

Memory: the caller of `add` bounds the waiting rows; for stored rows that Spark has yet to deliver, a hash each is kept
(``rows``), for at most `SURPLUS_MAX` rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

import pyarrow as pa

from kera.core.errors import KeraError
from kera.spark_connector.writing.rows import RowCounts

SURPLUS_MAX = 1 << 24
"""Maximum number of rows from earlier attempts that Spark has yet to deliver; each takes some 150 bytes of memory."""


class TooManyRows(KeraError):
    """A task found more rows of earlier attempts than it can remember."""


class Log(Protocol):
    """The chunks of one name in one streamlet."""

    async def append(self, rows: pa.RecordBatch, sequence: int) -> tuple[int, bool]:
        """Append the first rows of `rows` as chunk `sequence`.

        Return how many rows the chunk has, and whether a chunk of that sequence was stored already. That one may be the
        same chunk, after a lost answer, or any other.
        """
        ...

    async def stored(self, sequence: int) -> pa.RecordBatch | None:
        """Return the rows of a stored chunk; None: it was removed since."""
        ...


class StreamletWriter:
    """Stores the rows of one attempt for one streamlet: `add` takes rows, and `drain` runs until all are stored."""

    def __init__(
        self,
        log: Log,
        *,
        ignored: Collection[str] = (),
        surplus_max: int = SURPLUS_MAX,
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        """`ignored`: columns that do not count in comparisons because they differ between attempts.

        `progressed` is called when fewer rows wait.
        """
        self._log = log
        self._queue: deque[pa.RecordBatch] = deque()
        self._surplus = RowCounts(ignored)
        self._surplus_max = surplus_max
        self._progressed = progressed
        self.sequence = 0
        """Sequence of the next chunk."""
        self.appended = 0
        """Rows that this attempt has stored."""
        self.found = 0
        """Rows that earlier attempts had stored."""

    @property
    def waits(self) -> bool:
        """Whether there are rows that may not be stored yet."""
        return bool(self._queue)

    @property
    def queued_bytes(self) -> int:
        """Size of the waiting rows."""
        return sum(rows.nbytes for rows in self._queue)

    @property
    def surplus(self) -> int:
        """Number of stored rows that this attempt has not received (yet)."""
        return self._surplus.total

    def add(self, rows: pa.RecordBatch) -> None:
        """Queue rows to be stored, without those that are stored already."""
        left = self._surplus.take(rows)
        self.found += rows.num_rows - left.num_rows
        if left.num_rows:
            self._queue.append(left)

    async def drain(self) -> None:
        """Store all waiting rows. One call at a time; rows may be added meanwhile."""
        while self._queue:
            count, duplicate = await self._log.append(self._queue[0], self.sequence)
            if not duplicate:
                self._drop(count)
                self.appended += count
            elif (stored := await self._log.stored(self.sequence)) is not None:
                self._remove(stored)
            else:
                # Retention has removed the chunk, so its rows are unknown. Assume that they were these rows.
                self._drop(count)
                self.found += count
            self.sequence += 1
            self._progressed()

    def _drop(self, count: int) -> None:
        """Remove the first `count` rows of the first batch, which are stored."""
        rows = self._queue.popleft()
        if count < rows.num_rows:
            self._queue.appendleft(rows.slice(count))

    def _remove(self, stored: pa.RecordBatch) -> None:
        """Remove stored rows from the waiting rows, and from those that are yet to come.

        Raises `TooManyRows` if more than `surplus_max` rows are yet to come.
        """
        first = self._queue[0].slice(0, stored.num_rows)
        if self._surplus.equal(first, stored):  # the usual case: the rows arrived in the same order as the first time
            self._drop(stored.num_rows)
            self.found += stored.num_rows
            return
        self._surplus.add(stored)
        waiting, self._queue = self._queue, deque()
        for rows in waiting:
            self.add(rows)
        if self._surplus.total > self._surplus_max:
            raise TooManyRows(
                f"earlier attempts of this task have stored {self._surplus.total} rows in another order, more than can"
                f" be compared ({self._surplus_max}); use more, smaller partitions",
                rows=self._surplus.total,
                limit=self._surplus_max,
            )
