"""Waiting, on the loop, for what is told by calls: entries that wake who waits for them, jobs that are done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from kera.broker.entry import Entry, Waiter
from kera.broker.jobs import Done
from kera.core.errors import KeraError


class _FutureWaiter(Waiter):
    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


async def woken(entries: Iterable[Entry], until_s: float) -> bool:
    """Wait for any of several entries, up to a time of the loop; False when that is over."""
    waiter = _FutureWaiter()
    waited_for = list(entries)
    for entry in waited_for:
        entry.waiters.add(waiter)
    try:
        async with asyncio.timeout_at(until_s):
            await waiter.future
    except TimeoutError:
        return False
    finally:
        for entry in waited_for:
            entry.waiters.discard(waiter)
    return True


async def until_done(begin: Callable[[Done], None]) -> None:
    """Wait for what `begin` begins, and raise its error."""
    future: asyncio.Future[KeraError | None] = asyncio.get_running_loop().create_future()

    def done(error: KeraError | None) -> None:
        if not future.done():
            future.set_result(error)

    begin(done)
    error = await future
    if error is not None:
        raise error
