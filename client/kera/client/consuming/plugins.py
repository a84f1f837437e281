"""Plug-ins of a consumer; a consumer works without any.

    Plugins        of one consumer: the hooks of its fetcher, and the hooks around its deliveries
    DeliveryHooks  wrap the deliveries of a consumer, see the methods

They are chosen when a consumer is made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol

from kera.client.chunk_batch import ChunkBatch
from kera.client.consuming.fetching.hooks import MakeFetchHooks
from kera.client.types import Record, StreamDescription


class DeliveryHooks(Protocol):
    """Wraps the deliveries of one consumer. Each method returns the same items in the same order."""

    def batches(self, given: AsyncIterator[ChunkBatch]) -> AsyncIterator[ChunkBatch]:
        """Wrap an iteration over batches."""
        ...

    def records(self, given: AsyncIterator[Record]) -> AsyncIterator[Record]:
        """Wrap an iteration over records."""
        ...

    async def next_batches(self, coming: Awaitable[list[ChunkBatch]]) -> list[ChunkBatch]:
        """Wrap a call that returns batches."""
        ...

    async def next_records(self, coming: Awaitable[list[Record]]) -> list[Record]:
        """Wrap a call that returns records."""
        ...


class Plugins(NamedTuple):
    """The plug-ins of one consumer."""

    at_fetcher: MakeFetchHooks | None = None
    at_delivery: Callable[[Mapping[int, StreamDescription]], DeliveryHooks] | None = None
    """Called with the streams that the consumer reads; the mapping is filled when it starts."""

    def delivery(self, streams: Mapping[int, StreamDescription]) -> DeliveryHooks | None:
        """Return the hooks around the deliveries of a consumer of `streams`; None: there are none."""
        return None if self.at_delivery is None else self.at_delivery(streams)


NO_PLUGINS = Plugins()
