"""An answer of the cluster that is shown again for a moment, so that many pages are one question."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from kera.console import limits

T = TypeVar("T")


class Cached(Generic[T]):
    """What `ask` returns.

    One that is older than `fresh_s` is asked for anew, by one at a time; meanwhile the older one is shown, unless it is
    older than `stale_s`. Errors are not kept.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[T]],
        *,
        fresh_s: float = limits.CACHE_S,
        stale_s: float = limits.STALE_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._fresh_s, self._stale_s, self._now_s = fresh_s, stale_s, now_s
        self._value: T | None = None
        self._at_s: float | None = None
        self._asking: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """It. Raises what asking raises."""
        age_s = float("inf") if self._at_s is None else self._now_s() - self._at_s
        if age_s < self._fresh_s:
            return self._value  # type: ignore[return-value]  # it was asked for
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._refresh())
            self._asking.add_done_callback(self._done)
        if age_s < self._stale_s:
            return self._value  # type: ignore[return-value]
        return await asyncio.shield(self._asking)

    def forget(self) -> None:
        """It has changed: who asks from now on waits for what is so now."""
        self._at_s = None
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def close(self) -> None:
        """Ask no more."""
        asking = self._asking
        if asking is not None:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await asking

    async def _refresh(self) -> T:
        value = await self._ask()
        self._value, self._at_s = value, self._now_s()
        return value

    def _done(self, task: asyncio.Task[T]) -> None:
        if self._asking is task:
            self._asking = None
        if not task.cancelled():
            task.exception()  # who waits for it is told; of one that nobody waits for, nobody need know
