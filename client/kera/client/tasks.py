"""The background tasks of an owner: kept from the garbage collector, reported when they fail, ended with the owner.

`Turns` lets the tasks run, whatever the owner's caller does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

TURN_EVERY_S = 0.01
TURNS_AT_ONCE = 3
"""Number of turns given together: reading an answer takes one turn, and its receiver takes another one."""


class Turns:
    """Turns of the event loop between chunks that are available without a wait.

    Without them, a caller that blocks between two chunks, in a loop without its own await, would keep the event loop
    for as long as chunks are available. No commits and heartbeats would be sent, and no signals handled.
    """

    def __init__(self) -> None:
        self._last_s = 0.0

    async def give(self) -> None:
        """Let other tasks run, if the last turn is more than `TURN_EVERY_S` ago."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._last_s < TURN_EVERY_S:
            return
        for _ in range(TURNS_AT_ONCE):
            await asyncio.sleep(0)
        self._last_s = asyncio.get_running_loop().time()


class Tasks:
    """The tasks of one owner. Belongs to one event loop."""

    def __init__(self, on_error: Callable[[BaseException], None] | None = None) -> None:
        """Begin without tasks. `on_error` is called with a task's error; without it, only an await raises the error."""
        self._on_error = on_error
        self._running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task for `work`."""
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
        """Cancel all tasks without waiting for them."""
        for task in self._running:
            task.cancel()

    async def end(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        running = list(self._running)
        self.cancel()
        await asyncio.gather(*running, return_exceptions=True)
