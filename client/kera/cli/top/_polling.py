"""Repeats a question in the background, so that its caller never has to wait for the answer.

While a question has no answer, it is not asked again until its time is up; meanwhile the last answer is available, with
the time since when there is no newer one.
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
"""After this time, a question without an answer counts as trouble."""


class Poll(Generic[T]):
    """One repeated question. Use it in one event loop; call `close` at the end."""

    def __init__(
        self, ask: Callable[[], Awaitable[T]], clock: Clock, *, timeout_s: float, every_s: float = 0.0
    ) -> None:
        """`every_s`: minimum time from the beginning of a question to the beginning of the next."""
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
        """The last answer; None: there was none yet."""
        self.answered_s = float("-inf")
        """When the last answer came."""

    def begin(self) -> asyncio.Task[None] | None:
        """Ask, if it is time and no question waits for an answer; return the task of the present question, if any."""
        if self._asking is not None and self._asking.done():
            self._asking.result()  # raises an unexpected error, which is a bug
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
        """The reason why there is no new answer; None: there is one, or it is not late yet."""
        if self._failure is not None:
            return self._failure
        is_out = self._asking is not None and not self._asking.done()
        out_s = self._clock.monotonic_s() - self.asked_s
        return Trouble("no answer yet", self._asked_us) if is_out and out_s >= min(SLOW_S, self._timeout_s) else None

    async def close(self) -> None:
        """Cancel the present question."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)


async def all_within(polls: Iterable[Poll[Any]], patience_s: float) -> None:
    """Begin all questions that are due, and wait for answers for at most `patience_s`."""
    asking = [task for poll in polls if (task := poll.begin()) is not None]
    if asking:
        await asyncio.wait(asking, timeout=patience_s)
