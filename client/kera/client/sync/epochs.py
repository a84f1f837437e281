"""Epochs for those who write no asyncio: iterate over them."""

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
        """Look up the streams, and decide where to start. Raises `UnknownStream`, and `InvalidArgument`."""
        self._thread.run(self._epochs.start())

    def __next__(self) -> Epoch:
        """The next epoch with records in it, when it is closed; raises what the asynchronous one does."""
        epoch = self._thread.run(self._next())
        if epoch is None:
            raise StopIteration
        return epoch

    async def _next(self) -> Epoch | None:
        return await anext(self._epochs, None)

    @property
    def epoch_ms(self) -> int:
        """How long an epoch is; 0: it has not started."""
        return self._epochs.epoch_ms

    @property
    def epochs_read(self) -> int:
        """That were given out."""
        return self._epochs.epochs_read

    @property
    def records_read(self) -> int:
        """Records that were read of these epochs."""
        return self._epochs.records_read

    @property
    def late_records(self) -> int:
        """Late ones among these records: see `Epoch.late_records`."""
        return self._epochs.late_records

    def held_up_by(self) -> list[EntryId]:
        """The entries without which the next epoch cannot be closed, as far as is known."""
        return self._thread.run(self._held_up_by())

    async def _held_up_by(self) -> list[EntryId]:
        return self._epochs.held_up_by()

    def positions(self, stream: str | None = None) -> dict[int, list[Position]]:
        """Where the first epoch that was not given out begins, per streamlet and entry."""
        return self._thread.run(self._positions(stream))

    async def _positions(self, stream: str | None) -> dict[int, list[Position]]:
        return self._epochs.positions(stream)

    @property
    def throttled_ms(self) -> int:
        """For how long, altogether, brokers have held answers back, as a quota was used up."""
        return self._epochs.throttled_ms

    def commit(self) -> None:
        """Say that all epochs that were given out have been processed; raises what the asynchronous one does."""
        self._thread.run(self._epochs.commit())

    def close(self) -> None:
        """Stop fetching. Epochs that were given out stay as they are."""
        self._thread.end(self._epochs.close())


class OrderedConsumer(RecordsOf[AsyncOrderedConsumer]):
    """Reads streams in the order of time. Made by `Client.ordered_consumer`; see `kera.client.OrderedConsumer`."""

    def __init__(self, thread: LoopThread, consumer: AsyncOrderedConsumer) -> None:
        super().__init__(thread, consumer)
        self._batch: OrderedBatch | None = None
        """That has come, for whoever goes on after an interruption."""

    def batches(self) -> Iterator[OrderedBatch]:
        """The rows as Arrow batches; see the asynchronous one."""
        self._at_hand = iter(())  # their epoch comes whole: its last record was not given out
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
        """All that is left up to `end`, as a table of the streams' columns."""
        self._at_hand = iter(())
        return self._thread.run(self._consumer.to_arrow())

    def to_pandas(
        self, *, deserializer: DeserializerLike = None, key_deserializer: DeserializerLike = None
    ) -> pandas.DataFrame:
        """The same as a data frame of pandas, which has to be installed; deserializers as with asyncio."""
        self._at_hand = iter(())
        return self._thread.run(self._consumer.to_pandas(deserializer=deserializer, key_deserializer=key_deserializer))

    def to_polars(
        self, *, deserializer: DeserializerLike = None, key_deserializer: DeserializerLike = None
    ) -> polars.DataFrame:
        """The same as a data frame of polars, which has to be installed; deserializers as with asyncio."""
        self._at_hand = iter(())
        return self._thread.run(self._consumer.to_polars(deserializer=deserializer, key_deserializer=key_deserializer))

    @property
    def epoch_ms(self) -> int:
        """How long an epoch is; 0: it has not started."""
        return self._consumer.epoch_ms

    @property
    def late_records(self) -> int:
        """How many were late, of all epochs up to the one that is being delivered."""
        return self._consumer.late_records

    def held_up_by(self) -> list[EntryId]:
        """The entries without which the next epoch cannot be closed, as far as is known."""
        return self._thread.run(self._held_up_by())

    async def _held_up_by(self) -> list[EntryId]:
        return self._consumer.held_up_by()

    def positions(self, stream: str | None = None) -> dict[int, list[Position]]:
        """Where the first epoch that was not delivered to its end begins, per streamlet and entry."""
        return self._thread.run(self._positions(stream))

    async def _positions(self, stream: str | None) -> dict[int, list[Position]]:
        return self._consumer.positions(stream)
