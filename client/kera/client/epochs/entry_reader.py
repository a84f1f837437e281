"""Reads one entry of a streamlet for epochs: what comes of it, marked with its epoch, and how far it has got.

It fetches ahead by itself, so that an entry that is held up holds up no other, and only once there is something to
fetch: of ten thousand entries that nobody writes to, none costs a fetch.
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
    """A chunk at hand that has not been given out yet."""

    epoch: int
    chunk: ChunkBatch
    resume_at: Position
    """A reader that begins there finds it in the same epoch: before the punctuation that opened the epoch, if one
    did."""
    size: int
    """In bytes, headers and all."""


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
        """`first_epoch`: what is of epochs before is left out; None: nothing is. `copied`: out of brokers' memories."""
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
        """Where the punctuation is that opened the epoch of what comes next."""
        self.pending_bytes = 0
        """Size of the chunks at hand."""
        self._corrupt: CorruptChunk | None = None
        """The error that ended the reading."""
        self._fetcher: Fetcher | None = None
        self._chunks = Chunks(cluster, settings, punctuations=True)
        self._chunks.streams[stream.stream_id] = stream
        self.read_to: Position = wanted.start
        """Up to there it was read."""
        self._fetched_to: Position = wanted.start
        """There goes on what comes next: behind a move, not where the last chunk before it ends."""
        self._end: Position = wanted.start
        self._promised_us: int = NO_TIME
        self._promised_at: Position = EARLIEST
        self._exempt = False
        """Nothing was ever written to it, and nobody promises anything: it holds up nothing."""

    @property
    def stream(self) -> StreamDescription:
        """With the newest columns that a chunk had."""
        return self._chunks.streams[self._stream.stream_id]

    @property
    def settled_us(self) -> int:
        """Nothing older than this comes behind what was read, but to be counted where it comes."""
        if self._promised_us > self._marker.watermark_us and self.read_to >= self._promised_at:
            return self._promised_us
        return self._marker.watermark_us

    def reached(self) -> Reached[EntryId]:
        """How far it has got."""
        pending = self._pending[0].epoch if self._pending else None
        if self._exempt:
            return Reached(self.entry, pending, None)
        return Reached(self.entry, pending, epoch_of(self.settled_us, self._epoch_us))

    def learn(self, bounds: EntryBounds, *, by_clock: bool) -> None:
        """Learn the brokers' present bounds of the entry. `by_clock`: they have to promise; one that does not now will
        again.

        Raises `DataLost`: something of it was removed before any of it was read.
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
        # Of one that has moved the end is not `EARLIEST` any more.
        is_empty = bounds.watermark_us is None and not bounds.next_record and self._marker.watermark_us == NO_TIME
        self._exempt = is_empty and bounds.promised_us is None and not by_clock
        if bounds.promised_us is not None and bounds.promised_us >= self._promised_us:
            self._promised_us, self._promised_at = bounds.promised_us, bounds.promised_at

    @property
    def has_more(self) -> bool:
        """Whether it is known that there is something to read."""
        return self.read_to < self._end

    async def read(self, epoch: int | None) -> None:
        """Read what has come, up to something behind `epoch`; if nothing has, wait. Raises what a consumer does.

        None: up to the first thing that is of any.
        """
        if self._corrupt is not None:
            raise self._corrupt  # what comes behind it must not be given out as if it were not there
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
        except DataLost as error:  # which says how a consumer goes on, that reads what is left of an epoch, too
            raise self._gone(error) from error

    def is_open(self, epoch: int | None) -> bool:
        """Whether more of an epoch may come behind what is at hand; None: whether nothing is at hand."""
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
        """Up to there it was taken: whoever begins there finds the rest in the same epochs."""
        return self._pending[0].resume_at if self._pending else self._opened_at or self.read_to

    async def read_again(self, epoch: int) -> None:
        """Read chunks of a closed epoch again that are no longer in their broker's memory. Raises a consumer's
        errors.
        """
        for number, held in enumerate(list(self._pending)):
            if held.epoch != epoch:
                return
            if not held.chunk.intact:
                self._pending[number] = held._replace(chunk=await self._chunks.again(held.chunk))

    def is_intact(self, epoch: int) -> bool:
        """Whether all of an epoch that is closed is where it was, if it is in a broker's memory."""
        for held in self._pending:
            if held.epoch != epoch:
                return True
            slot = held.chunk.slot
            if slot is not None and not slot.intact:
                return False
        return True

    @property
    def throttled_ms(self) -> int:
        """For how long brokers have held answers back, as a quota was used up."""
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
        """Raise `EpochPassed` if there is something of an epoch that was given out without it."""
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
