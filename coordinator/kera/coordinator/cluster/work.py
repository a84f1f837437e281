"""Background work, by key: work under way is not started again, and its caller retries work that failed.

For parts of the coordinator that look periodically at the stored state, and start what is missing. An operation that
fails is logged, and its reason is kept to show what it waits for; a defect is logged with its traceback and stops
nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any

from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger
from kera.core.errors import KeraError

log = get_logger("kera.coordinator")


class Work:
    """At most one task for each key."""

    def __init__(self, on_success: Callable[[], None] = lambda: None) -> None:
        """`on_success` is called after each task that succeeds."""
        self._on_success = on_success
        self._tasks: dict[Hashable, asyncio.Task[bool]] = {}
        self._failures: dict[Hashable, str] = {}
        self._lasting: dict[Hashable, Repeated] = {}
        self._closed = False

    def start(self, key: Hashable, operation: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin `operation`, unless one of this key is under way."""
        if not self._closed and key not in self._tasks:
            task = self._tasks[key] = asyncio.create_task(self._run(key, operation))
            # Not in the task itself: a task that is cancelled before its first step would not get that far.
            task.add_done_callback(lambda _: self._ended(key, task))

    def __len__(self) -> int:
        return len(self._tasks)

    def is_under_way(self, key: Hashable) -> bool:
        """Whether a task of this key is under way."""
        return key in self._tasks

    def failure(self, key: Hashable) -> str:
        """Return why the last task of this key failed; empty if it did not fail, or there was none."""
        return self._failures.get(key, "")

    def forget_failures(self, is_wanted: Callable[[Any], bool]) -> None:
        """Forget the failures of work that will not be tried again; `is_wanted`: whether the work of a key will be."""
        for key in [key for key in self._failures if not is_wanted(key)]:
            self._forget(key)

    def cancel(self, key: Hashable) -> None:
        """Cancel the task of this key, if there is one."""
        if task := self._tasks.get(key):
            task.cancel()

    async def ended(self, key: Hashable) -> None:
        """Wait until no task of this key runs."""
        if task := self._tasks.get(key):
            await asyncio.wait([task])

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    async def close(self) -> None:
        """Cancel all tasks, and accept no more."""
        self._closed = True
        for task in self._tasks.values():
            task.cancel()
        await self.idle()

    async def _run(self, key: Hashable, operation: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        try:
            await operation()
        except KeraError as error:
            self._failing(key).goes_on(
                "operation failed, and will be tried again", operation=str(key), error=error.message
            )
            self._failures[key] = error.message
            return False
        except asyncio.CancelledError:
            self._forget(key)
            raise
        except Exception as error:  # noqa: BLE001 - it is logged
            self._failing(key).goes_on(
                "unexpected exception in background work", level="error", operation=str(key), exc_info=error
            )
            self._failures[key] = repr(error)
            return False
        self._failing(key).over("operation has succeeded", operation=str(key))
        self._forget(key)
        return True

    def _failing(self, key: Hashable) -> Repeated:
        return self._lasting.setdefault(key, Repeated(log))

    def _forget(self, key: Hashable) -> None:
        self._failures.pop(key, None)
        self._lasting.pop(key, None)

    def _ended(self, key: Hashable, task: asyncio.Task[bool]) -> None:
        del self._tasks[key]
        if not task.cancelled() and task.result() and not self._closed:
            self._on_success()
