"""The chunks of one writer in one streamlet, read back.

A broker that has a chunk with a sequence already says where, if the chunk is in its memory. Of one that is on its disk
only it says that it is there; then it is looked for: from the last one that was found on, else in the segments of the
entry, the newest first. That reads what has been written since, but only when a writer comes back after so long.
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
        """The chunk `sequence`, which the broker says is there; None when it has been removed since.

        `position`: where it is, if the broker has said so; `after`: where the one before it ended, if that is known.
        Raises `Unavailable` when it cannot be read yet.
        """
        try:
            chunk = await self._chunk(entry, position, sequence, after)
        except DataLost:  # while it was looked for
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
                # It is acknowledged at the stream's level, and so can be read; but readers may be behind for a moment.
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
        """The chunk in a range of the entry; `end` None: up to what there is now."""
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
