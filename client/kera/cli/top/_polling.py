"""Asks something again and again, without ever holding up who looks at what came of it.

A question that is not answered stays the only one of its kind until it is, or until its time is up; meanwhile there is
the last answer, and since when there is no newer one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar

from kera.cli.top._sample import Trouble
from kera.core.base.clock import Clock
from kera.core.errors import AuthenticationFailed, KeraError, NotAllowed

T = TypeVar("T")

SLOW_S = 1.0
"""A question that is out for longer is one that is not answered now."""


class Poll(Generic[T]):
    """One question. Use it in one event loop; `close` it."""

    def __init__(
        self, ask: Callable[[], Awaitable[T]], clock: Clock, *, timeout_s: float, every_s: float = 0.0
    ) -> None:
        """`every_s`: the pause between two questions, from the beginning of one to that of the next."""
        self._ask = ask
        self._clock = clock
        self._timeout_s = timeout_s
        self.every_s = every_s
        self._asking: asyncio.Task[None] | None = None
        self._asked_us = 0
        self._failure: Trouble | None = None
        self.asked_s = float("-inf")
        """When the last question began."""
        self.previous: T | None = None
        """The answer before the last one."""
        self.answer: T | None = None
        """The last one; None: there was none yet."""
        self.answered_s = float("-inf")
        """When it came."""

    def begin(self) -> asyncio.Task[None] | None:
        """Ask, if it is time and no question is out; the question that is out now, if there is one."""
        if self._asking is not None and self._asking.done():
            self._asking.result()  # what is neither an answer nor a refusal is a bug
            self._asking = None
        now_s = self._clock.monotonic_s()
        if self._asking is None and now_s - self.asked_s >= self.every_s:
            self.asked_s, self._asked_us = now_s, self._clock.now_us()
            self._asking = asyncio.create_task(self._once())
        return self._asking

    async def _once(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._ask()
        except TimeoutError:
            self._fail(f"no answer within {self._timeout_s:g} s")
        except (AuthenticationFailed, NotAllowed) as error:
            self._fail(error.message, refused=True)
        except KeraError as error:
            self._fail(error.message)
        else:
            self.previous, self.answer = self.answer, answer
            self.answered_s, self._failure = self._clock.monotonic_s(), None

    def _fail(self, text: str, *, refused: bool = False) -> None:
        since_us = self._failure.since_us if self._failure is not None else self._asked_us
        self._failure = Trouble(text, since_us, refused)

    @property
    def trouble(self) -> Trouble | None:
        """Why there is nothing new; None: there is, or it is under way."""
        if self._failure is not None:
            return self._failure
        is_out = self._asking is not None and not self._asking.done()
        out_s = self._clock.monotonic_s() - self.asked_s
        return Trouble("no answer yet", self._asked_us) if is_out and out_s >= min(SLOW_S, self._timeout_s) else None

    async def close(self) -> None:
        """Wait for no answer any more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)


async def all_within(polls: Iterable[Poll[Any]], patience_s: float) -> None:
    """Ask those whose time it is, and wait for answers, but not for longer than `patience_s`."""
    asking = [task for poll in polls if (task := poll.begin()) is not None]
    if asking:
        await asyncio.wait(asking, timeout=patience_s)
