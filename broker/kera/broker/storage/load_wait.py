"""Waits for a segment to be loaded, up to a time: memory that others use may never have room for it."""

from __future__ import annotations

import asyncio

from kera.broker.log.entry import Entry
from kera.broker.records import Key
from kera.broker.storage.loads import Loads
from kera.core.errors import KeraError


async def until_loaded(loads: Loads, entry: Entry, key: Key, until_s: float, *, ahead: bool = True) -> None:
    """Wait until a segment is in memory, or turns out to be removed, up to a time of the loop; `ahead`: see `Loads`.

    Raises the error of the load, and `Unavailable` if the time has passed. The load itself goes on then.
    """
    loaded: asyncio.Future[KeraError | None] = asyncio.get_running_loop().create_future()

    def done(error: KeraError | None) -> None:
        if not loaded.done():
            loaded.set_result(error)

    loads.load(entry, key, done, ahead=ahead)
    try:
        async with asyncio.timeout_at(until_s):
            error = await loaded
    except TimeoutError:
        raise loads.not_loaded(entry, key) from None
    finally:
        loads.forget(entry, key, done)
    if error is not None:
        raise error
