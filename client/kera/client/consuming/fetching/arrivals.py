"""Fetched data that the consumer has not taken yet: a queue between the fetching tasks and the consumer.

The queue is bounded for pulled data: pulling tasks wait while there is no room. It ends with the first error that is
put into it, after the data before, or when it is closed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from kera.client.cluster.fetch import Fetched
from kera.client.consuming.fetching.hooks import FetchHooks
from kera.client.consuming.fetching.ranges import Arrived, Range
from kera.core.errors import ClosedError

LOOK_MAX = 1000
"""Number of waiting items that `waiting` looks at."""


class Arrivals:
    """A bounded queue of fetched data between the fetching tasks and the consumer. Belongs to one event loop."""

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max`: of pulled data; beyond it `wait_for_room` waits."""
        self._bytes_max = bytes_max
        self._queue: deque[Arrived | BaseException] = deque()
        self._arrived = asyncio.Event()
        """Set when an item has arrived, or the queue is woken or closed. Only used when the queue is empty."""
        self._room = asyncio.Event()
        self._watchers: dict[Range, Callable[[Fetched], None]] = {}
        self._woken = False
        self._closed = False
        self._failure: BaseException | None = None
        """The error that ended the reading; raised for every further call."""
        self.pulled_bytes = 0
        """Bytes that were pulled and are not taken yet."""

    def __len__(self) -> int:
        """Number of items that are not taken yet: chunks that came together count as one."""
        return len(self._queue)

    def put(self, item: Arrived | BaseException) -> None:
        """Add fetched data, or the error that ends the reading."""
        if isinstance(item, Arrived) and item.fetched is not None and item.fetched.slot is None:
            self.pulled_bytes += item.fetched.size_bytes
        self._queue.append(item)
        self._arrived.set()
        if isinstance(item, Arrived) and item.fetched is not None and item.range in self._watchers:
            self._watchers[item.range](item.fetched)

    def watch(self, item: Range, watcher: Callable[[Fetched], None]) -> None:
        """Call `watcher` with the data of a range as soon as they are added."""
        self._watchers[item] = watcher

    def unwatch(self, item: Range) -> None:
        """Remove the watcher of a range."""
        self._watchers.pop(item, None)

    def waiting(self) -> Iterable[Arrived]:
        """Return the arrivals that are not taken yet, the oldest first; at most `LOOK_MAX`."""
        return (item for item in islice(self._queue, LOOK_MAX) if isinstance(item, Arrived))

    def wake(self) -> None:
        """Have `take` return None."""
        self._woken = True
        self._arrived.set()

    async def wait_for_room(self) -> None:
        """Wait until enough pulled data have been taken."""
        while self.pulled_bytes >= self._bytes_max:
            self._room.clear()
            await self._room.wait()

    async def take(self) -> Arrived | None:
        """Take the next arrival; None after `wake`. Raises `ClosedError`, and the error that was added."""
        while True:
            if self._closed:
                raise ClosedError("the consumer is closed")
            if self._failure is not None:
                raise self._failure
            if self._woken:
                self._woken = False
                return None
            if not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            item = self._queue.popleft()
            if isinstance(item, BaseException):
                self._failure = item
                continue
            if item.fetched is not None:
                if item.fetched.slot is None:
                    self.pulled_bytes -= item.fetched.size_bytes
                    self._room.set()
                item.fetched.taken()
            return item

    def close(self) -> None:
        """Let nothing more be taken: a waiting `take` raises `ClosedError`."""
        self._closed = True
        self._arrived.set()

    def clear(self) -> None:
        """Drop all items that are left."""
        self._queue.clear()


class HeardArrivals(Arrivals):
    """A queue that calls hooks for the data that pass through it."""

    def __init__(self, bytes_max: int, hooks: FetchHooks) -> None:
        super().__init__(bytes_max)
        self._hooks = hooks

    def put(self, item: Arrived | BaseException) -> None:
        """See `Arrivals`; likewise what follows."""
        if isinstance(item, Arrived) and item.fetched is not None:
            self._hooks.on_fetched(item.range, item.fetched)
        super().put(item)

    async def take(self) -> Arrived | None:
        """Also call the hook for the wait itself."""
        self._hooks.on_asked()
        item = await super().take()
        if item is not None and item.fetched is not None:
            self._hooks.on_taken(item.range, item.fetched)
        return item

    def clear(self) -> None:
        """Also call the hook for the end."""
        super().clear()
        self._hooks.on_closed()
