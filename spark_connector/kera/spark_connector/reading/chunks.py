"""The chunks of a range of one entry, of exactly the incarnation of the stream that the range was planned with.

Missing chunks are an error. With ``failOnDataLoss=false`` they are skipped, and `Losses` records why.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from kera.core.base.ids import Position
from kera.core.errors import DataLost, InvalidArgument, InvalidCursor, KeraError, StreamletOutOfRange, UnknownStream
from kera.spark_connector.planning import Piece
from kera.spark_connector.planning.offsets import StreamRecreated

if TYPE_CHECKING:
    from kera.client import ChunkBatch, Client, ConsumerSettings

GONE = (DataLost, InvalidArgument, InvalidCursor, StreamletOutOfRange, StreamRecreated, UnknownStream)
"""Errors of brokers about planned places that no longer exist."""


@dataclass
class Losses:
    """The reasons why parts of a range were skipped."""

    reasons: list[str] = field(default_factory=list)


async def chunks(
    client: Client, piece: Piece, settings: ConsumerSettings, losses: Losses
) -> AsyncGenerator[ChunkBatch, None]:
    """Yield the chunks of `piece`, in order.

    Raises `StreamRecreated` if the stream was deleted and created again, and the errors of `Client.read_range`.

    A caller that stops early closes the generator (`contextlib.aclosing`), because the client fetches ahead.
    """
    start = piece.start
    while start < piece.end:
        try:
            await _require_incarnation(client, piece)
            found = client.read_range(
                piece.stream, piece.entry.streamlet_id, piece.entry.entry, start, piece.end, settings=settings
            )
            async with contextlib.aclosing(cast("AsyncGenerator[ChunkBatch, None]", found)) as source:
                async for chunk in source:
                    start = chunk.next
                    yield chunk
            return
        except GONE as error:
            if piece.fail_on_data_loss:
                raise
            losses.reasons.append(error.message)
            place = available_from(error)
            if place is None or place <= start:
                return
            start = place


async def _require_incarnation(client: Client, piece: Piece) -> None:
    stream_id = piece.entry.stream_id
    description = await client.describe(piece.stream)
    if description.stream_id != stream_id:  # the client may have cached an earlier incarnation
        description = await client.admin.describe_stream(piece.stream)
    if description.stream_id != stream_id:
        raise recreated(piece.stream, stream_id, description.stream_id)


def recreated(stream: str, before: int, stream_id: int) -> StreamRecreated:
    """Return the error for a planned stream that was deleted and created again."""
    return StreamRecreated(
        f"stream '{stream}' was deleted and created again while it was read: it was incarnation {before}, now it is"
        f" {stream_id}",
        stream=stream,
        stream_id=stream_id,
    )


def available_from(error: KeraError) -> Position | None:
    """Return where the available records go on after a loss; None: unknown."""
    place = error.attributes.get("available_from")
    return Position(*place) if isinstance(error, DataLost) and place else None
