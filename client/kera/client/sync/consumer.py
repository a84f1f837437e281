"""Consumers for those who write no asyncio: iterate over their records or batches.

Each step asks the client's thread once: for the batches that have come, or for the records up to the next one that
changes what counts as delivered. `positions` and `commit` say the same as those of `kera.client.Consumer`: a batch is
delivered when it is given out.
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
"""Batches that come together. Who has them in hand asks the other thread once for all, which costs some 50 µs."""


class Wakeups:
    """Ends waits for records from any thread, or from a signal handler.

    A wake-up ends all waits of its moment; when nobody waits, it ends the next one. What a wait was for is cancelled
    where that loses nothing, and what has come is given out.
    """

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._waits: set[asyncio.Timeout] = set()
        """Belongs to the client's thread, as `wait` does."""
        self.asked = False
        """Whether a wake-up has ended nothing yet."""

    def wake(self) -> None:
        """See the class."""
        self.asked = True
        self._thread.call_soon(self._end_waits)

    def take(self) -> bool:
        """Whether there was a wake-up; it has ended something now."""
        asked, self.asked = self.asked, False
        return asked

    async def wait(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`. Raises `WokenUp`."""
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
    """The methods that all kinds of consumers have."""

    def __init__(self, thread: LoopThread, consumer: ConsumerT) -> None:
        self._thread = thread
        self._consumer: ConsumerT = consumer
        self._at_hand: Iterator[Record] = iter(())
        """Records that have come, for whoever goes on, also in another loop, and after an interruption."""
        self._wakeups = Wakeups(thread)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Look up the streams, and begin to fetch; iterating does so by itself. Raises `UnknownStream`."""
        self._thread.run(self._consumer.start())

    def records(self) -> Iterator[Record]:
        """Each record as Python values; `wakeup` ends it.

        Whoever leaves such a loop may begin another one, which goes on there.
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
        """The next records: those of one batch that came, and at most `records_max`, if that is given.

        Waits for the first one for up to `timeout_s` seconds, with None for ever; looking up the streams, the first
        time, is not part of it. Returns an empty list when the time is over, and at the end of a consumer that has one.
        All that it returns counts as delivered, so `commit` after it stores that these records were processed. A
        consumer of a group also commits them by itself, after the next `poll`.

        Raises `WokenUp` after `wakeup`, `InvalidArgument` for a negative `timeout_s` or a `records_max` below 1, and
        what `records` raises.
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
        """End the wait for records: `poll` raises `WokenUp`, loops over `records` and `batches` end.

        Any thread may call it, and so may a signal handler. If nobody waits, the next `poll` raises, or a loop ends
        when it comes for its next record. Nothing is lost: what has come is there for the next `poll` or loop, and
        `commit` and `close` work as ever.
        """
        self._wakeups.wake()

    async def _fetch_records(self) -> bool:
        # Here, and not where it is waited for: who is interrupted there just then loses none.
        self._prepare_for_records()
        records = await self._wakeups.wait(self._consumer.next_records)
        self._at_hand = iter(records)
        return bool(records)

    async def _fetch_polled(self, timeout_s: float | None, records_max: int | None) -> None:
        self._prepare_for_records()
        poll = partial(self._consumer.poll, timeout_s, records_max=records_max)
        self._at_hand = iter(await self._wakeups.wait(poll))

    def _prepare_for_records(self) -> None:
        """Turn data that were fetched in another form into records; called on the client's thread."""

    def __iter__(self) -> Iterator[Record]:
        return self.records()

    def commit(self) -> None:
        """Say that all that was delivered has been processed; raises what the asynchronous one does."""
        self._thread.run(self._consumer.commit())

    @property
    def throttled_ms(self) -> int:
        """For how long, altogether, brokers have held answers back, as a quota was used up."""
        return self._consumer.throttled_ms

    @property
    def skipped_records(self) -> int:
        """How many could not be decoded, and were left out."""
        return self._consumer.skipped_records

    def close(self) -> None:
        """Stop fetching; of a consumer group, leave it."""
        self._thread.end(self._consumer.close())


class Consumer(RecordsOf[AsyncConsumer]):
    """Reads streams. Made by `Client.consumer`; see `kera.client.Consumer`."""

    def __init__(self, thread: LoopThread, consumer: AsyncConsumer) -> None:
        super().__init__(thread, consumer)
        self._ahead: deque[ChunkBatch] = deque()
        """Batches that have come and are not delivered."""
        self._handing_out = threading.Lock()
        """Lock for handing out records that are ahead, to one thread each."""

    def batches(self) -> Iterator[ChunkBatch]:
        """Each chunk as an Arrow batch in place, small ones several together; raises what the asynchronous one does."""
        self._at_hand = iter(())  # their chunk comes whole: its last record was not given out
        while True:
            while (batch := self._next_ahead()) is not None:
                yield batch
                del batch  # and with it the place in the broker's memory, though the next one may be long in coming
                if self._wakeups.take():
                    return
            try:
                if not self._thread.run(self._fetch_batches()):
                    return
            except WokenUp:
                return

    def to_arrow(self) -> pa.Table:
        """All that is left up to `end`, as a table of the stream's columns."""
        return self._thread.run(self._whole(self._consumer.to_arrow))

    def to_pandas(
        self, *, deserializer: DeserializerLike = None, key_deserializer: DeserializerLike = None
    ) -> pandas.DataFrame:
        """The same as a data frame of pandas, which has to be installed; deserializers as with asyncio."""
        read = partial(self._consumer.to_pandas, deserializer=deserializer, key_deserializer=key_deserializer)
        return self._thread.run(self._whole(read))

    def to_polars(
        self, *, deserializer: DeserializerLike = None, key_deserializer: DeserializerLike = None
    ) -> polars.DataFrame:
        """The same as a data frame of polars, which has to be installed; deserializers as with asyncio."""
        read = partial(self._consumer.to_polars, deserializer=deserializer, key_deserializer=key_deserializer)
        return self._thread.run(self._whole(read))

    def _next_ahead(self) -> ChunkBatch | None:
        with self._handing_out:
            if not self._ahead or not self._ahead[0].intact:  # who asks for more gets it from where it is now
                return None
            batch = self._ahead[0]
            self._consumer.deliver(batch)
            self._ahead.popleft()  # last: who is interrupted before gets it the next time
            return batch

    async def _fetch_batches(self) -> bool:
        if self._ahead and self._ahead[0].intact:
            return True  # another thread has been here
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
        """Where to go on after what was delivered so far, per streamlet and entry."""
        return self._thread.run(_of(lambda: self._consumer.positions(stream)))


class GroupConsumer(RecordsOf[AsyncGroupConsumer]):
    """Reads streams together with the others of its consumer group. Made by `Client.group_consumer`."""

    def __init__(self, thread: LoopThread, consumer: AsyncGroupConsumer) -> None:
        super().__init__(thread, consumer)
        self._batch: ChunkBatch | None = None
        """That has come, for whoever goes on after an interruption."""

    def batches(self) -> Iterator[ChunkBatch]:
        """Each chunk as an Arrow batch in place, small ones several together; raises what the asynchronous one does.

        Who was interrupted while one came gets that first from the next loop over batches.
        """
        self._at_hand = iter(())  # their chunk comes whole: its last record was not given out
        coming = self._consumer.batches()
        try:
            while self._batch is not None or self._thread.run(self._fetch_batch(coming)):
                batch, self._batch = self._batch, None
                if batch is not None:
                    yield batch
                del batch  # and with it the place in the broker's memory, though the next one may be long in coming
        except WokenUp:
            return

    async def _fetch_batch(self, coming: AsyncIterator[ChunkBatch]) -> bool:
        self._batch = await self._wakeups.wait(partial(anext, coming, None))
        return self._batch is not None

    def positions(self, stream: str | None = None) -> dict[tuple[int, int], Position]:
        """By streamlet and group, of the groups that this consumer has: up to where they were delivered."""
        return self._thread.run(_of(lambda: self._consumer.positions(stream)))


def following(thread: LoopThread, batches: AsyncIterator[ChunkBatch]) -> Iterator[ChunkBatch]:
    """Yield the batches one after the other."""
    while (batch := thread.run(_next(batches))) is not None:
        yield batch
        del batch  # and with it the place in the broker's memory, though the next one may be long in coming


async def _next(batches: AsyncIterator[ChunkBatch]) -> ChunkBatch | None:
    return await anext(batches, None)


async def _of(ask: Callable[[], T]) -> T:
    return ask()
