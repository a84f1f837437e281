"""What an owner has running in the background: kept from the garbage collector, heard when it fails, ended with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks:
    """Of one owner. Belongs to one event loop."""

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
