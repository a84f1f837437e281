"""The lock under which changes are made one at a time; requesters take turns.

Each change is a write. A requester that asks for forty at once must not make all others wait for all forty. So the lock
goes to each waiting requester in turn, for one change each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from contextvars import ContextVar

REQUESTER: ContextVar[str] = ContextVar("requester", default="")
"""The requester that the current task works for: the address of a connection; empty: the coordinator itself."""


class Changing:
    """A lock that belongs to one event loop; hold it with ``async with``, or with `acquire` and `release`."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """The waiting changes by requester; the first requester is next."""

    async def acquire(self) -> None:
        """Wait until the lock is the caller's, which has to release it."""
        if not self._held and not self._waiting:
            self._held = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(REQUESTER.get(), deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # the lock was ours already
            raise

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Give the lock to the next one that waits."""
        self._held = False
        while self._waiting and not self._held:
            requester = next(iter(self._waiting))
            queue = self._waiting.pop(requester)
            turn = queue.popleft()
            if queue:
                self._waiting[requester] = queue  # behind all the others
            if not turn.done():  # a waiter that has given up is done
                turn.set_result(None)
                self._held = True
