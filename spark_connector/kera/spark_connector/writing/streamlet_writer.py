"""Compare-and-append: the rows of one task for one streamlet, stored exactly once however often the task is run.

Spark runs a task again when it fails, when its executor is lost, and, with speculation, when it is slow; it runs all
tasks of a micro-batch again after a restart. An attempt that was given up may still be alive. Of the rows of a
partition Spark promises only that they are the same multiset each time (of a deterministic query): after a shuffle they
come in another order. So it is no use to give the rows numbers, and none to know that a chunk was sent before.

All attempts write under one name (producer id and epoch, see ``writers``), and the broker takes chunk k of this name
only when exactly the chunks 0 … k-1 are stored. An attempt goes like this:

    k = 0
    while rows are left:
        append some of them as chunk k
        if there is a chunk k already:
            read it
            remove its rows from those that are left, also from those that are yet to come
        k = k + 1

Why this is exact. Whoever appends chunk k has seen the chunks 0 … k-1, his own or others', and has removed their rows
from the multiset of all rows of the partition, which is the same for all attempts. So chunk k is a part of what is
missing in the chunks before it: all stored chunks together never have a row more often than the partition has. And an
attempt ends when no row is left that is not in a chunk which it has seen: then they have all rows. Nobody has to be
shut out for that, and any number of attempts may run side by side, end anywhere and come back.

A lost answer needs no code of its own: the chunk is sent again (``kera.client.producing.appender``), found to be
there, read, and found to be ours. When the rows come in the same order as the first time, chunks are the same or at
least begin with the same rows, which is seen without looking at rows one by one.

If a query is not deterministic (a random number, the time of day), rows of an earlier attempt may stay that this one
does not have. Then no row of this attempt is missing, but there are more than those: at least once, not exactly once.
`surplus` says how many.

Memory: the rows that wait here are bounded by whoever adds them; of stored rows that have yet to come, a hash each is
kept (``rows``), for at most `SURPLUS_MAX` rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

import pyarrow as pa

from kera.core.errors import KeraError
from kera.spark_connector.writing.rows import RowCounts

SURPLUS_MAX = 1 << 24
"""Rows stored by earlier attempts that have yet to come from Spark; each takes some 150 bytes of memory."""


class TooManyRows(KeraError):
    """A task found more rows of an earlier attempt than it can keep in mind."""


class Log(Protocol):
    """The chunks of one name in one streamlet."""

    async def append(self, rows: pa.RecordBatch, sequence: int) -> tuple[int, bool]:
        """Append the first of `rows` as chunk `sequence`: gives how many, and whether there was such a chunk already.

        If so, it may be this one, after an answer that was lost, or any other.
        """
        ...

    async def stored(self, sequence: int) -> pa.RecordBatch | None:
        """The rows of a chunk that is there; None when it has been removed since."""
        ...


class StreamletWriter:
    """The rows of one attempt for one streamlet: `add` them, and have `drain` run until all are stored."""

    def __init__(
        self,
        log: Log,
        *,
        ignored: Collection[str] = (),
        surplus_max: int = SURPLUS_MAX,
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        """`ignored`: columns that are not part of a row, as they differ between attempts; `progressed` is called when
        fewer rows wait.
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
        """Rows that were stored already."""

    @property
    def waits(self) -> bool:
        """Whether there are rows that are not known to be stored."""
        return bool(self._queue)

    @property
    def queued_bytes(self) -> int:
        """Size of the waiting rows."""
        return sum(rows.nbytes for rows in self._queue)

    @property
    def surplus(self) -> int:
        """Rows that were found, and that this attempt has not had (yet)."""
        return self._surplus.total

    def add(self, rows: pa.RecordBatch) -> None:
        """These rows are to be stored, too."""
        left = self._surplus.take(rows)
        self.found += rows.num_rows - left.num_rows
        if left.num_rows:
            self._queue.append(left)

    async def drain(self) -> None:
        """Store all rows that wait. One call at a time; rows may be added meanwhile."""
        while self._queue:
            count, duplicate = await self._log.append(self._queue[0], self.sequence)
            if not duplicate:
                self._drop(count)
                self.appended += count
            elif (stored := await self._log.stored(self.sequence)) is not None:
                self._remove(stored)
            else:
                # Retention has taken the chunk. What was in it is not known any more: taken for these rows.
                self._drop(count)
                self.found += count
            self.sequence += 1
            self._progressed()

    def _drop(self, count: int) -> None:
        """The first `count` rows of the first batch are stored."""
        rows = self._queue.popleft()
        if count < rows.num_rows:
            self._queue.appendleft(rows.slice(count))

    def _remove(self, stored: pa.RecordBatch) -> None:
        """Remove rows that are stored from those that wait or are to come."""
        first = self._queue[0].slice(0, stored.num_rows)
        if self._surplus.equal(first, stored):  # the usual case: rows came in the same order as the first time
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
