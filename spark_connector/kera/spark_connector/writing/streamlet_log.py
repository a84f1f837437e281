"""The chunks of one writer in one streamlet, as ``streamlet_writer`` wants them: appended, and read back.

A broker that has a chunk with a sequence already says where, if the chunk is in its memory. Of one that is on its disk
only it says that it is there; then it is looked for: from the last one that was found on, else in the segments of the
entry, the newest first. That reads what has been written since, but only when a writer comes back after so long.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, cast

import pyarrow as pa

from kera.core.errors import DataLost, InternalError, Unavailable
from kera.core.ids import EntryId, Position
from kera.core.telemetry import get_logger

if TYPE_CHECKING:
    from kera.client import Appender, AppendResult, ChunkBatch, Client

log = get_logger("kera.spark")


class StreamletLog:
    """A `kera.spark_connector.writing.streamlet_writer.Log` in a cluster."""

    def __init__(self, client: Client, appender: Appender, streamlet_id: int) -> None:
        self._client = client
        self._appender = appender
        self._streamlet_id = streamlet_id
        self._last: AppendResult | None = None
        """What the last append has answered."""
        self._found: Position | None = None
        """Where the last chunk ended that was read back."""

    async def append(self, rows: pa.RecordBatch, sequence: int) -> tuple[int, bool]:
        """See `kera.spark_connector.writing.streamlet_writer.Log.append`."""
        self._last = appended = await self._appender.append(self._streamlet_id, rows, sequence)
        return appended.record_count, appended.duplicate

    async def stored(self, sequence: int) -> pa.RecordBatch | None:
        """See `kera.spark_connector.writing.streamlet_writer.Log.stored`. To be asked right after `append`."""
        if self._last is None:
            raise InternalError("what is there is read after an append has found it")
        try:
            chunk = await self._chunk(self._last.entry, self._last.position, sequence)
        except DataLost:  # while it was looked for
            chunk = None
        if chunk is None:
            log.warning(
                "a chunk that was written before has been removed by retention; it counts as written",
                stream=self._appender.stream.name,
                streamlet_id=self._streamlet_id,
                sequence=sequence,
            )
            return None
        self._found = chunk.next
        return chunk.batch

    async def _chunk(self, entry: EntryId, position: Position | None, sequence: int) -> ChunkBatch | None:
        if position is not None:
            found = await self._find(entry, position, None, sequence)
            if found is None:
                # It is acknowledged at the stream's level, and so can be read; but readers may be behind for a moment.
                raise Unavailable(
                    f"the chunk at {tuple(position)} cannot be read yet",
                    stream=self._appender.stream.name,
                    streamlet_id=self._streamlet_id,
                )
            return found
        if self._found is not None:
            return await self._find(entry, self._found, None, sequence)
        stream = self._appender.stream.name
        start = (await self._client.bounds(stream))[self._streamlet_id][entry.entry].start
        for piece in reversed(await self._client.segments(stream, self._streamlet_id, entry.entry, start)):
            found = await self._find(entry, piece.start, piece.end, sequence)
            if found is not None:
                return found
        return None

    async def _find(self, entry: EntryId, start: Position, end: Position | None, sequence: int) -> ChunkBatch | None:
        """The chunk in a range of the entry; `end` None: up to what there is now."""
        from kera.client import ConsumerSettings  # late: Spark imports this to look for data sources

        appender = self._appender
        name = appender.producer_id, appender.producer_epoch, sequence
        settings = ConsumerSettings.load(shared_memory="never", joined_bytes_max=0)
        found = self._client.read_range(
            appender.stream.name, self._streamlet_id, entry.entry, start, end, settings=settings
        )
        async with contextlib.aclosing(cast("AsyncGenerator[ChunkBatch, None]", found)) as chunks:
            async for chunk in chunks:
                header = chunk.header
                if (header.producer_id, header.producer_epoch, header.sequence) == name:
                    return chunk
        return None
