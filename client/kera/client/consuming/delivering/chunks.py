"""Fetched chunks as batches: also when they were overwritten, or have columns that are not known yet.

Pushed chunks lie in the broker's memory, and may be overwritten before they are opened; then the rest is read again, as
a copy. A chunk may have columns that were added to its stream since; then the stream is looked up again. Both take
time, and a cancelled wait loses nothing: the next call goes on there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, takewhile

from kera.client.chunk_batch import ChunkBatch
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.fetch import Fetched, NewerSchema, Overwritten, Wanted, batches_of
from kera.client.consuming.fetching.fetcher import Fetcher
from kera.client.settings import ConsumerSettings
from kera.client.types import StreamDescription
from kera.core.base.ids import EntryId, Position


class Chunks:
    """The chunks of the last fetched data."""

    def __init__(self, cluster: Cluster, settings: ConsumerSettings, *, punctuations: bool = False) -> None:
        """`punctuations`: also return punctuations, as batches without records."""
        self._punctuations = punctuations
        self._cluster = cluster
        self._settings = settings
        self.streams: dict[int, StreamDescription] = {}
        """Streams that are read, by id, each with the newest columns that a chunk had."""
        self._batches: Iterator[ChunkBatch] = iter(())
        self._rest: Wanted | NewerSchema | None = None
        """The range to read again, because it was overwritten before delivery or given back; or data with columns that
        are not known yet."""
        self._given_back: deque[ChunkBatch] = deque()
        """Batches that were given back and are in this process's memory; they come before all others."""
        self._copied = False
        """Whether the next chunk is copied: the caller will look at all its values."""
        self._begins: dict[EntryId, tuple[int, Position | None]] = {}
        """For entries that are read from a record within a chunk: the record's ordinal, and the position of its chunk.
        This is the first chunk of the entry; until it comes the position is None. It may come again, from `again` or
        after `give_back`."""

    def begin(self, entry: EntryId, record: int) -> None:
        """Leave out the records before ordinal `record` in the first chunk of `entry`; call it before `open`."""
        self._begins[entry] = record, None

    def open(self, fetched: Fetched) -> None:
        """Go on with new data; drops the rest of the data before."""
        self._batches, self._rest = self._batches_of(fetched), None

    def clear(self) -> None:
        """Drop the rest of the fetched data."""
        self._batches, self._rest = iter(()), None
        self._given_back.clear()

    async def following(self, *, copied: bool) -> ChunkBatch | None:
        """Return the next chunk; None: all were returned. Raises `CorruptChunk`, and the errors of reading again."""
        while (chunk := self.following_here(copied=copied)) is None and self._rest is not None:
            await self._open_rest(self._rest)
        return chunk

    def following_here(self, *, copied: bool) -> ChunkBatch | None:
        """Return the next chunk if that needs no waiting; None: call `following` to see whether there is one.

        A separate function because fetched data may have many small chunks, and a coroutine for each would be costly.
        """
        if self._given_back:
            return self._given_back.popleft()
        self._copied = copied
        if self._rest is not None:
            return None
        try:
            return next(self._batches, None)
        except Overwritten as gone:
            self._rest = gone.rest
        except NewerSchema as newer:
            self._rest = newer
        return None

    async def again(self, chunk: ChunkBatch) -> ChunkBatch:
        """Return a copy of a pushed chunk that is no longer in its broker's memory."""
        found = await self._read_again(Wanted(chunk.entry, chunk.start, chunk.next))
        (copy,) = chain.from_iterable(map(self._batches_of, found))
        return copy

    def give_back(self, batches: Sequence[ChunkBatch]) -> None:
        """Return the last batches again. From the first one in a broker's memory on, they are read again, as copies.

        Those that are read again are of one entry.
        """
        kept = list(takewhile(lambda batch: not batch.pushed, batches))
        pushed = list(batches)[len(kept) :]
        if pushed:
            end: Position | None = pushed[-1].next
            if self._rest is not None:  # the rest follows these batches: read both in one go
                end = self._rest.end if isinstance(self._rest, Wanted) else self._rest.rest.next
            self._rest = Wanted(pushed[0].entry, pushed[0].start, end)
        self._given_back.extendleft(reversed(kept))

    def _batches_of(self, fetched: Fetched) -> Iterator[ChunkBatch]:
        batches = batches_of(
            fetched,
            self.streams[fetched.entry.stream_id],
            self._settings,
            copying=lambda: self._copied,
            punctuations=self._punctuations,
        )
        return self._begun(batches) if fetched.entry in self._begins else batches

    def _begun(self, batches: Iterator[ChunkBatch]) -> Iterator[ChunkBatch]:
        for batch in batches:
            record, position = self._begins[batch.entry]
            if position is None:
                position = batch.start
                self._begins[batch.entry] = record, position
            if batch.start == position:
                yield from batch.since(record)
            else:
                yield batch

    async def _open_rest(self, rest: Wanted | NewerSchema) -> None:
        if isinstance(rest, NewerSchema):
            stream_id = rest.rest.entry.stream_id
            self.streams[stream_id] = await self._cluster.with_schema(self.streams[stream_id], rest.schema_id)
            self._batches = chain(self._batches_of(rest.rest), self._batches)
        else:
            again = await self._read_again(rest)
            self._batches = chain(chain.from_iterable(map(self._batches_of, again)), self._batches)
        self._rest = None

    async def _read_again(self, rest: Wanted) -> list[Fetched]:
        """Fetch copies of a range that was pushed and is no longer available."""
        settings = self._settings.model_copy(update={"shared_memory": "never"})
        fetcher = Fetcher(self._cluster, settings, complete=True)
        fetcher.add(self.streams[rest.entry.stream_id], rest)
        found = []
        try:
            while (item := await fetcher.fetched()) is not None:
                found.append(item)
        finally:
            await fetcher.close()
        return found
