"""The chunks of one writer in one streamlet, as ``streamlet_writer`` wants them: appended, and read back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pyarrow as pa

from kera.core.base.ids import Position
from kera.core.errors import InternalError
from kera.spark_connector.writing.stored_chunks import StoredChunks

if TYPE_CHECKING:
    from kera.client import Appender, AppendResult, Client


class StreamletLog:
    """A `kera.spark_connector.writing.streamlet_writer.Log` in a cluster."""

    def __init__(
        self, client: Client, appender: Appender, streamlet_id: int, *, took: Callable[[float], None] | None = None
    ) -> None:
        """`took` is told how many seconds each append takes."""
        self._chunks = StoredChunks(
            client, appender.stream.name, streamlet_id, appender.producer_id, appender.producer_epoch
        )
        self._appender = appender
        self._took = took
        self._last: AppendResult | None = None
        """The result of the last append."""
        self._found: Position | None = None
        """Where the last chunk ended that was read back."""

    async def append(self, rows: pa.RecordBatch, sequence: int) -> tuple[int, bool]:
        """See `kera.spark_connector.writing.streamlet_writer.Log.append`."""
        begun_s = time.monotonic()
        self._last = appended = await self._appender.append(self._chunks.streamlet_id, rows, sequence)
        if self._took is not None:
            self._took(time.monotonic() - begun_s)
        return appended.record_count, appended.duplicate

    async def stored(self, sequence: int) -> pa.RecordBatch | None:
        """See `kera.spark_connector.writing.streamlet_writer.Log.stored`. To be asked right after `append`."""
        if self._last is None:
            raise InternalError("what is there is read after an append has found it")
        chunk = await self._chunks.find(self._last.entry, self._last.position, sequence, self._found)
        if chunk is None:
            return None
        self._found = chunk.next
        return chunk.batch
