"""Comparing a schema with those that are there, without holding up the coordinator.

What is small is done at once. Else a thread does it, one comparison after the other; how many may wait is bounded, and
how long each may take is the rules' (``kera.core.schemas.differences``).
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from kera.core.errors import Unavailable
from kera.core.schemas import Compatibility
from kera.core.schemas.compatibility import Definition, Version, incompatibilities

SMALL_CHARS_MAX = 4 << 10
"""Of all definitions that are looked at: a few milliseconds."""
WAITING_MAX = 64


class Checking:
    """See the head of this module."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "kera-schemas")
        self._waiting = 0

    async def incompatibilities(self, new: Definition, earlier: list[Version], mode: Compatibility) -> list[str]:
        """What breaks if `new` follows. Raises `InvalidSchema`, and `Unavailable` when too many wait."""
        looked_at = earlier if mode.transitive else earlier[-1:]
        size = len(new.text) + sum(len(each.definition.text) for each in looked_at)
        if size <= SMALL_CHARS_MAX:
            return incompatibilities(new, earlier, mode)
        if self._waiting >= WAITING_MAX:
            raise Unavailable(f"{self._waiting} schemas are being compared; ask again")
        self._waiting += 1
        running = asyncio.get_running_loop().run_in_executor(self._thread, incompatibilities, new, earlier, mode)
        running.add_done_callback(self._done)
        return await asyncio.shield(running)

    def _done(self, running: asyncio.Future[list[str]]) -> None:
        self._waiting -= 1
        if not running.cancelled():
            running.exception()  # who has asked may be gone

    async def close(self) -> None:
        """Let what has begun end; what waits is not begun."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
