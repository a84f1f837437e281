"""An answer of the cluster that is shown again for a moment, so that many pages are one question."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from kera.console import limits
from kera.core.errors import NotAllowed

T = TypeVar("T")
_REST = 20
"""An answer that took a second is good for so many."""


class Cached(Generic[T]):
    """Caches the result of `ask`.

    One that is older than `fresh_s` is asked for anew, by one at a time; meanwhile the older one is shown, unless it is
    older than `stale_s`. What takes long is asked for less often: asking takes a small part of the time. Of errors only
    that who asks may not is kept, for a while: the cluster writes down each time that it says so.
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
        self._took_s = 0.0
        """To ask, the last time."""
        self._refused: NotAllowed | None = None
        self._refused_s = 0.0
        """When."""
        self._asking: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """It. Raises what asking raises."""
        age_s = float("inf") if self._at_s is None else self._now_s() - self._at_s
        if age_s < max(self._fresh_s, _REST * self._took_s):
            return self._value  # type: ignore[return-value]  # it was asked for
        if self._refused is not None and self._now_s() - self._refused_s < limits.REFUSAL_S:
            raise self._refused
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._refresh())
            self._asking.add_done_callback(self._done)
        if age_s < max(self._stale_s, 2 * _REST * self._took_s):
            return self._value  # type: ignore[return-value]
        return await asyncio.shield(self._asking)

    async def soon(self, patience_s: float) -> T | None:
        """The same, but None if there is none and none comes in time. Raises what asking raises."""
        try:
            async with asyncio.timeout(patience_s):
                return await self.get()
        except TimeoutError:
            return None

    def forget(self) -> None:
        """It has changed: who asks from now on waits for what is so now."""
        self._at_s = self._refused = None
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
        begun_s = self._now_s()
        try:
            value = await self._ask()
        except NotAllowed as error:
            self._refused, self._refused_s, self._at_s = error, self._now_s(), None
            raise
        self._refused = None
        self._value, self._at_s = value, self._now_s()
        self._took_s = self._at_s - begun_s
        return value

    def _done(self, task: asyncio.Task[T]) -> None:
        if self._asking is task:
            self._asking = None
        if not task.cancelled():
            task.exception()  # who waits for it is told; of one that nobody waits for, nobody need know
