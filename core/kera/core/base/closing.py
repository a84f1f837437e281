"""Closing several things of which none may be left open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable

__all__ = ["close_all", "is_being_cancelled"]


async def close_all(closing: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Call and await each, in their order, whatever becomes of those before; raises the last error.

    Also when the caller is cancelled meanwhile. `asyncio.gather` would not do: of what it has begun in tasks, those are
    cancelled that have not had their first turn, and do nothing at all.
    """
    async with contextlib.AsyncExitStack() as stack:
        for close in reversed(list(closing)):
            stack.push_async_callback(close)


def is_being_cancelled() -> bool:
    """Whether it is the current task that is cancelled, and not something that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
