"""Runs blocking calls on a separate thread, one after the other: libraries of other systems wait for the network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


class Worker:
    """A thread for blocking calls, which ends with `close`. A cancelled caller waits until its call has returned."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"kera-{name}")

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Run `function` on the thread; returns its result, or raises its error."""
        work = asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.gather(work, return_exceptions=True)
            raise

    async def each(self, generator: Generator[T | None, None, None]) -> AsyncGenerator[T, None]:
        """Yield the items of `generator`, which runs on the thread, and yields None now and then while it waits.

        When this generator is closed or cancelled, `generator` is closed on the thread, too.
        """
        try:
            while found := await self.call(lambda: list(islice(generator, 1))):
                if found[0] is not None:
                    yield found[0]
        finally:
            await self.call(generator.close)

    def close(self) -> None:
        """Let the thread end after its present call."""
        self._pool.shutdown(wait=False, cancel_futures=True)
