"""Closes several resources without leaving any of them open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable

__all__ = ["close_all", "is_being_cancelled"]


async def close_all(closing: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Call and await each in order, even if an earlier one fails; raises the last error.

    It does so also if the caller is cancelled meanwhile. `asyncio.gather` would not: it would cancel tasks that have
    not had their first turn yet, and these would do nothing at all.
    """
    async with contextlib.AsyncExitStack() as stack:
        for close in reversed(list(closing)):
            stack.push_async_callback(close)


def is_being_cancelled() -> bool:
    """Return whether the current task itself is being cancelled, and not something that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
