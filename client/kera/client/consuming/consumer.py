"""The consumer: reads chunks of one or more streams from all their brokers (thesis 7.1.2, 7.4).

Chunks are fetched ahead (`fetcher.Fetcher`), by push or pull, in the order of each entry, and the caller takes batches
or records of them. Between entries there is no order, as between partitions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Literal, Self, get_args

import pyarrow as pa

from kera.client import arguments
from kera.client.chunk_batch import ChunkBatch
from kera.client.cluster.batches import batched
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.fetch import Wanted
from kera.client.consuming.chunks import Chunks
from kera.client.consuming.committed import committed_cursors, report_cursors
from kera.client.consuming.fetcher import Fetcher
from kera.client.consuming.one_by_one import OneByOne
from kera.client.consuming.records import records_of
from kera.client.positions import Positions, check_place, check_streamlets
from kera.client.settings import ConsumerSettings
from kera.client.types import Record, StreamDescription
from kera.core.errors import ClosedError, InvalidArgument, KeraError
from kera.core.ids import EARLIEST, EntryId, Position

if TYPE_CHECKING:
    import pandas
    import polars

Start = Literal["earliest", "latest", "committed"]
End = Literal["latest"]

LOOKED_UP_AT_ONCE_MAX = 64
"""Streams: of ten thousand, one after the other would take half a minute."""


class Consumer:
    """Reads streams from a start on. Made by `Client.consumer`; use it as an async context manager.

    ``async for record in consumer`` gives records as Python values; ``async for batch in consumer.batches()`` gives
    Arrow batches without turning values into Python objects, which is some forty times faster. A consumer with
    ``end="latest"`` stops at what was there when it started. Whoever leaves such a loop may begin another one, which
    goes on where the first one stopped.
    """

    def __init__(
        self,
        cluster: Cluster,
        streams: Sequence[str],
        settings: ConsumerSettings,
        *,
        start: Start | Positions = "latest",
        end: End | Positions | None = None,
    ) -> None:
        if not streams:
            raise InvalidArgument("a consumer needs a stream")
        streams = arguments.names("streams", streams)
        check_place("start", start, get_args(Start))
        if end is not None:
            check_place("end", end, get_args(End), others="None")
        if len(streams) > 1 and not (isinstance(start, str) and (end is None or isinstance(end, str))):
            raise InvalidArgument("explicit positions go with a single stream")
        self._cluster = cluster
        self._names = tuple(dict.fromkeys(streams))
        self._settings = settings
        self._start = start
        self._end = end
        self._positions: dict[EntryId, Position] = {}
        self._fetcher = Fetcher(cluster, settings)
        self._chunks = Chunks(cluster, settings)
        self._started = False
        self._failure: BaseException | None = None
        """What ended the reading; told to everyone who asks for more."""
        self._open: ChunkBatch | None = None
        """The chunk whose records are being delivered."""
        self._open_records: Iterator[Record] = iter(())
        self._ends: Iterator[tuple[int, Position]] = iter(())
        """See `ChunkBatch.ends`: of what comes behind `_span`, if small chunks have come together."""
        self._span = (0, 0, EARLIEST)
        """Of the chunk that is being delivered: its first and last record, and where the next one starts."""
        self._at_hand: Iterator[Record] = iter(())
        """Its records but the last one."""
        self._opening = asyncio.Lock()
        """Of a chunk; the records at hand need none."""
        self._records = OneByOne(self._next_record)
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Look up the streams, decide where to start, begin to fetch. Raises `UnknownStream`, `InvalidArgument`."""
        if self._started:
            return
        if self._closed:
            raise ClosedError("the consumer is closed")
        wanted: list[tuple[StreamDescription, Wanted]] = []
        for names in batched(self._names, LOOKED_UP_AT_ONCE_MAX):
            for stream, ranges in await asyncio.gather(*map(self._look_up, names)):
                self._chunks.streams[stream.stream_id] = stream
                for item in ranges:
                    self._positions[item.entry] = item.start
                    if item.end is None or item.start < item.end:
                        wanted.append((stream, item))
        self._started = True
        for stream, item in wanted:
            self._fetcher.add(stream, item)

    async def _look_up(self, name: str) -> tuple[StreamDescription, list[Wanted]]:
        """What to read of each entry of a stream, those included that have nothing to read."""
        needs_bounds = self._start == "latest" or self._end == "latest"
        bounds = await self._cluster.bounds(name) if needs_bounds else {}
        stream = await self._cluster.stream(name)  # known by now, if it was asked for its bounds
        committed: Mapping[EntryId, Position] = {}
        if self._start == "committed":
            committed = await committed_cursors(self._cluster, self._settings.consumer_group, stream)
        ranges = []
        for streamlet_id in stream.assignments:
            for entry in range(stream.config.entries):
                start, end = committed.get(EntryId(stream.stream_id, streamlet_id, entry), EARLIEST), None
                if self._start == "latest":
                    start = bounds[streamlet_id][entry].end
                elif not isinstance(self._start, str):
                    start = _given(self._start, streamlet_id, entry, stream)
                if self._end == "latest":
                    end = bounds[streamlet_id][entry].end
                elif self._end is not None:
                    end = _given(self._end, streamlet_id, entry, stream)
                ranges.append(Wanted(EntryId(stream.stream_id, streamlet_id, entry), start, end))
        for given in (self._start, self._end):
            if isinstance(given, Mapping):
                check_streamlets(given, stream)
        return stream, ranges

    def positions(self, stream: str | None = None) -> dict[int, list[Position]]:
        """Where to go on after what was delivered so far, per streamlet and entry; can be given as a new `start`.

        A chunk is delivered when it came out of `batches`, or when its last record came out of `records`. A position
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
        """How much has come and is not delivered yet: chunks that came together count as one."""
        return len(self._fetcher.arrivals)

    @property
    def fetched_bytes(self) -> int:
        """What was pulled and is not delivered yet."""
        return self._fetcher.arrivals.pulled_bytes

    @property
    def throttled_ms(self) -> int:
        """For how long, altogether, brokers have held answers back, as a quota was used up (docs/quotas.md)."""
        return self._fetcher.throttled_ms

    async def commit(self) -> None:
        """Say how far the consumer group (the setting ``consumer_group``) has read all its streams.

        That is up to `positions`: all that was delivered, so commit when it has been processed. A consumer with
        ``start="committed"`` goes on there, and retention waits for it (``retention_consumer_groups``). A consumer
        group of which several consumers are at work reads with `Client.group_consumer` instead.

        Raises `InvalidArgument` when ``consumer_group`` is empty or consumers share the streams under its name,
        `UnknownStream` when a stream was deleted, and `Unavailable` or `Uncertain` when the coordinator or a broker
        cannot be reached for longer than ``retry_timeout_ms``.
        """
        positions = dict(self._positions)  # what is delivered meanwhile is not part of it
        for stream in self._chunks.streams.values():
            delivered = {entry: at for entry, at in positions.items() if entry.stream_id == stream.stream_id}
            await self._cluster.commit(self._settings.consumer_group, stream.name, delivered)
            await report_cursors(self._cluster, self._settings.consumer_group, stream, delivered)

    async def batches(self) -> AsyncIterator[ChunkBatch]:
        """Each chunk as an Arrow batch in place; small ones several together (the setting ``joined_bytes_max``).

        On the broker's node that place is the broker's memory (the setting ``shared_memory``), and it is kept for as
        long as anything of the batch is in use. That ends when the broker dies: it may use the memory again some
        seconds after it is back. Who keeps batches for longer than it takes to deal with them asks `ChunkBatch.intact`
        when done, and reads what is not intact again from `ChunkBatch.start`.

        Batches of a typed stream have its newest columns: what is older than a column has nulls there. When columns are
        added while the consumer reads, its batches have them from the first chunk on that does.

        Raises `DataLost` when what it should read next has been removed, `UnknownStream` when a stream was deleted,
        `CorruptChunk`, and `Unavailable` when a broker cannot be reached for longer than ``retry_timeout_ms``, or
        `Recovering` when what a crashed broker had is not back within ``recovery_timeout_ms``.
        """
        await self.start()
        if self._open is not None:
            yield self._rest(self._open)
        while (chunk_or_end := self._next_here(copied=False) or await self._next_chunk()) is not None:
            self._positions[chunk_or_end.entry] = chunk_or_end.next
            yield chunk_or_end
            del chunk_or_end  # and with it the place in the broker's memory, though the next one may be long in coming

    async def to_arrow(self) -> pa.Table:
        """All that is left up to `end`, as a table of the stream's columns, in memory of its own.

        Raises `InvalidArgument` for a consumer of several streams, or without an `end`, and what `batches` does.
        """
        if len(self._names) > 1 or self._end is None:
            raise InvalidArgument("a table is of one stream, and of a consumer with an end: end='latest', or positions")
        await self.start()
        (stream,) = self._chunks.streams.values()
        parts, before = [pa.Table.from_batches([], stream.schema)], dict(self._positions)
        try:
            if self._open is not None:
                parts.append(pa.Table.from_batches([self._rest(self._open).batch]))
            while (chunk := await self._next_chunk(copied=True)) is not None:
                self._positions[chunk.entry] = chunk.next
                parts.append(pa.Table.from_batches([chunk.batch]))
        except BaseException:
            self._positions.update(before)  # nothing was given out
            raise
        return pa.concat_tables(parts, promote_options="default")

    async def to_pandas(self) -> pandas.DataFrame:
        """The same as a data frame of pandas, which has to be installed."""
        return (await self.to_arrow()).to_pandas()

    async def to_polars(self) -> polars.DataFrame:
        """The same as a data frame of polars, which has to be installed."""
        import polars  # noqa: PLC0415 - only who asks for it needs it

        return polars.from_arrow(await self.to_arrow())  # type: ignore[return-value]  # a table is a frame

    def records(self) -> AsyncIterator[Record]:
        """Each record as Python values; see `batches` for what is raised."""
        return self._records

    async def next_records(self) -> list[Record]:
        """The next records, up to before one with which more counts as delivered; none at the end. See `records`."""
        first = await anext(self._records, None)
        return [] if first is None else [first, *self._at_hand]

    async def _next_record(self) -> Record:
        """When none is at hand: the last one of a chunk, with which that is delivered, or the next chunk's first."""
        async with self._opening:  # each of several tasks goes on with what another one has opened meanwhile
            await self.start()
            while True:
                for record in self._at_hand:
                    return record
                if self._open is None:
                    await self._open_next()
                    continue
                first, last, behind = self._span
                self._positions[self._open.entry] = behind
                record_or_none = next(self._open_records, None) if first <= last else None
                self._next_end(last + 1)
                if record_or_none is not None:
                    return record_or_none

    async def _open_next(self) -> None:
        """Begin with the records of the next chunk; raises `StopAsyncIteration` at the end."""
        opened = await self._next_chunk(copied=True)
        if opened is None:
            raise StopAsyncIteration
        self._open = opened
        self._open_records = records_of(opened, self._chunks.streams[opened.entry.stream_id])
        self._ends = opened.ends()
        self._next_end(opened.header.first_record)

    def _next_end(self, first: int) -> None:
        """Have the records of the open chunk up to its end at hand, but for the last one; or of the next with it."""
        for last, behind in self._ends:
            self._span = first, last, behind
            self._at_hand = islice(self._open_records, max(0, last - first))
            self._records.take(self._at_hand)
            return
        self._forget_open()

    def _forget_open(self) -> None:
        self._open, self._open_records, self._at_hand = None, iter(()), iter(())
        self._records.take(self._at_hand)

    def _rest(self, begun: ChunkBatch) -> ChunkBatch:
        """Of a chunk that was begun as records, and not delivered to its end."""
        chunk = begun.rest(self._positions[begun.entry])
        self._forget_open()
        self._positions[chunk.entry] = chunk.next
        return chunk

    async def _next_chunk(self, *, copied: bool = False) -> ChunkBatch | None:
        """The next chunk; None when everything that was asked for has been delivered."""
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
            else:  # it goes on at another broker, and so does whoever starts from its positions
                self._positions[fetched.entry] = fetched.next
        return chunk

    def _next_here(self, *, copied: bool) -> ChunkBatch | None:
        """See `Chunks.following_here`."""
        if self._closed:
            raise ClosedError("the consumer is closed")
        if self._failure is not None:
            raise self._failure
        try:
            return self._chunks.following_here(copied=copied)
        except KeraError as error:
            self._failure = error
            raise

    def __aiter__(self) -> AsyncIterator[Record]:
        return self.records()

    async def close(self) -> None:
        """Stop fetching. Whoever waits for more gets `ClosedError`; batches that were delivered stay as they are."""
        self._closed = True
        await self._fetcher.close()
        self._chunks.clear()
        self._forget_open()


def _given(positions: Positions, streamlet_id: int, entry: int, stream: StreamDescription) -> Position:
    try:
        return Position(*positions[streamlet_id][entry])
    except (KeyError, IndexError):
        raise InvalidArgument(
            f"no position is given for streamlet {streamlet_id}, entry {entry} of stream {stream.name!r}",
            stream=stream.name,
            streamlet_id=streamlet_id,
        ) from None
