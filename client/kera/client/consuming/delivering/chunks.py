"""The chunks of what was fetched, as batches: also when they are not where they were, or newer than what is known.

What was pushed lies in the broker's memory, and may be overwritten before it is opened; then the rest is read again, as
a copy. A chunk may have columns that were added to its stream since; then the stream is looked up again. Both take
their time, and whoever gives up waiting for them misses nothing: the next one to ask goes on there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from kera.client.chunk_batch import ChunkBatch
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.fetch import Fetched, NewerSchema, Overwritten, Wanted, batches_of
from kera.client.consuming.fetching.fetcher import Fetcher
from kera.client.settings import ConsumerSettings
from kera.client.types import StreamDescription
from kera.core.base.ids import EntryId, Position


class Chunks:
    """The chunks that were fetched last."""

    def __init__(self, cluster: Cluster, settings: ConsumerSettings, *, punctuations: bool = False) -> None:
        """`punctuations`: whether they come as well, as batches without records."""
        self._punctuations = punctuations
        self._cluster = cluster
        self._settings = settings
        self.streams: dict[int, StreamDescription] = {}
        """By id: those that are read, each with the newest columns that a chunk had."""
        self._batches: Iterator[ChunkBatch] = iter(())
        self._rest: Wanted | NewerSchema | None = None
        """The range to read again, as it was overwritten before delivery or given back; or data with columns not known
        yet."""
        self._copied = False
        """Whether the next one is copied: all its values are looked at."""
        self._begins: dict[EntryId, tuple[int, Position | None]] = {}
        """For entries that are read from a record within a chunk: its ordinal, and the position of that chunk. It is
        the first chunk that comes; until then the position is None. The chunk may come again, as `again` or
        `give_back`."""

    def begin(self, entry: EntryId, record: int) -> None:
        """Leave out the records before ordinal `record` in the first chunk of `entry`; call it before `open`."""
        self._begins[entry] = record, None

    def open(self, fetched: Fetched) -> None:
        """Go on with these; of what was there before, all has been delivered, or is wanted no more."""
        self._batches, self._rest = self._batches_of(fetched), None

    def clear(self) -> None:
        """Nothing more is wanted of what was fetched."""
        self._batches, self._rest = iter(()), None

    async def following(self, *, copied: bool) -> ChunkBatch | None:
        """The next chunk; None: all have been delivered. Raises `CorruptChunk`, and what reading again raises."""
        while (chunk := self.following_here(copied=copied)) is None and self._rest is not None:
            await self._open_rest(self._rest)
        return chunk

    def following_here(self, *, copied: bool) -> ChunkBatch | None:
        """The next chunk, if there is no need to wait for it; None: `following` knows whether there is one.

        It is for itself because chunks may be small, and many in what comes at once: a coroutine for each has a price.
        """
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
        """A copy of a chunk that was pushed, and is not in its broker's memory any more."""
        found = await self._read_again(Wanted(chunk.entry, chunk.start, chunk.next))
        (copy,) = chain.from_iterable(map(self._batches_of, found))
        return copy

    def give_back(self, batches: Sequence[ChunkBatch]) -> None:
        """The last that were given out, of one entry, come again: they are read again, as copies."""
        end: Position | None = batches[-1].next
        if self._rest is not None:  # it goes on there
            end = self._rest.end if isinstance(self._rest, Wanted) else self._rest.rest.next
        self._rest = Wanted(batches[0].entry, batches[0].start, end)

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
        """Copies of a range that was pushed and is not there any more."""
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
