"""Reads one entry of a streamlet for epochs: its chunks, marked with their epochs, and its progress.

Each entry has its own fetcher, so that an entry that is held up delays no other. It begins to fetch only when there are
data: ten thousand entries without writers cost no fetch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

from kera.client.chunk_batch import ChunkBatch
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.fetch import Wanted
from kera.client.consuming.delivering.chunks import Chunks
from kera.client.consuming.fetching.fetcher import Fetcher
from kera.client.consuming.latency.hooks import reader_latency
from kera.client.epochs.marks import Marker, epoch_of
from kera.client.epochs.merging import Reached
from kera.client.settings import ConsumerSettings
from kera.client.types import EntryBounds, StreamDescription
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.errors import CorruptChunk, DataLost, EpochPassed
from kera.core.format.punctuation import NO_TIME

LOOK_AGAIN_S = 1.0
"""Pause before brokers are asked again, when expected records may have been lost with one of them."""


class Held(NamedTuple):
    """A chunk at hand that has not been delivered yet."""

    epoch: int
    chunk: ChunkBatch
    resume_at: Position
    """Start for a reader that is to find the chunk in the same epoch: before the punctuation that opened the epoch, if
    there is one."""
    size: int
    """Size in bytes, including headers."""


class EntryReader:
    """Reads one entry ahead, marks its records with their epochs, and reports the progress of the entry."""

    def __init__(
        self,
        cluster: Cluster,
        stream: StreamDescription,
        wanted: Wanted,
        settings: ConsumerSettings,
        *,
        epoch_us: int,
        first_epoch: int | None,
        copied: bool = False,
    ) -> None:
        """`first_epoch`: leave out earlier epochs; None: keep all. `copied`: copy chunks out of brokers' memory."""
        self.entry: EntryId = wanted.entry
        self._stream = stream
        self._cluster = cluster
        self._wanted = wanted
        self._settings = settings
        self._epoch_us = epoch_us
        self._first_epoch = first_epoch
        self._copied = copied
        self._marker = Marker(epoch_us)
        self._pending: deque[Held] = deque()
        self._opened_at: Position | None = None
        """Position of the punctuation that opened the epoch of the next chunk, if there is one."""
        self.pending_bytes = 0
        """Size of the chunks at hand."""
        self._corrupt: CorruptChunk | None = None
        """The error that ended the reading."""
        self._fetcher: Fetcher | None = None
        self._chunks = Chunks(cluster, settings, punctuations=True)
        self._chunks.streams[stream.stream_id] = stream
        self.read_to: Position = wanted.start
        """Position behind the data read so far."""
        self._fetched_to: Position = wanted.start
        """Position of the next data: behind a move, this differs from the end of the last chunk."""
        self._end: Position = wanted.start
        self._promised_us: int = NO_TIME
        self._promised_at: Position = EARLIEST
        self._exempt = False
        """Whether it holds up no epoch: nothing was ever written to it, and there is no promise."""

    @property
    def stream(self) -> StreamDescription:
        """The stream, with the newest columns that a chunk had."""
        return self._chunks.streams[self._stream.stream_id]

    @property
    def settled_us(self) -> int:
        """Time before which no records follow behind those that were read, except late ones."""
        if self._promised_us > self._marker.watermark_us and self.read_to >= self._promised_at:
            return self._promised_us
        return self._marker.watermark_us

    def reached(self) -> Reached[EntryId]:
        """Return how far it has got."""
        pending = self._pending[0].epoch if self._pending else None
        if self._exempt:
            return Reached(self.entry, pending, None)
        return Reached(self.entry, pending, epoch_of(self.settled_us, self._epoch_us))

    def learn(self, bounds: EntryBounds, *, by_clock: bool) -> None:
        """Take the brokers' present bounds of the entry.

        `by_clock`: brokers punctuate by their clock, so a broker without a promise now will give one later. Raises
        `DataLost` if records of the entry were removed before any of it was read.
        """
        if self.read_to == EARLIEST and bounds.first_record:
            (_, streamlet_id, entry) = self.entry
            raise DataLost(
                f"entry {entry} of streamlet {streamlet_id} of stream {self._stream.name!r}: its first"
                f" {bounds.first_record} records were removed before they were read; start='earliest' goes on with the"
                " first epoch that is whole",
                stream=self._stream.name,
                streamlet_id=streamlet_id,
                entry=entry,
                lost_from=EARLIEST,
                available_from=bounds.start,
            )
        self._end = max(self._end, bounds.end)
        # The end does not show it: the end of an empty entry that has moved is not `EARLIEST`.
        is_empty = bounds.watermark_us is None and not bounds.next_record and self._marker.watermark_us == NO_TIME
        self._exempt = is_empty and bounds.promised_us is None and not by_clock
        if bounds.promised_us is not None and bounds.promised_us >= self._promised_us:
            self._promised_us, self._promised_at = bounds.promised_us, bounds.promised_at

    @property
    def has_more(self) -> bool:
        """Whether there is more to read, as far as known."""
        return self.read_to < self._end

    async def read(self, epoch: int | None) -> None:
        """Read fetched chunks until `epoch` is complete; wait if there are none. Raises the errors of a consumer.

        `epoch`: None: read up to the first chunk of any epoch.
        """
        if self._corrupt is not None:
            raise self._corrupt  # chunks behind it must not be delivered as if it did not exist
        if not self.has_more:
            return
        if self._fetcher is None:
            hooks = reader_latency(self._cluster, self._settings.consumer_group)
            self._fetcher = Fetcher(self._cluster, self._settings, make_hooks=hooks)
            self._fetcher.add(self._stream, Wanted(self.entry, self.read_to, None))
        try:
            chunk = self._chunks.following_here(copied=self._copied)
            if chunk is None:
                chunk = await self._following(self._fetcher)
            while chunk is not None:
                self._take(chunk)
                chunk = self._chunks.following_here(copied=self._copied) if self.is_open(epoch) else None
        except CorruptChunk as error:
            self._corrupt = error
            raise
        except DataLost as error:  # its advice is for consumers, which may read the rest of an epoch
            raise self._gone(error) from error

    def is_open(self, epoch: int | None) -> bool:
        """Return whether more chunks of an epoch may follow; for None, whether there are no chunks at hand."""
        if epoch is None:
            return not self._pending
        return not self._exempt and self.settled_us < (epoch + 1) * self._epoch_us

    def _gone(self, error: DataLost) -> DataLost:
        (_, streamlet_id, entry) = self.entry
        gap = [error.attributes.get(name, "an unknown position") for name in ("lost_from", "available_from")]
        reason = error.attributes.get("reason")
        return DataLost(
            f"stream {self._stream.name!r}, streamlet {streamlet_id}, entry {entry}: what was from {gap[0]} up to"
            f" {gap[1]} is gone{f': {reason}' if reason else ''}; epochs are given as a whole: start='earliest' goes on"
            " with the first of which nothing was removed, and the number of an epoch with that one",
            **error.attributes,
        )

    async def _following(self, fetcher: Fetcher) -> ChunkBatch | None:
        chunk = await self._chunks.following(copied=self._copied)
        if chunk is not None:
            return chunk
        if self.read_to < self._fetched_to:
            self.read_to = self._fetched_to
            return None
        try:
            async with asyncio.timeout(LOOK_AGAIN_S):
                fetched = await fetcher.fetched()
        except TimeoutError:
            return None
        if fetched is None:
            return None
        self._fetched_to = fetched.next
        self._chunks.open(fetched)
        return await self._following(fetcher)

    def _take(self, chunk: ChunkBatch) -> None:
        self.read_to = chunk.next
        before_us = self._marker.watermark_us
        marked = self._marker.mark(chunk)
        for epoch, part in marked:
            if self._first_epoch is None or epoch >= self._first_epoch:
                size = part.next.offset - part.start.offset
                self._pending.append(Held(epoch, part, self._opened_at or part.start, size))
                self.pending_bytes += size
            self._opened_at = None
        if not marked and self._opens_epoch(before_us):  # a punctuation
            self._opened_at = chunk.start

    def _opens_epoch(self, before_us: int) -> bool:
        return epoch_of(self._marker.watermark_us, self._epoch_us) > epoch_of(before_us, self._epoch_us)

    @property
    def position(self) -> Position:
        """Position behind the taken chunks: a reader that begins there finds the rest in the same epochs."""
        return self._pending[0].resume_at if self._pending else self._opened_at or self.read_to

    async def read_again(self, epoch: int) -> None:
        """Read chunks of a closed epoch again that have left the broker's memory. Raises the errors of a consumer."""
        for number, held in enumerate(list(self._pending)):
            if held.epoch != epoch:
                return
            if not held.chunk.intact:
                self._pending[number] = held._replace(chunk=await self._chunks.again(held.chunk))

    def is_intact(self, epoch: int) -> bool:
        """Return whether all chunks of a closed epoch that lie in the broker's memory are still valid."""
        for held in self._pending:
            if held.epoch != epoch:
                return True
            slot = held.chunk.slot
            if slot is not None and not slot.intact:
                return False
        return True

    @property
    def throttled_ms(self) -> int:
        """Total time that brokers have held answers back because a quota was used up."""
        return 0 if self._fetcher is None else self._fetcher.throttled_ms

    def take(self, epoch: int) -> list[ChunkBatch]:
        """Take the chunks of an epoch, which is closed and the first one with chunks at hand."""
        found = []
        while self._pending and self._pending[0].epoch == epoch:
            _, chunk, _, size = self._pending.popleft()
            found.append(chunk)
            self.pending_bytes -= size
        return found

    def check_comes_after(self, epoch: int) -> None:
        """Raise `EpochPassed` if there are chunks of an epoch that was delivered without them."""
        if not self._pending or self._pending[0].epoch > epoch:
            return
        (_, streamlet_id, entry), late = self.entry, self._pending[0].epoch
        raise EpochPassed(
            f"entry {entry} of streamlet {streamlet_id} of stream {self._stream.name!r} has got records of epoch"
            f" {late}, when epoch {epoch} was read without it: it was empty then, and had no promise that older"
            f" records are over; start={late} reads all of it and later epochs again",
            stream=self._stream.name,
            streamlet_id=streamlet_id,
            entry=entry,
            epoch=late,
        )

    async def close(self) -> None:
        """Stop fetching."""
        if self._fetcher is not None:
            await self._fetcher.close()
        self._chunks.clear()
        self._pending.clear()
