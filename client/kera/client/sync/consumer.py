"""Consumers without asyncio: iterate over their records or batches.

Each step asks the client's thread once: for the batches that have come, or for the records up to the next one that
changes the delivered position. `positions` and `commit` have the same meaning as in `kera.client.Consumer`: a batch
counts as delivered when it is returned.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import pyarrow as pa

from kera.client import arguments
from kera.client.chunk_batch import ChunkBatch
from kera.client.consuming.consumer import Consumer as AsyncConsumer
from kera.client.consuming.delivering.decoding import POLL_RECORDS_LIMIT
from kera.client.consuming.group_consumer import GroupConsumer as AsyncGroupConsumer
from kera.client.epochs.ordered_consumer import OrderedConsumer as AsyncOrderedConsumer
from kera.client.serializers.choosing import DeserializerLike
from kera.client.sync.loop_thread import LoopThread
from kera.client.types import Record
from kera.core.base.ids import Position
from kera.core.errors import WokenUp

if TYPE_CHECKING:
    import pandas
    import polars

T = TypeVar("T")
ConsumerT = TypeVar("ConsumerT", AsyncConsumer, AsyncGroupConsumer, AsyncOrderedConsumer)


WOKEN_UP = "wakeup() has ended the wait for records; the next call goes on from there"
AHEAD_MAX = 16
"""Maximum number of batches fetched together: a call to the other thread costs some 50 µs, once for all of them."""


class Wakeups:
    """Ends waits for records from any thread, or from a signal handler.

    A wake-up ends all present waits; if there are none, it ends the next one. The work behind a wait is cancelled where
    this loses nothing, and fetched data are still delivered.
    """

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._waits: set[asyncio.Timeout] = set()
        """The present waits. They belong to the client's thread, as `wait` does."""
        self.asked = False
        """Whether there is a wake-up that has not ended a wait yet."""

    def wake(self) -> None:
        """End all present waits, or the next one."""
        self.asked = True
        self._thread.call_soon(self._end_waits)

    def take(self) -> bool:
        """Return whether there was a wake-up, and mark it as used."""
        asked, self.asked = self.asked, False
        return asked

    async def wait(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work`. Raises `WokenUp`."""
        if self.take():
            raise WokenUp(WOKEN_UP)
        waiting = asyncio.timeout(None)
        try:
            async with waiting:
                self._waits.add(waiting)
                try:
                    return await work()
                finally:
                    self._waits.discard(waiting)
        except TimeoutError:
            if not waiting.expired():
                raise
            self.take()
            raise WokenUp(WOKEN_UP) from None

    def _end_waits(self) -> None:
        if self.asked:
            while self._waits:
                self._waits.pop().reschedule(0)


class RecordsOf(Generic[ConsumerT]):
    """The methods of all kinds of consumers."""

    def __init__(self, thread: LoopThread, consumer: ConsumerT) -> None:
        self._thread = thread
        self._consumer: ConsumerT = consumer
        self._at_hand: Iterator[Record] = iter(())
        """Fetched records that the next reader gets, also in another loop and after an interruption."""
        self._wakeups = Wakeups(thread)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Look up the streams, and begin to fetch; iterating calls this if needed. Raises `UnknownStream`."""
        self._thread.run(self._consumer.start())

    def records(self) -> Iterator[Record]:
        """Yield each record as Python values, until `wakeup` ends it.

        A loop over records may be left, and another one continues at the same place.
        """
        while True:
            for record in self._at_hand:
                yield record
                if self._wakeups.asked and self._wakeups.take():
                    return
            try:
                if not self._thread.run(self._fetch_records()):
                    return
            except WokenUp:
                return

    def poll(self, timeout_s: float | None = None, *, records_max: int | None = None) -> list[Record]:
        """Return the next records: those of one fetched batch, and at most `records_max`, if given.

        It waits for the first record for up to `timeout_s` seconds, or without limit for None. The first look-up of the
        streams does not count. It returns an empty list when the time is over, and at the `end` of the consumer. All
        returned records count as delivered, so a `commit` afterwards stores that they were processed. A group consumer
        also commits them automatically, after the next `poll`.

        Raises `WokenUp` after `wakeup`, `InvalidArgument` for a negative `timeout_s` or a `records_max` below 1, and
        the errors of `records`.
        """
        if records_max is not None:
            arguments.whole("records_max", records_max, 1, POLL_RECORDS_LIMIT)
        if self._wakeups.take():
            raise WokenUp(WOKEN_UP)
        if not (found := list(islice(self._at_hand, records_max))):
            self._thread.run(self._fetch_polled(timeout_s, records_max))
            found = list(self._at_hand)
        return found

    def wakeup(self) -> None:
        """End the wait for records: `poll` raises `WokenUp`, and loops over `records` and `batches` end.

        Any thread or signal handler may call it. If there is no wait, the next `poll` raises, or a loop ends at its
        next record. Nothing is lost: the next `poll` or loop gets the fetched records, and `commit` and `close` work as
        usual.
        """
        self._wakeups.wake()

    async def _fetch_records(self) -> bool:
        # The records are stored here and not by the waiting caller: an interrupted caller loses none.
        self._prepare_for_records()
        records = await self._wakeups.wait(self._consumer.next_records)
        self._at_hand = iter(records)
        return bool(records)

    async def _fetch_polled(self, timeout_s: float | None, records_max: int | None) -> None:
        self._prepare_for_records()
        poll = partial(self._consumer.poll, timeout_s, records_max=records_max)
        self._at_hand = iter(await self._wakeups.wait(poll))

    def _prepare_for_records(self) -> None:
        """Turn data fetched in another form into records; called on the client's thread."""

    def __iter__(self) -> Iterator[Record]:
        return self.records()

    def commit(self) -> None:
        """Commit everything delivered as processed. Raises the errors of the asynchronous method."""
        self._thread.run(self._consumer.commit())

    @property
    def throttled_ms(self) -> int:
        """Total time for which brokers have delayed responses because a quota was used up."""
        return self._consumer.throttled_ms

    @property
    def skipped_records(self) -> int:
        """Number of records that could not be decoded and were left out."""
        return self._consumer.skipped_records

    def close(self) -> None:
        """Stop fetching; a group consumer also leaves its consumer group."""
        self._thread.end(self._consumer.close())


class Consumer(RecordsOf[AsyncConsumer]):
    """Reads streams. Made by `Client.consumer`; see `kera.client.Consumer`."""

    def __init__(self, thread: LoopThread, consumer: AsyncConsumer) -> None:
        super().__init__(thread, consumer)
        self._ahead: deque[ChunkBatch] = deque()
        """Fetched batches that are not delivered yet."""
        self._handing_out = threading.Lock()
        """Lock that gives each fetched batch to only one thread."""

    def batches(self) -> Iterator[ChunkBatch]:
        """Yield each chunk as an Arrow batch in place, small chunks joined. Raises the errors of the async method."""
        self._at_hand = iter(())  # their chunk is delivered whole, as its last record was not returned
        while True:
            while (batch := self._next_ahead()) is not None:
                yield batch
                del batch  # this frees the broker's memory, as the next batch may take long to come
                if self._wakeups.take():
                    return
            try:
                if not self._thread.run(self._fetch_batches()):
                    return
            except WokenUp:
                return

    def to_arrow(self) -> pa.Table:
        """Return all remaining records up to `end`, as a table with the stream's columns."""
        return self._thread.run(self._whole(self._consumer.to_arrow))

    def to_pandas(
        self, *, deserializer: DeserializerLike = None, key_deserializer: DeserializerLike = None
    ) -> pandas.DataFrame:
        """Like `to_arrow`, as a pandas data frame; pandas must be installed. Deserializers work as with asyncio."""
        read = partial(self._consumer.to_pandas, deserializer=deserializer, key_deserializer=key_deserializer)
        return self._thread.run(self._whole(read))

    def to_polars(
        self, *, deserializer: DeserializerLike = None, key_deserializer: DeserializerLike = None
    ) -> polars.DataFrame:
        """Like `to_arrow`, as a polars data frame; polars must be installed. Deserializers work as with asyncio."""
        read = partial(self._consumer.to_polars, deserializer=deserializer, key_deserializer=key_deserializer)
        return self._thread.run(self._whole(read))

    def _next_ahead(self) -> ChunkBatch | None:
        with self._handing_out:
            if not self._ahead or not self._ahead[0].intact:  # the next fetch gets it from its new place
                return None
            batch = self._ahead[0]
            self._consumer.deliver(batch)
            self._ahead.popleft()  # last, so that an interrupted caller gets it the next time
            return batch

    async def _fetch_batches(self) -> bool:
        if self._ahead and self._ahead[0].intact:
            return True  # another thread has fetched them
        self._give_back()
        batches = await self._wakeups.wait(partial(self._consumer.next_batches, AHEAD_MAX))
        with self._handing_out:
            self._ahead.extend(batches)
        return bool(batches)

    def _prepare_for_records(self) -> None:
        self._give_back()

    async def _whole(self, read: Callable[[], Awaitable[T]]) -> T:
        self._at_hand = iter(())
        self._give_back()
        return await read()

    def _give_back(self) -> None:
        with self._handing_out:
            self._consumer.give_back(self._ahead)
            self._ahead.clear()

    def positions(self, stream: str | None = None) -> dict[int, list[Position]]:
        """Return the positions behind the delivered records, per streamlet and entry."""
        return self._thread.run(_of(lambda: self._consumer.positions(stream)))


class GroupConsumer(RecordsOf[AsyncGroupConsumer]):
    """Reads streams together with the other members of its consumer group. Made by `Client.group_consumer`."""

    def __init__(self, thread: LoopThread, consumer: AsyncGroupConsumer) -> None:
        super().__init__(thread, consumer)
        self._batch: ChunkBatch | None = None
        """A fetched batch that the next loop gets after an interruption."""

    def batches(self) -> Iterator[ChunkBatch]:
        """Yield each chunk as an Arrow batch in place, small chunks joined. Raises the errors of the async method.

        After an interruption during a fetch, the next loop over batches begins with the fetched batch.
        """
        self._at_hand = iter(())  # their chunk is delivered whole, as its last record was not returned
        coming = self._consumer.batches()
        try:
            while self._batch is not None or self._thread.run(self._fetch_batch(coming)):
                batch, self._batch = self._batch, None
                if batch is not None:
                    yield batch
                del batch  # this frees the broker's memory, as the next batch may take long to come
        except WokenUp:
            return

    async def _fetch_batch(self, coming: AsyncIterator[ChunkBatch]) -> bool:
        self._batch = await self._wakeups.wait(partial(anext, coming, None))
        return self._batch is not None

    def positions(self, stream: str | None = None) -> dict[tuple[int, int], Position]:
        """Return the delivered positions, by streamlet and group, for the groups of this consumer."""
        return self._thread.run(_of(lambda: self._consumer.positions(stream)))


def following(thread: LoopThread, batches: AsyncIterator[ChunkBatch]) -> Iterator[ChunkBatch]:
    """Yield the batches one after the other."""
    while (batch := thread.run(_next(batches))) is not None:
        yield batch
        del batch  # this frees the broker's memory, as the next batch may take long to come


async def _next(batches: AsyncIterator[ChunkBatch]) -> ChunkBatch | None:
    return await anext(batches, None)


async def _of(ask: Callable[[], T]) -> T:
    return ask()
