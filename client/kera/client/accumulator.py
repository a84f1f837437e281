"""The open chunk of one streamlet: records as Python lists, until it is closed and encoded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator, Mapping, Sequence
from typing import Any

from kera.client.types import Delivery
from kera.core.errors import KeraError


class Pending(Awaitable[Delivery]):
    """A record that was accepted; await it for its `Delivery`."""

    __slots__ = ("_accumulator", "_index")

    def __init__(self, accumulator: Accumulator, index: int) -> None:
        self._accumulator = accumulator
        self._index = index

    def __await__(self) -> Generator[Any, None, Delivery]:
        return self._accumulator.delivery(self._index).__await__()


class Accumulator:
    """Records of one chunk to come."""

    __slots__ = (
        "_parts",
        "created_us",
        "delivered",
        "headers",
        "keys",
        "opened_s",
        "size",
        "stream",
        "streamlet",
        "timestamps_us",
        "values",
    )

    def __init__(
        self, stream: str, streamlet: int, created_us: int, opened_s: float, delivered: asyncio.Future[Delivery]
    ) -> None:
        self.stream = stream
        self.streamlet = streamlet
        self.created_us = created_us
        """When the first record was accepted."""
        self.opened_s = opened_s
        """The same on the loop's clock."""
        self.delivered = delivered
        """Resolved with the delivery of the chunk."""
        self.size = 0
        """Estimate of the chunk's bytes, from above."""
        self.values: list[bytes | None] = []
        self.timestamps_us: list[int] = []
        self.keys: list[Sequence[bytes] | None] | None = None
        """None until the first record with a key."""
        self.headers: list[Mapping[str, bytes] | None] | None = None
        self._parts: list[tuple[int, asyncio.Future[Delivery]]] | None = None

    def append(
        self,
        value: bytes | None,
        keys: Sequence[bytes] | None,
        timestamp_us: int,
        headers: Mapping[str, bytes] | None,
        size: int,
    ) -> Pending:
        """Add a record."""
        index = len(self.values)
        self.values.append(value)
        self.timestamps_us.append(timestamp_us)
        if keys is not None and self.keys is None:
            self.keys = [None] * index
        if self.keys is not None:
            self.keys.append(keys)
        if headers is not None and self.headers is None:
            self.headers = [None] * index
        if self.headers is not None:
            self.headers.append(headers)
        self.size += size
        return Pending(self, index)

    def split(self, record_counts: Sequence[int], futures: Sequence[asyncio.Future[Delivery]]) -> None:
        """The records have become several chunks: so many in each, delivered with these futures."""
        if len(futures) == 1:
            return
        self._parts, first = [], 0
        for count, future in zip(record_counts, futures, strict=True):
            self._parts.append((first, future))
            first += count

    def fail(self, error: KeraError) -> None:
        """None of the records will be delivered."""
        self.delivered.set_exception(error)
        self.delivered.exception()  # the producer tells it, too: no warning if nobody awaits a record

    async def delivery(self, index: int) -> Delivery:
        """The delivery of record number `index`."""
        first, future = 0, self.delivered
        await _settled(future)  # until then the chunk may be split
        for start, part in self._parts or ():
            if start <= index:
                first, future = start, part
        await _settled(future)
        chunk = future.result()
        return chunk._replace(record=chunk.record + index - first, record_count=1)


async def _settled(future: asyncio.Future[Any]) -> None:
    """Wait until `future` has a result or an error; cancelling the wait leaves it alone, as many records share it."""
    if not future.done():
        waiter: asyncio.Future[None] = future.get_loop().create_future()

        def wake(_: asyncio.Future[Any]) -> None:
            if not waiter.done():
                waiter.set_result(None)

        future.add_done_callback(wake)
        await waiter
