"""Reads back the stored chunks of one writer in one streamlet.

If a broker already has a chunk of a sequence number in its memory, it replies with the chunk's position. If the chunk
is only on its disk, the broker replies without a position. The chunk is then searched: from the end of the last found
one on, else in the segments of the entry, the newest first. That reads everything written since, but happens only if a
writer returns after a long time.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from kera.core.base.ids import EntryId, Position
from kera.core.base.telemetry import get_logger
from kera.core.errors import DataLost, Unavailable

if TYPE_CHECKING:
    from kera.client import ChunkBatch, Client

log = get_logger("kera.spark")


@dataclass(frozen=True)
class StoredChunks:
    """Finds and reads back stored chunks of one writer in one streamlet."""

    client: Client
    stream: str
    streamlet_id: int
    producer_id: int
    producer_epoch: int

    async def find(
        self, entry: EntryId, position: Position | None, sequence: int, after: Position | None
    ) -> ChunkBatch | None:
        """Return the chunk `sequence`, which the broker has reported as stored; None: it was removed since.

        `position`: the chunk's position, if the broker has given it; `after`: the end of the chunk before it, if known.
        Raises `Unavailable` if the chunk cannot be read yet.
        """
        try:
            chunk = await self._chunk(entry, position, sequence, after)
        except DataLost:  # retention removed it during the search
            chunk = None
        if chunk is None:
            log.warning(
                "a chunk that was written before has been removed by retention; it counts as written",
                stream=self.stream,
                streamlet_id=self.streamlet_id,
                sequence=sequence,
            )
        return chunk

    async def _chunk(
        self, entry: EntryId, position: Position | None, sequence: int, after: Position | None
    ) -> ChunkBatch | None:
        if position is not None:
            found = await self._in_range(entry, position, None, sequence)
            if found is None:
                # The chunk is acknowledged, so it can be read; but readers may lag behind for a moment.
                raise Unavailable(
                    f"the chunk at {tuple(position)} cannot be read yet",
                    stream=self.stream,
                    streamlet_id=self.streamlet_id,
                )
            return found
        if after is not None:
            return await self._in_range(entry, after, None, sequence)
        start = (await self.client.bounds(self.stream))[self.streamlet_id][entry.entry].start
        for piece in reversed(await self.client.segments(self.stream, self.streamlet_id, entry.entry, start)):
            found = await self._in_range(entry, piece.start, piece.end, sequence)
            if found is not None:
                return found
        return None

    async def _in_range(
        self, entry: EntryId, start: Position, end: Position | None, sequence: int
    ) -> ChunkBatch | None:
        """Return the chunk if it is in a range of the entry; `end` None: up to the present head."""
        from kera.client import ConsumerSettings  # late: Spark imports this to look for data sources

        name = self.producer_id, self.producer_epoch, sequence
        settings = ConsumerSettings.load(shared_memory="never", joined_bytes_max=0)
        found = self.client.read_range(self.stream, self.streamlet_id, entry.entry, start, end, settings=settings)
        async with contextlib.aclosing(cast("AsyncGenerator[ChunkBatch, None]", found)) as chunks:
            async for chunk in chunks:
                header = chunk.header
                if (header.producer_id, header.producer_epoch, header.sequence) == name:
                    return chunk
        return None
