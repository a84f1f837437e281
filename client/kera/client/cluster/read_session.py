"""A read session: the ranges that a client reads from one broker; requests and answers name only changes.

The broker keeps the ranges and their positions (``kera.broker.serving.read_sessions``). Each request is the step after
the one whose answer has come. After any other outcome the session begins anew, with all ranges and positions of the
client. So no data come twice and none are left out, whichever messages were lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

import pyarrow as pa

from kera.client.cluster.batches import RANGES_MAX
from kera.client.cluster.fetch import Fetched, Wanted
from kera.client.types import fill_cursor, position_of
from kera.core.base.ids import Position
from kera.core.errors import ProtocolError, SessionLost
from kera.core.format.chunk import read_header
from kera.core.rpc import Channel, api
from kera.core.rpc.wire import error_from_message
from kera.v1 import broker_pb2


class Item(Protocol):
    """A range with its present position."""

    @property
    def wanted(self) -> Wanted:
        """The part of the range that is left."""
        ...


ItemT = TypeVar("ItemT", bound=Item)


class Told(NamedTuple, Generic[ItemT]):
    """The outcome of a range's read."""

    item: ItemT
    fetched: Fetched
    ended: bool
    """Whether it is no longer in the session."""


class ReadSession(Generic[ItemT]):
    """Ranges that are read over one connection. One request at a time."""

    def __init__(
        self,
        channel: Channel,
        consumer_group: str = "",
        items: Iterable[ItemT] = (),
        *,
        session_id: int = 1,
        ranges_max: int = RANGES_MAX,
    ) -> None:
        """`session_id`: unique among the sessions over the connection. `ranges_max`: of one request."""
        self._channel = channel
        self._ranges_max = ranges_max
        self._consumer_group = consumer_group
        self._session_id = session_id
        self._step = 0
        self._handles = itertools.count(1)
        self._items: dict[int, ItemT] = {}
        """Ranges by handle."""
        self._handle_of: dict[ItemT, int] = {}
        self._kept = False
        """Whether the broker has the session, at this step."""
        self._added: dict[int, ItemT] = {}
        self._removed: list[int] = []
        """Handles that were removed since the last step."""
        self.throttled_ms = 0
        """Total time for which answers were held back because a quota was used up."""
        for item in items:
            self.add(item)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._handle_of

    @property
    def items(self) -> list[ItemT]:
        """All ranges."""
        return list(self._items.values())

    def add(self, item: ItemT) -> None:
        """Add a range, to be read from its position at the next request."""
        handle = next(self._handles)
        self._items[handle] = self._added[handle] = item
        self._handle_of[item] = handle

    def remove(self, item: ItemT) -> None:
        """Remove a range."""
        handle = self._handle_of.pop(item)
        del self._items[handle]
        if self._added.pop(handle, None) is None:
            self._removed.append(handle)

    async def read(self, *, bytes_max: int, wait_ms: int, timeout_s: float) -> list[Told[ItemT]]:
        """Make one request. Returns the outcomes of ranges, in turn; errors of single ranges are in their `Fetched`.

        A range that has ended is no longer in the session.
        """
        try:
            return await self._read(bytes_max, wait_ms, timeout_s)
        except SessionLost:
            return await self._read(bytes_max, wait_ms, timeout_s)  # the session begins anew

    async def _read(self, bytes_max: int, wait_ms: int, timeout_s: float) -> list[Told[ItemT]]:
        told = self._added if self._kept else self._items
        handles = list(itertools.islice(told, self._ranges_max))
        rest = {handle: told[handle] for handle in itertools.islice(told, self._ranges_max, None)}
        request = broker_pb2.MultiReadChunksRequest(
            bytes_max=bytes_max,
            wait_ms=0 if rest else wait_ms,
            consumer_group=self._consumer_group,
            session_id=self._session_id,
            step=self._step + 1 if self._kept else 0,
        )
        if self._kept:
            request.removed.extend(self._removed)
        for handle in handles:
            row = request.ranges.add(handle=handle)
            wanted = told[handle].wanted
            fill_cursor(row.start, wanted.entry, wanted.start)
            if wanted.end is not None:
                fill_cursor(row.end, wanted.entry, wanted.end)
        if rest and not self._kept:
            for handle in handles:  # move behind the others, in case the session begins anew
                self._items[handle] = self._items.pop(handle)
        self._kept = False  # not known until the answer comes
        self._added, self._removed = rest, []
        reply = await self._channel.submit(api.MULTI_READ_CHUNKS, request, timeout_s=timeout_s + wait_ms / 1000)
        self.throttled_ms += reply.message.throttled_ms
        bulk = pa.py_buffer(reply.bulk[0]) if reply.bulk else pa.py_buffer(b"")
        found = self._found(reply.message, bulk)
        self._kept, self._step = reply.message.session_kept, request.step
        return found

    def _found(self, message: broker_pb2.MultiReadChunksResponse, bulk: pa.Buffer) -> list[Told[ItemT]]:
        at = 0
        found: list[Told[ItemT]] = []
        for result in message.results:
            item = self._items.pop(result.handle, None)
            if item is None:
                raise ProtocolError(f"the broker answered for range {result.handle}, which is not in the session")
            if result.ended:
                del self._handle_of[item]
            else:
                self._items[result.handle] = item  # moves behind the others, in case the session begins anew
            wanted = item.wanted
            if result.length_bytes > bulk.size - at:
                raise ProtocolError(
                    f"the broker announced {result.length_bytes} bytes for a range, and its answer has"
                    f" {bulk.size - at} left"
                )
            buffers = [bulk.slice(at, result.length_bytes)] if result.length_bytes else []
            at += result.length_bytes
            error = error_from_message(result.error) if result.HasField("error") else None
            following = position_of(result.next)
            start = _begin(buffers[0], result.begins_at) if buffers and result.begins_at else wanted.start
            fetched = Fetched(wanted.entry, start, following, buffers, result.lag_records, error)
            found.append(Told(item, fetched, result.ended))
        return found


def _begin(buffer: pa.Buffer, offset: int) -> Position:
    """Return the position of the first chunk, from the offset that the broker gives. Raises `CorruptChunk`."""
    header = read_header(memoryview(buffer))
    return Position(header.group_id, header.segment_id, offset)
