"""Caches answers of the cluster for a moment, so that many pages cause only one question."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from kera.console import limits
from kera.core.errors import ClosedError, NotAllowed

T = TypeVar("T")
_REST = 20
"""An answer is fresh for this multiple of the time that it took."""


class Cached(Generic[T]):
    """Caches the result of `ask`.

    If the result is older than `fresh_s`, one task asks again; meanwhile the older result is returned, unless it is
    older than `stale_s`. Slow answers are asked for less often, so that asking takes a small part of the time. Errors
    are not cached, except `NotAllowed` for a while, because the cluster's audit log records each refusal.
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
        """Duration of the last answer."""
        self._refused: NotAllowed | None = None
        self._refused_s = 0.0
        """Time of the last refusal."""
        self._asking: asyncio.Task[T] | None = None
        self._closed = False

    async def get(self) -> T:
        """Return the result. Raises the errors of `ask`, and `ClosedError`."""
        while not self._closed:
            age_s = float("inf") if self._at_s is None else self._now_s() - self._at_s
            if age_s < max(self._fresh_s, _REST * self._took_s):
                return self._value  # type: ignore[return-value]  # there was an answer
            if self._refused is not None and self._now_s() - self._refused_s < limits.REFUSAL_S:
                raise self._refused
            if self._asking is None:
                self._asking = asyncio.ensure_future(self._refresh())
                self._asking.add_done_callback(self._done)
            if age_s < max(self._stale_s, 2 * _REST * self._took_s):
                return self._value  # type: ignore[return-value]
            asking = self._asking
            await asyncio.wait([asking])  # leaves it to other callers if this one is cancelled
            if not asking.cancelled():  # otherwise `forget` or `close` has cancelled it
                return asking.result()
        raise ClosedError("this session has ended: load the page again")

    async def soon(self, patience_s: float) -> T | None:
        """Return the result, or None if there is none within `patience_s`. Raises the errors of `ask`."""
        try:
            async with asyncio.timeout(patience_s):
                return await self.get()
        except TimeoutError:
            return None

    def forget(self) -> None:
        """Drop the result, because it has changed: later calls of `get` wait for a new one."""
        self._at_s = self._refused = None
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def close(self) -> None:
        """Stop asking. Callers that wait for a result get `ClosedError`."""
        self._closed = True
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
            task.exception()  # marks it as retrieved: callers that wait for the task get it anyway
