"""Epochs without asyncio: iterate over them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from kera.client.epochs.epoch import Epoch
from kera.client.epochs.ordered_consumer import OrderedConsumer as AsyncOrderedConsumer
from kera.client.epochs.reader import Epochs as AsyncEpochs
from kera.client.epochs.sorting import OrderedBatch
from kera.client.serializers.choosing import DeserializerLike
from kera.client.sync.consumer import RecordsOf
from kera.client.sync.loop_thread import LoopThread
from kera.core.base.ids import EntryId, Position
from kera.core.errors import WokenUp

if TYPE_CHECKING:
    import pandas
    import polars


class Epochs(Iterator[Epoch]):
    """The epochs of some streams. Made by `Client.epochs`; see `kera.client.Epochs`."""

    def __init__(self, thread: LoopThread, epochs: AsyncEpochs) -> None:
        self._thread = thread
        self._epochs = epochs

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Look up the streams, and find the start. Raises `UnknownStream` and `InvalidArgument`."""
        self._thread.run(self._epochs.start())

    def __next__(self) -> Epoch:
        """Return the next closed epoch with records. Raises the errors of the asynchronous method."""
        epoch = self._thread.run(self._next())
        if epoch is None:
            raise StopIteration
        return epoch

    async def _next(self) -> Epoch | None:
        return await anext(self._epochs, None)

    @property
    def epoch_ms(self) -> int:
        """Length of an epoch; 0: reading has not started."""
        return self._epochs.epoch_ms

    @property
    def epochs_read(self) -> int:
        """Number of returned epochs."""
        return self._epochs.epochs_read

    @property
    def records_read(self) -> int:
        """Number of records in the returned epochs."""
        return self._epochs.records_read

    @property
    def late_records(self) -> int:
        """Number of late records among them; see `Epoch.late_records`."""
        return self._epochs.late_records

    def held_up_by(self) -> list[EntryId]:
        """Return the entries that still keep the next epoch from being closed, as far as is known."""
        return self._thread.run(self._held_up_by())

    async def _held_up_by(self) -> list[EntryId]:
        return self._epochs.held_up_by()

    def positions(self, stream: str | None = None) -> dict[int, list[Position]]:
        """Return the start of the first epoch that was not returned yet, per streamlet and entry."""
        return self._thread.run(self._positions(stream))

    async def _positions(self, stream: str | None) -> dict[int, list[Position]]:
        return self._epochs.positions(stream)

    @property
    def throttled_ms(self) -> int:
        """Total time for which brokers have delayed responses because a quota was used up."""
        return self._epochs.throttled_ms

    def commit(self) -> None:
        """Commit all returned epochs as processed. Raises the errors of the asynchronous method."""
        self._thread.run(self._epochs.commit())

    def close(self) -> None:
        """Stop fetching. Returned epochs stay valid."""
        self._thread.end(self._epochs.close())


class OrderedConsumer(RecordsOf[AsyncOrderedConsumer]):
    """Reads streams in the order of time. Made by `Client.ordered_consumer`; see `kera.client.OrderedConsumer`."""

    def __init__(self, thread: LoopThread, consumer: AsyncOrderedConsumer) -> None:
        super().__init__(thread, consumer)
        self._batch: OrderedBatch | None = None
        """A fetched batch that the next loop gets after an interruption."""

    def batches(self) -> Iterator[OrderedBatch]:
        """Yield the rows as Arrow batches; see `kera.client.OrderedConsumer.batches`."""
        self._at_hand = iter(())  # their epoch is delivered whole, as its last record was not returned
        coming = self._consumer.batches()
        try:
            while self._batch is not None or self._thread.run(self._fetch_batch(coming)):
                batch, self._batch = self._batch, None
                if batch is not None:
                    yield batch
        except WokenUp:
            return

    async def _fetch_batch(self, coming: AsyncIterator[OrderedBatch]) -> bool:
        self._batch = await self._wakeups.wait(partial(anext, coming, None))
        return self._batch is not None

    def to_arrow(self) -> pa.Table:
        """Return all remaining records up to `end`, as a table with the streams' columns."""
        self._at_hand = iter(())
        return self._thread.run(self._consumer.to_arrow())

    def to_pandas(
        self, *, deserializer: DeserializerLike = None, key_deserializer: DeserializerLike = None
    ) -> pandas.DataFrame:
        """Like `to_arrow`, as a pandas data frame; pandas must be installed. Deserializers work as with asyncio."""
        self._at_hand = iter(())
        return self._thread.run(self._consumer.to_pandas(deserializer=deserializer, key_deserializer=key_deserializer))

    def to_polars(
        self, *, deserializer: DeserializerLike = None, key_deserializer: DeserializerLike = None
    ) -> polars.DataFrame:
        """Like `to_arrow`, as a polars data frame; polars must be installed. Deserializers work as with asyncio."""
        self._at_hand = iter(())
        return self._thread.run(self._consumer.to_polars(deserializer=deserializer, key_deserializer=key_deserializer))

    @property
    def epoch_ms(self) -> int:
        """Length of an epoch; 0: reading has not started."""
        return self._consumer.epoch_ms

    @property
    def late_records(self) -> int:
        """Number of late records in all epochs up to the present one."""
        return self._consumer.late_records

    def held_up_by(self) -> list[EntryId]:
        """Return the entries that still keep the next epoch from being closed, as far as is known."""
        return self._thread.run(self._held_up_by())

    async def _held_up_by(self) -> list[EntryId]:
        return self._consumer.held_up_by()

    def positions(self, stream: str | None = None) -> dict[int, list[Position]]:
        """Return the start of the first epoch that was not completely delivered, per streamlet and entry."""
        return self._thread.run(self._positions(stream))

    async def _positions(self, stream: str | None) -> dict[int, list[Position]]:
        return self._consumer.positions(stream)
