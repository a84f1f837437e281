"""Awaits events that are reported by callbacks: entries that wake their listeners, and jobs that are done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from kera.broker.log.entry import Entry, EntryListener
from kera.broker.slices import Slices
from kera.core.base.done import Done
from kera.core.errors import KeraError

FORGOTTEN_AT_ONCE = 1024
"""Entries that an ended request stops waiting for before other requests have their turn."""


class EntriesWaiter(EntryListener):
    """Waits until any of several entries has changed since the last look at it."""

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._entries: dict[Entry, None] = {}

    def add(self, entry: Entry) -> None:
        """Wait for one more entry."""
        self._entries[entry] = None
        entry.waiters.add(self)

    def wake(self) -> None:
        """See `EntryListener`."""
        if not self._future.done():
            self._future.set_result(None)

    def again(self) -> None:
        """Prepare for another look at the entries: changes from now on count."""
        if self._future.done():
            self._future = asyncio.get_running_loop().create_future()

    async def woken(self, until_s: float) -> bool:
        """Wait up to a time of the loop; False if it has passed without a change."""
        try:
            async with asyncio.timeout_at(until_s):
                await self._future
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Stop waiting for all entries."""
        if self._forget():
            self._slices.add(self._forget)

    def _forget(self) -> bool:
        for _ in range(min(len(self._entries), FORGOTTEN_AT_ONCE)):
            self._entries.popitem()[0].waiters.discard(self)
        return bool(self._entries)


async def woken(entries: Iterable[Entry], until_s: float) -> bool:
    """Wait for any of a few entries up to a time of the loop; False if it has passed without a change."""
    waiter = EntriesWaiter(Slices(asyncio.get_running_loop()))
    for entry in entries:
        waiter.add(entry)
    try:
        return await waiter.woken(until_s)
    finally:
        waiter.close()


async def until_done(begin: Callable[[Done], None]) -> None:
    """Wait until the job that `begin` begins is done. Raises its error."""
    error = await begun(begin)
    if error is not None:
        raise error


def begun(begin: Callable[[Done], None]) -> asyncio.Future[KeraError | None]:
    """Begin a job; return a future for its error, or None if it has succeeded."""
    future: asyncio.Future[KeraError | None] = asyncio.get_running_loop().create_future()

    def done(error: KeraError | None) -> None:
        if not future.done():
            future.set_result(error)

    begin(done)
    return future
