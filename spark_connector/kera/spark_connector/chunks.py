"""The chunks of a range of one entry, of exactly the incarnation of the stream that the range was planned with."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, cast

from kera.core.ids import EntryId, Position
from kera.spark_connector.offsets import StreamRecreated

if TYPE_CHECKING:
    from kera.client import ChunkBatch, Client


async def chunks(
    client: Client, stream: str, entry: EntryId, start: Position, end: Position
) -> AsyncGenerator[ChunkBatch, None]:
    """The chunks from `start` up to exactly `end`; raises `StreamRecreated` when `stream` is another one now.

    Close it (`contextlib.aclosing`) when not all of it is taken: the client fetches ahead.
    """
    description = await client.describe(stream)
    if description.stream_id != entry.stream_id:  # it may be the client that remembers an earlier one
        description = await client.admin.describe_stream(stream)
    if description.stream_id != entry.stream_id:
        raise StreamRecreated(
            f"stream '{stream}' was deleted and created again while it was read: it was incarnation"
            f" {entry.stream_id}, now it is {description.stream_id}",
            stream=stream,
            stream_id=description.stream_id,
        )
    found = client.read_range(stream, entry.streamlet_id, entry.entry, start, end)
    async with contextlib.aclosing(cast("AsyncGenerator[ChunkBatch, None]", found)) as source:
        async for chunk in source:
            yield chunk
