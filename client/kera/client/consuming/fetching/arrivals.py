"""Data that were fetched and not taken: a queue between the fetching tasks and the one that takes.

Bounded for those who pull: they wait while there is no room. It ends with the first error that is put into it, behind
what came before, or when it is closed.
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
"""So much of what waits is looked at."""


class Arrivals:
    """A bounded queue of fetched data between the fetching tasks and the consumer. Belongs to one event loop."""

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max`: of what was pulled; beyond it `wait_for_room` waits."""
        self._bytes_max = bytes_max
        self._queue: deque[Arrived | BaseException] = deque()
        self._arrived = asyncio.Event()
        """Something has, or the queue is woken or closed. It is looked at only when the queue is empty."""
        self._room = asyncio.Event()
        self._watchers: dict[Range, Callable[[Fetched], None]] = {}
        self._woken = False
        self._closed = False
        self._failure: BaseException | None = None
        """The error that ended the reading; raised for every further call."""
        self.pulled_bytes = 0
        """Bytes that were pulled and are not taken yet."""

    def __len__(self) -> int:
        """How much has come and is not taken yet: chunks that came together count as one."""
        return len(self._queue)

    def put(self, item: Arrived | BaseException) -> None:
        """Something has come, or ends the reading."""
        if isinstance(item, Arrived) and item.fetched is not None and item.fetched.slot is None:
            self.pulled_bytes += item.fetched.size_bytes
        self._queue.append(item)
        self._arrived.set()
        if isinstance(item, Arrived) and item.fetched is not None and item.range in self._watchers:
            self._watchers[item.range](item.fetched)

    def watch(self, item: Range, watcher: Callable[[Fetched], None]) -> None:
        """Have somebody see what comes of a range, as soon as it is put in."""
        self._watchers[item] = watcher

    def unwatch(self, item: Range) -> None:
        """Nobody wants to see it any more."""
        self._watchers.pop(item, None)

    def waiting(self) -> Iterable[Arrived]:
        """Arrivals that are not taken yet, the oldest first; of very many only the next ones."""
        return (item for item in islice(self._queue, LOOK_MAX) if isinstance(item, Arrived))

    def wake(self) -> None:
        """Have `take` return."""
        self._woken = True
        self._arrived.set()

    async def wait_for_room(self) -> None:
        """Wait until enough has been taken."""
        while self.pulled_bytes >= self._bytes_max:
            self._room.clear()
            await self._room.wait()

    async def take(self) -> Arrived | None:
        """Take the next arrival; None after `wake`. Raises `ClosedError`, and the error that was put in."""
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
        """Nothing more is taken: whoever waits gets `ClosedError`."""
        self._closed = True
        self._arrived.set()

    def clear(self) -> None:
        """Let go of what is left."""
        self._queue.clear()


class HeardArrivals(Arrivals):
    """The same queue, with hooks that are called for the data that pass it."""

    def __init__(self, bytes_max: int, hooks: FetchHooks) -> None:
        super().__init__(bytes_max)
        self._hooks = hooks

    def put(self, item: Arrived | BaseException) -> None:
        """See `Arrivals`; likewise what follows."""
        if isinstance(item, Arrived) and item.fetched is not None:
            self._hooks.on_fetched(item.range, item.fetched)
        super().put(item)

    async def take(self) -> Arrived | None:
        """The hooks hear when it is asked for, too."""
        self._hooks.on_asked()
        item = await super().take()
        if item is not None and item.fetched is not None:
            self._hooks.on_taken(item.range, item.fetched)
        return item

    def clear(self) -> None:
        """Nobody takes what is left."""
        super().clear()
        self._hooks.on_closed()
