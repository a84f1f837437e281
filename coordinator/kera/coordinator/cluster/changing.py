"""The lock under which changes are made, one at a time: those who want it take turns.

Each change is a write, and whoever asks for forty of them at once must not have all others wait for all forty. So of
several requesters each one gets the lock for one change, then the next requester does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from contextvars import ContextVar

REQUESTER: ContextVar[str] = ContextVar("requester", default="")
"""For whom something is done: the address of a connection; empty: the coordinator does it by itself."""


class Changing:
    """Belongs to one event loop. ``async with`` holds it."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """By requester; the first one is next."""

    async def __aenter__(self) -> None:
        if not self._held and not self._waiting:
            self._held = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(REQUESTER.get(), deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_on()  # it was ours already
            raise

    async def __aexit__(self, *_: object) -> None:
        self._give_on()

    def _give_on(self) -> None:
        self._held = False
        while self._waiting and not self._held:
            requester = next(iter(self._waiting))
            queue = self._waiting.pop(requester)
            turn = queue.popleft()
            if queue:
                self._waiting[requester] = queue  # behind all the others
            if not turn.done():  # it is, if who waited has given up
                turn.set_result(None)
                self._held = True
