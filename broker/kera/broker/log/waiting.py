"""Waiting, on the loop, for what is told by calls: entries that wake who waits for them, jobs that are done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from kera.broker.log.entry import Entry, EntryListener
from kera.broker.slices import Slices
from kera.core.base.done import Done
from kera.core.errors import KeraError

FORGOTTEN_AT_ONCE = 1024
"""Entries that a request has waited for; then it is looked whether others have their turn."""


class EntriesWaiter(EntryListener):
    """Waits for any of several entries, from when each was looked at."""

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._entries: dict[Entry, None] = {}

    def add(self, entry: Entry) -> None:
        """Wait for one more."""
        self._entries[entry] = None
        entry.waiters.add(self)

    def wake(self) -> None:
        """See `EntryListener`."""
        if not self._future.done():
            self._future.set_result(None)

    def again(self) -> None:
        """Before the entries are looked at again: what happens from now on counts."""
        if self._future.done():
            self._future = asyncio.get_running_loop().create_future()

    async def woken(self, until_s: float) -> bool:
        """Wait, up to a time of the loop; False when that is over."""
        try:
            async with asyncio.timeout_at(until_s):
                await self._future
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Wait no more."""
        if self._forget():
            self._slices.add(self._forget)

    def _forget(self) -> bool:
        for _ in range(min(len(self._entries), FORGOTTEN_AT_ONCE)):
            self._entries.popitem()[0].waiters.discard(self)
        return bool(self._entries)


async def woken(entries: Iterable[Entry], until_s: float) -> bool:
    """Wait for any of a few entries, up to a time of the loop; False when that is over."""
    waiter = EntriesWaiter(Slices(asyncio.get_running_loop()))
    for entry in entries:
        waiter.add(entry)
    try:
        return await waiter.woken(until_s)
    finally:
        waiter.close()


async def until_done(begin: Callable[[Done], None]) -> None:
    """Wait for what `begin` begins, and raise its error."""
    error = await begun(begin)
    if error is not None:
        raise error


def begun(begin: Callable[[Done], None]) -> asyncio.Future[KeraError | None]:
    """Begin something; what comes of it."""
    future: asyncio.Future[KeraError | None] = asyncio.get_running_loop().create_future()

    def done(error: KeraError | None) -> None:
        if not future.done():
            future.set_result(error)

    begin(done)
    return future
