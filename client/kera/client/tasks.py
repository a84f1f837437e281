"""Background tasks of an owner: kept from the garbage collector, heard when they fail, ended with it.

`Turns` gives that the event loop's turns, whatever the owner's caller does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

TURN_EVERY_S = 0.01
TURNS_AT_ONCE = 3
"""An answer that has come needs one to be read, and what waits for it another one."""


class Turns:
    """The event loop's turns between chunks that need no waiting.

    A caller that blocks between two chunks, in a loop without an await of its own, would else keep the loop for as long
    as chunks are at hand: no commit and no heartbeat would go out, and no signal would be handled.
    """

    def __init__(self) -> None:
        self._last_s = 0.0

    async def give(self) -> None:
        """Let others run, if the last time is more than `TURN_EVERY_S` ago."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._last_s < TURN_EVERY_S:
            return
        for _ in range(TURNS_AT_ONCE):
            await asyncio.sleep(0)
        self._last_s = asyncio.get_running_loop().time()


class Tasks:
    """The tasks of one owner. Belongs to one event loop."""

    def __init__(self, on_error: Callable[[BaseException], None] | None = None) -> None:
        """`on_error`: called with what a task raises; without it, whoever awaits the task is told, or nobody."""
        self._on_error = on_error
        self._running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin `work`."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._on_error is not None:
            self._on_error(error)

    def cancel(self) -> None:
        """End all, and wait for none."""
        for task in self._running:
            task.cancel()

    async def end(self) -> None:
        """End all, and wait until they have ended."""
        running = list(self._running)
        self.cancel()
        await asyncio.gather(*running, return_exceptions=True)
