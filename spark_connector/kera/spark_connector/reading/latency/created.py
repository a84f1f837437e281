"""When the records of a micro-batch were made. The headers of chunks say so, so that some chunks have to be read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kera.core.base.ids import Position
from kera.core.errors import KeraError

if TYPE_CHECKING:
    from kera.client import Client

ENTRIES_MAX = 8
"""Maximum number of entries whose first chunk is read, all in parallel."""
LOOK_S = 0.5
"""Time limit for reading all of them, while planning waits."""


class Range(NamedTuple):
    """A range of an entry whose first chunk is read."""

    stream: str
    streamlet: int
    entry: int
    start: Position
    end: Position


async def created_us(client: Client, ranges: Sequence[Range]) -> dict[Range, int]:
    """Return ``created_us`` of the first chunk of each range, for those that were read in time."""
    found: dict[Range, int] = {}

    async def look(at: Range) -> None:
        with contextlib.suppress(KeraError):
            created = await _of_first_chunk(client, at)
            if created is not None:
                found[at] = created

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LOOK_S):
            await asyncio.gather(*map(look, ranges[:ENTRIES_MAX]))
    return found


async def _of_first_chunk(client: Client, at: Range) -> int | None:
    from kera.client import ConsumerSettings

    settings = ConsumerSettings.load().model_copy(update={"shared_memory": "never", "joined_bytes_max": 0})
    chunks = client.read_range(at.stream, at.streamlet, at.entry, at.start, at.end, bytes_max=1, settings=settings)
    async with contextlib.aclosing(chunks):  # type: ignore[type-var]  # it is a generator
        async for chunk in chunks:
            return chunk.header.created_us
    return None
