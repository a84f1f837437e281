"""The consumer: reads chunks of one or more streams from all their brokers (thesis 7.1.2, 7.4).

Chunks are fetched ahead (`fetcher.Fetcher`), by push or pull, in the order of each entry, and the caller takes batches
or records from them. There is no order between entries, as there is none between partitions in Kafka.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from itertools import islice
from typing import Self, get_args

from kera.client import arguments
from kera.client.chunk_batch import ChunkBatch
from kera.client.cluster.batches import batched
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.fetch import Wanted
from kera.client.consuming.committed import report_cursors
from kera.client.consuming.delivering.chunks import Chunks
from kera.client.consuming.delivering.data_frames import ReadsTables, Rows
from kera.client.consuming.delivering.decoding import DecodedRecords, Decoding, MakeDecoding
from kera.client.consuming.delivering.one_by_one import OneByOne
from kera.client.consuming.delivering.records import records_of
from kera.client.consuming.fetching.fetcher import Fetcher
from kera.client.consuming.plugins import NO_PLUGINS, Plugins
from kera.client.consuming.start_and_end import End, Start, first_records, ranges_to_read
from kera.client.positions import Places, Positions, check_place
from kera.client.settings import ConsumerSettings
from kera.client.tasks import Turns
from kera.client.types import Record, StreamDescription
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.errors import ClosedError, InvalidArgument, KeraError
from kera.core.format.arrow_types import empty_batch

LOOKED_UP_AT_ONCE_MAX = 64
"""Number of streams that are looked up at the same time: ten thousand, one by one, would take half a minute."""


class OpenChunk:
    """A chunk, or several that have come together, whose records are being delivered one by one.

    A chunk counts as delivered with its last record, so this one is kept back. The records before it are at hand:
    callers take them without waiting.
    """

    def __init__(self, offer: Callable[[Iterator[Record]], None]) -> None:
        """`offer` gets the records at hand, whenever they change."""
        self._offer = offer
        self.chunk: ChunkBatch | None = None
        self.at_hand: Iterator[Record] = iter(())
        """The records of a chunk before its last one."""
        self._records: Iterator[Record] = iter(())
        self._ends: Iterator[tuple[int, Position]] = iter(())
        """The ends of the chunks behind `_span`, see `ChunkBatch.ends`."""
        self._span = (0, 0, EARLIEST)
        """The chunk that is being delivered: its first and last record, and the position behind it."""

    def open(self, chunk: ChunkBatch, records: Iterator[Record]) -> None:
        """Begin to deliver the records of a chunk."""
        self.chunk, self._records, self._ends = chunk, records, chunk.ends()
        self._offer_from(chunk.header.first_record)

    def pass_end(self) -> tuple[Position, Record | None]:
        """End a chunk whose other records were taken. Returns the position behind it, and its last record, if any."""
        first, last, behind = self._span
        record = next(self._records, None) if first <= last else None
        self._offer_from(last + 1)
        return behind, record

    def close(self) -> None:
        """Drop the chunk."""
        self.chunk, self._records, self.at_hand = None, iter(()), iter(())
        self._offer(self.at_hand)

    def _offer_from(self, first: int) -> None:
        for last, behind in self._ends:
            self._span = first, last, behind
            self.at_hand = islice(self._records, max(0, last - first))
            self._offer(self.at_hand)
            return
        self.close()


class Consumer(DecodedRecords, ReadsTables):
    """Reads streams from a start position. Made by `Client.consumer`; use it as an async context manager.

    ``async for record in consumer`` gives records as Python values; ``async for batch in consumer.batches()`` gives
    Arrow batches without turning values into Python objects, which is some forty times faster. A consumer with
    ``end="latest"`` stops at the end that the streams had when it started. After leaving such a loop, another loop goes
    on where the first one stopped.
    """

    def __init__(  # noqa: PLR0913 - what a consumer is made of
        self,
        cluster: Cluster,
        streams: Sequence[str],
        settings: ConsumerSettings,
        *,
        start: Start | Places = "latest",
        end: End | Positions | None = None,
        streamlets: Sequence[int] | None = None,
        decoding: Decoding | None = None,
        make_decoding: MakeDecoding | None = None,
        plugins: Plugins = NO_PLUGINS,
    ) -> None:
        """`make_decoding`: for data frames of deserialized values, see `to_pandas`. `plugins`: see `Plugins`."""
        if not streams:
            raise InvalidArgument("a consumer needs a stream")
        streams = arguments.names("streams", streams)
        check_place("start", start, get_args(Start), records=True)
        if end is not None:
            check_place("end", end, get_args(End), others="None")
        if len(streams) > 1 and not (isinstance(start, str) and (end is None or isinstance(end, str))):
            raise InvalidArgument("explicit positions go with a single stream")
        if streamlets is not None:
            arguments.all_of("streamlets", streamlets, Sequence, int, "a list of numbers of streamlets")
        self._cluster = cluster
        self._names = tuple(dict.fromkeys(streams))
        self._settings = settings
        self._start = start
        self._end = end
        self._streamlets = streamlets
        self._starting = asyncio.Lock()
        self._positions: dict[EntryId, Position] = {}
        self._fetcher = Fetcher(cluster, settings, make_hooks=plugins.at_fetcher)
        self._chunks = Chunks(cluster, settings)
        self._delivery = plugins.delivery(self._chunks.streams)
        self._started = False
        self._failure: BaseException | None = None
        """The error that ended the reading; raised for every further call."""
        self._decoding = decoding
        self._make_decoding = make_decoding
        self._turns = Turns()
        self._opening = asyncio.Lock()
        """Lock for opening a chunk or fetched data: one task at a time. Records at hand need no lock."""
        self._records = OneByOne(self._next_record)
        self._open = OpenChunk(self._records.take)
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Look up the streams, decide where to start, begin to fetch. Raises `UnknownStream`, `InvalidArgument`."""
        async with self._starting:  # one of several tasks starts the consumer; the others wait for it
            if self._started:
                return
            self._check_open()
            look_up = partial(
                ranges_to_read,
                self._cluster,
                self._settings,
                start=self._start,
                end=self._end,
                streamlets=self._streamlets,
            )
            wanted: list[tuple[StreamDescription, Wanted]] = []
            for names in batched(self._names, LOOKED_UP_AT_ONCE_MAX):
                for stream, ranges in await asyncio.gather(*map(look_up, names)):
                    if self._decoding is not None:
                        self._decoding.check(stream)
                    self._chunks.streams[stream.stream_id] = stream
                    for entry, record in first_records(self._start, stream).items():
                        self._chunks.begin(entry, record)
                    for item in ranges:
                        self._positions[item.entry] = item.start
                        if item.end is None or item.start < item.end:
                            wanted.append((stream, item))
            self._check_open()  # `close` may have been called meanwhile
            self._started = True
            for stream, item in wanted:
                self._fetcher.add(stream, item)

    def positions(self, stream: str | None = None) -> dict[int, list[Position]]:
        """Return the positions behind all that was delivered so far, per streamlet and entry; usable as a new `start`.

        A chunk is delivered when `batches` has returned it, or when `records` has returned its last record. A position
        may move on without a chunk, to where the entry goes on after a streamlet has moved.
        """
        name = stream or self._names[0]
        found: dict[int, list[Position]] = {}
        for entry, position in sorted(self._positions.items()):
            if self._chunks.streams[entry.stream_id].name == name:
                found.setdefault(entry.streamlet_id, []).append(position)
        return found

    @property
    def fetched_ahead(self) -> int:
        """Number of fetched items that are not delivered yet: chunks that came together count as one."""
        return len(self._fetcher.arrivals)

    @property
    def fetched_bytes(self) -> int:
        """Bytes that were pulled and are not delivered yet."""
        return self._fetcher.arrivals.pulled_bytes

    @property
    def throttled_ms(self) -> int:
        """Total time that brokers have held answers back because a quota was used up (docs/quotas.md)."""
        return self._fetcher.throttled_ms

    async def commit(self) -> None:
        """Commit how far the consumer group (the setting ``consumer_group``) has read all its streams.

        This is up to `positions`, all that was delivered, so commit once it has been processed. A consumer with
        ``start="committed"`` goes on there, and retention waits for it (``retention_consumer_groups``). To share
        streams among several consumers of a group, use `Client.group_consumer` instead.

        Raises `InvalidArgument` when ``consumer_group`` is empty or consumers share the streams under its name,
        `UnknownStream` when a stream was deleted, and `Unavailable` or `Uncertain` when the coordinator or a broker
        cannot be reached for longer than ``retry_timeout_ms``.
        """
        positions = dict(self._positions)  # a copy: the commit does not cover what is delivered meanwhile
        for stream in self._chunks.streams.values():
            delivered = {entry: at for entry, at in positions.items() if entry.stream_id == stream.stream_id}
            await self._cluster.commit(self._settings.consumer_group, stream.name, delivered)
            await report_cursors(self._cluster, self._settings.consumer_group, stream, delivered)

    def batches(self) -> AsyncIterator[ChunkBatch]:
        """Return an iterator over chunks as Arrow batches in place; small ones together (``joined_bytes_max``).

        On the broker's node, a batch lies in the broker's memory (the setting ``shared_memory``), which is kept for as
        long as any part of the batch is in use. This guarantee ends when the broker dies: it may reuse the memory some
        seconds after it is back. A caller that keeps batches for longer than it takes to process them should check
        `ChunkBatch.intact` when done, and read a batch that is not intact again from `ChunkBatch.start`.

        Batches of a typed stream have its newest columns: records older than a column have nulls there. When columns
        are added while the consumer reads, its batches have them from the first chunk that has them.

        Raises `DataLost` when the next data to read have been removed, `UnknownStream` when a stream was deleted,
        `CorruptChunk`, and `Unavailable` when a broker cannot be reached for longer than ``retry_timeout_ms``, or
        `Recovering` when the data of a crashed broker are not back within ``recovery_timeout_ms``.
        """
        batches = self._each_batch()
        return batches if self._delivery is None else self._delivery.batches(batches)

    async def _each_batch(self) -> AsyncIterator[ChunkBatch]:
        await self.start()
        if self._decoding is not None:
            self._decoding.forget()
        if self._open.chunk is not None:
            yield self._rest(self._open.chunk)
        while (chunk_or_end := self._next_here(copied=False) or await self._chunk_in_turn()) is not None:
            self._positions[chunk_or_end.entry] = chunk_or_end.next
            yield chunk_or_end
            del chunk_or_end  # frees its place in the broker's memory: the next chunk may take long to come
            await self._turns.give()

    async def next_batches(self, batches_max: int) -> list[ChunkBatch]:
        """Return the next of `batches`, and further ones that need no waiting; an empty list at the end.

        The caller passes each batch to `deliver` when it is delivered, and the other ones to `give_back`.
        """
        coming = self._several_batches(batches_max)
        return await (coming if self._delivery is None else self._delivery.next_batches(coming))

    async def _several_batches(self, batches_max: int) -> list[ChunkBatch]:
        await self.start()
        if self._decoding is not None:
            self._decoding.forget()
        if self._open.chunk is not None:
            return [self._rest(self._open.chunk)]
        chunk = await self._chunk_in_turn()
        found: list[ChunkBatch] = []
        while chunk is not None:
            found.append(chunk)
            try:
                chunk = self._next_here(copied=False) if len(found) < batches_max else None
            except KeraError:
                break  # the next call raises it
        return found

    def deliver(self, batch: ChunkBatch) -> None:
        """Note that one of `next_batches` is delivered; any thread may call this."""
        self._positions[batch.entry] = batch.next

    def give_back(self, batches: Sequence[ChunkBatch]) -> None:
        """Put back the last batches, such as the rest of `next_batches`: the next call for more returns them first."""
        if batches and not self._closed:
            self._chunks.give_back(batches)

    @asynccontextmanager
    async def _all_left(self) -> AsyncIterator[AsyncIterator[Rows]]:
        if len(self._names) > 1 or self._end is None:
            raise InvalidArgument("a table needs a consumer of one stream that has an end: end='latest', or positions")
        await self.start()
        before, taken = dict(self._positions), list[ChunkBatch]()
        try:
            async with aclosing(self._rows_left(taken)) as left:
                yield left
        except BaseException:  # nothing was delivered
            self._positions.update(before)
            self.give_back(taken)
            raise

    async def _rows_left(self, taken: list[ChunkBatch]) -> AsyncGenerator[Rows, None]:
        """Yield all rows up to the end, and add their chunks to `taken`."""
        (stream,) = self._chunks.streams.values()
        yield Rows(empty_batch(stream.schema), iter(()), stream)
        chunk = None if self._open.chunk is None else self._rest(self._open.chunk)
        while (chunk := chunk or await self._chunk_in_turn(copied=True)) is not None:
            taken.append(chunk)
            self._positions[chunk.entry] = chunk.next
            stream = self._chunks.streams[chunk.entry.stream_id]
            yield Rows(chunk.batch, records_of(chunk, stream), stream)
            chunk = None

    def _each_record(self) -> AsyncIterator[Record]:
        return self._records

    async def _next_records(self, records_max: int | None) -> list[Record]:
        first = await anext(self._records, None)
        rest_max = None if records_max is None else records_max - 1
        return [] if first is None else [first, *islice(self._open.at_hand, rest_max)]

    def _has_at_hand(self) -> bool:
        return self._open.chunk is not None

    async def _next_record(self) -> Record:
        """Return a record when none is at hand: the last one of a chunk, which ends it, or the first of the next."""
        async with self._opening:  # a task that has waited goes on with the chunk that another task has opened
            await self.start()
            while True:
                for record in self._open.at_hand:
                    return record
                chunk = self._open.chunk
                if chunk is None:
                    chunk = await self._next_chunk(copied=True)
                    if chunk is None:
                        raise StopAsyncIteration
                    stream = self._chunks.streams[chunk.entry.stream_id]
                    if self._decoding is not None:
                        try:
                            await self._decoding.learn(chunk.batch, stream)
                        except BaseException:
                            self.give_back([chunk])
                            raise
                    self._open.open(chunk, records_of(chunk, stream))
                    continue
                self._positions[chunk.entry], record_or_none = self._open.pass_end()
                if record_or_none is not None:
                    return record_or_none

    def _rest(self, begun: ChunkBatch) -> ChunkBatch:
        """Return the rest of a partly delivered chunk."""
        chunk = begun.rest(self._positions[begun.entry])
        self._open.close()
        self._positions[chunk.entry] = chunk.next
        return chunk

    async def _chunk_in_turn(self, *, copied: bool = False) -> ChunkBatch | None:
        """Open the next chunk, in one task at a time; otherwise another task's chunk would replace it."""
        async with self._opening:
            return await self._next_chunk(copied=copied)

    async def _next_chunk(self, *, copied: bool = False) -> ChunkBatch | None:
        """Return the next chunk; None when all ranges have been delivered to their ends."""
        await self._turns.give()
        while (chunk := self._next_here(copied=copied)) is None:
            try:
                chunk = await self._chunks.following(copied=copied)
            except KeraError as error:
                self._failure = error
                raise
            if chunk is not None:
                return chunk
            fetched = await self._fetcher.fetched()
            if fetched is None:
                return None
            if fetched.buffers:
                self._chunks.open(fetched)
            else:  # the entry goes on at another broker, and the position follows, for consumers that start there
                self._positions[fetched.entry] = fetched.next
        return chunk

    def _next_here(self, *, copied: bool) -> ChunkBatch | None:
        """See `Chunks.following_here`."""
        self._check_open()
        if self._failure is not None:
            raise self._failure
        try:
            return self._chunks.following_here(copied=copied)
        except KeraError as error:
            self._failure = error
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the consumer is closed")

    async def close(self) -> None:
        """Stop fetching. Waiting calls raise `ClosedError`; delivered batches stay valid."""
        if self._cluster.is_inherited:
            return
        self._closed = True
        await self._fetcher.close()
        self._chunks.clear()
        self._open.close()
