"""The ordered consumer: records of streams in one total order, which is the same for all such consumers.

It reads epochs (`reader.Epochs`) and delivers the rows of each, sorted. Only whole epochs count as delivered, so that a
consumer that goes on from there gets the same epochs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from itertools import islice
from typing import Self, TypeAlias

import pyarrow as pa

from kera.client.consuming.delivering.data_frames import ReadsTables, Rows
from kera.client.consuming.delivering.decoding import DecodedRecords, Decoding, MakeDecoding
from kera.client.consuming.delivering.one_by_one import OneByOne
from kera.client.epochs.epoch import require_times
from kera.client.epochs.reader import Epochs
from kera.client.epochs.sorting import OrderedBatch, OrderedRows
from kera.client.tasks import Turns
from kera.client.types import Record, StreamDescription
from kera.core.base.ids import EntryId, Position
from kera.core.errors import ClosedError, InvalidArgument

BATCH_ROWS_MAX = 65_536
RECORDS_AT_ONCE = 2_048
"""Number of records that are made at once: a whole epoch may have millions."""

_Taken: TypeAlias = tuple[OrderedRows, Mapping[EntryId, Position]]
"""The rows of an epoch, and the positions behind it."""


class OrderedConsumer(DecodedRecords, ReadsTables):
    """Reads streams in the order of time. Made by `Client.ordered_consumer`; use it as an async context manager.

    ``async for record in consumer`` gives records as Python values; ``async for batch in consumer.batches()`` gives the
    same as Arrow batches. The order is by time, stream (in the given order), streamlet, entry and ordinal, within each
    epoch; a late record (docs/epochs.md) comes first in the epoch that it belongs to.

    An epoch is delivered with its last record: `positions` and `commit` only count whole epochs.
    """

    def __init__(
        self,
        epochs: Epochs,
        *,
        is_bounded: bool,
        decoding: Decoding | None = None,
        make_decoding: MakeDecoding | None = None,
    ) -> None:
        """`epochs`: a reader for this consumer alone, `copied`. `is_bounded`: it has an end. `make_decoding`: see
        `to_pandas`.
        """
        self._epochs = epochs
        self._is_bounded = is_bounded
        self._decoding = decoding
        self._make_decoding = make_decoding
        self._opening = asyncio.Lock()
        """Lock for opening an epoch, or more of its records: one task at a time."""
        self._rows: OrderedRows | None = None
        """Rows of the epoch that is being delivered."""
        self._given = 0
        """Number of rows that were delivered as batches; records begin behind them."""
        self._opened = 0
        """Number of rows that were delivered as batches, or made as records."""
        self._at_hand: Iterator[Record] = iter(())
        self._last: Record | None = None
        """The last record of the epoch; its delivery completes the epoch."""
        self._turns = Turns()
        self._records = OneByOne(self._next_record)
        self._delivered: Mapping[EntryId, Position] = {}
        self._behind: Mapping[EntryId, Position] = {}
        """Positions behind the epoch that is being delivered."""
        self._given_back: deque[_Taken] = deque()
        """Epochs that come again, because a table with their rows failed."""
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Look up the streams, and decide where to start.

        Raises the errors of `Epochs.start`, and `InvalidArgument` for a stream without a timestamp column.
        """
        if self._closed:
            raise ClosedError("the consumer is closed")
        await self._epochs.start()
        if not self._delivered:
            for stream in self._epochs.streams().values():
                require_times(stream)
                if self._decoding is not None:
                    self._decoding.check(stream)
            self._delivered = self._epochs.cursors()

    @property
    def epoch_ms(self) -> int:
        """Length of an epoch; 0: the consumer has not started."""
        return self._epochs.epoch_ms

    @property
    def throttled_ms(self) -> int:
        """Total time that brokers have held answers back because a quota was used up (docs/quotas.md)."""
        return self._epochs.throttled_ms

    @property
    def late_records(self) -> int:
        """Number of late records (docs/epochs.md) in all epochs up to the present one."""
        return self._epochs.late_records

    def held_up_by(self) -> list[EntryId]:
        """Return the entries that keep the next epoch from closing, as far as known."""
        return self._epochs.held_up_by()

    def positions(self, stream: str | None = None) -> dict[int, list[Position]]:
        """Return where the first incompletely delivered epoch begins, per streamlet and entry."""
        return self._epochs.positions_of(self._delivered, stream)

    async def commit(self) -> None:
        """Commit that the completely delivered epochs have been processed.

        A consumer with ``start="committed"`` and the same ``consumer_group`` begins with the following epoch. Raises
        the errors of `Consumer.commit`.
        """
        await self._epochs.commit_up_to(self._delivered)

    async def batches(self) -> AsyncIterator[OrderedBatch]:
        """Yield the rows as Arrow batches of up to 65,536 rows and of one epoch (`OrderedBatch.ends_epoch`).

        A batch also ends before rows of streams with other columns. After a loop over records that was left within an
        epoch, batches begin again with the first record of that epoch.

        Raises the errors of `Epochs`.
        """
        if self._decoding is not None:
            self._decoding.forget()
        while (batch := await self._next_batch()) is not None:
            yield batch

    async def _next_batch(self) -> OrderedBatch | None:
        async with self._opening:
            rows = await self._open_rows()
            return None if rows is None else self._next_batch_of(rows)

    def _next_batch_of(self, rows: OrderedRows) -> OrderedBatch:
        self._drop_records()
        batch = rows.batch(self._given, BATCH_ROWS_MAX)
        self._given = self._opened = self._given + batch.batch.num_rows
        if batch.ends_epoch:
            self._deliver()
        return batch

    def _drop_records(self) -> None:
        self._at_hand, self._last = iter(()), None
        self._records.take(self._at_hand)

    async def _open_rows(self) -> OrderedRows | None:
        """Return the rows of the present or next epoch; None: there is none before the end."""
        await self.start()
        await self._turns.give()
        while self._rows is None:
            if self._given_back:
                self._rows, self._behind = self._given_back.popleft()
                self._given = self._opened = 0
                break
            epoch = await anext(self._epochs, None)
            if epoch is None:
                return None
            self._behind = self._epochs.cursors()
            rows = OrderedRows(epoch)
            self._given = self._opened = 0
            if rows:
                self._rows = rows
            else:  # its chunks are unreadable, and were skipped
                self._deliver()
        return self._rows

    def _deliver(self) -> None:
        self._rows = None
        self._delivered = self._behind

    @asynccontextmanager
    async def _all_left(self) -> AsyncIterator[AsyncIterator[Rows]]:
        if not self._is_bounded:
            raise InvalidArgument("a table needs a consumer with an end: end='latest', or the number of an epoch")
        await self.start()
        first, *others = self._epochs.streams().values()
        if any(stream.schema != first.schema for stream in others):
            raise InvalidArgument("the streams have different columns: their rows cannot be put into one table")
        before, taken = self._delivered, list[_Taken]()
        given = 0 if self._rows is None else self._given
        try:
            async with aclosing(self._rows_left(first, taken)) as left:
                yield left
        except BaseException:  # nothing was delivered
            self._delivered = before
            if taken and not self._closed:
                self._drop_records()
                (self._rows, self._behind), *others_taken = taken
                self._given = self._opened = given
                self._given_back.extendleft(reversed(others_taken))
            raise

    async def _rows_left(self, stream: StreamDescription, taken: list[_Taken]) -> AsyncGenerator[Rows, None]:
        """Yield all rows up to the end, and add their epochs to `taken`."""
        yield Rows(pa.RecordBatch.from_pylist([], stream.schema), iter(()), stream)
        while True:
            async with self._opening:
                rows = await self._open_rows()
                if rows is None:
                    return
                if not taken or taken[-1][0] is not rows:
                    taken.append((rows, self._behind))
                batch = self._next_batch_of(rows)
            yield Rows(batch.batch, batch.records(), batch.stream)

    def _each_record(self) -> AsyncIterator[Record]:
        return self._records

    async def _next_records(self, records_max: int | None) -> list[Record]:
        first = await anext(self._records, None)
        rest_max = None if records_max is None else records_max - 1
        return [] if first is None else [first, *islice(self._at_hand, rest_max)]

    def _has_at_hand(self) -> bool:
        return self._rows is not None

    async def _next_record(self) -> Record:
        """Return a record when none is at hand: the last of an epoch, which delivers it, or the next one to be made."""
        async with self._opening:  # a task that has waited goes on with the records that another task has opened
            while True:
                for record in self._at_hand:
                    return record
                if self._last is not None:
                    record, self._last = self._last, None
                    self._deliver()
                    return record
                rows = await self._open_rows()
                if rows is None:
                    raise StopAsyncIteration
                await self._open_records(rows)

    async def _open_records(self, rows: OrderedRows) -> None:
        batch = rows.batch(self._opened, RECORDS_AT_ONCE)
        if self._decoding is not None:
            await self._decoding.learn(batch.batch, batch.stream)
        records = list(batch.records())
        if batch.ends_epoch:
            self._last = records.pop()
        self._opened += batch.batch.num_rows
        self._at_hand = iter(records)
        self._records.take(self._at_hand)

    async def close(self) -> None:
        """Stop fetching. Delivered batches stay valid."""
        self._closed = True
        self._rows = None
        self._given_back.clear()
        self._drop_records()
        await self._epochs.close()
