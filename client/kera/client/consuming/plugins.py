"""The places at which something can be plugged into a consumer. Nothing of it is needed to consume.

    Plugins        of one consumer: the hooks of its fetcher, and what is around all that it gives out
    DeliveryHooks  around what a consumer gives out, see the methods

They are chosen when a consumer is made. A consumer without plug-ins calls nothing for them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol

from kera.client.chunk_batch import ChunkBatch
from kera.client.consuming.fetching.hooks import MakeFetchHooks
from kera.client.types import Record, StreamDescription


class DeliveryHooks(Protocol):
    """Around what one consumer gives out. Each method returns the same items in the same order."""

    def batches(self, given: AsyncIterator[ChunkBatch]) -> AsyncIterator[ChunkBatch]:
        """Around a loop over batches."""
        ...

    def records(self, given: AsyncIterator[Record]) -> AsyncIterator[Record]:
        """Around a loop over records."""
        ...

    async def next_batches(self, coming: Awaitable[list[ChunkBatch]]) -> list[ChunkBatch]:
        """Around a call that returns batches."""
        ...

    async def next_records(self, coming: Awaitable[list[Record]]) -> list[Record]:
        """Around a call that returns records."""
        ...


class Plugins(NamedTuple):
    """The plug-ins of one consumer."""

    at_fetcher: MakeFetchHooks | None = None
    at_delivery: Callable[[Mapping[int, StreamDescription]], DeliveryHooks] | None = None
    """Called with the streams that the consumer reads, which are known when it has started."""

    def delivery(self, streams: Mapping[int, StreamDescription]) -> DeliveryHooks | None:
        """The hooks around what a consumer of `streams` gives out; None: there are none."""
        return None if self.at_delivery is None else self.at_delivery(streams)


NO_PLUGINS = Plugins()
