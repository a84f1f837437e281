"""Cached answers: their age, concurrent callers, and errors."""

import asyncio

import pytest

from kera.console import limits
from kera.console.watching.cached import Cached
from kera.core.errors import ClosedError, NotAllowed, Unavailable


class Source:
    """Counts its requests, and answers with the count or with an error."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.asked = 0
        self.takes_s = 0.0
        self.error: Exception | None = None
        self.open = asyncio.Event()
        self.open.set()
        self.cached = Cached(self.ask, fresh_s=2, stale_s=60, now_s=lambda: self.now_s)

    async def ask(self) -> int:
        self.asked += 1
        await self.open.wait()
        self.now_s += self.takes_s
        if self.error is not None:
            raise self.error
        return self.asked


async def test_concurrent_callers_share_a_request_and_an_old_answer_is_refreshed() -> None:
    source = Source()
    assert await asyncio.gather(*(source.cached.get() for _ in range(5))) == [1] * 5
    source.now_s = 1.9
    assert await source.cached.get() == 1
    source.now_s = 2.0
    assert await source.cached.get() == 1, "the older one, while the new one is on its way"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await source.cached.get() == 2
    source.now_s = 100.0
    assert await source.cached.get() == 3, "that old it is not shown"


async def test_a_slow_request_is_repeated_less_often() -> None:
    source = Source()
    source.takes_s = 1.0
    await source.cached.get()
    source.now_s += 19.0
    await source.cached.get()
    assert source.asked == 1


async def test_forget_discards_the_answer_of_a_pending_refresh() -> None:
    source = Source()
    await source.cached.get()
    source.open.clear()
    source.now_s = 2.0
    assert await source.cached.get() == 1
    await asyncio.sleep(0)
    source.cached.forget()  # while a request is pending
    source.open.set()
    assert await source.cached.get() == 3


async def test_forget_makes_waiting_callers_wait_for_the_next_answer() -> None:
    source = Source()
    source.open.clear()
    waiting = [asyncio.ensure_future(source.cached.get()) for _ in range(2)]
    while not source.asked:
        await asyncio.sleep(0)
    source.cached.forget()
    source.open.set()
    assert await asyncio.gather(*waiting) == [2, 2]


async def test_close_fails_waiting_and_later_callers() -> None:
    source = Source()
    source.open.clear()
    waiting = asyncio.ensure_future(source.cached.get())
    while not source.asked:
        await asyncio.sleep(0)
    await source.cached.close()
    with pytest.raises(ClosedError, match="load the page again"):
        await waiting
    with pytest.raises(ClosedError):
        await source.cached.get()


async def test_a_cancelled_caller_does_not_cancel_the_request_of_others() -> None:
    source = Source()
    source.open.clear()
    first, second = (asyncio.ensure_future(source.cached.get()) for _ in range(2))
    while not source.asked:
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    source.open.set()
    assert await second == 1


async def test_only_a_refusal_is_cached_for_a_while_and_other_errors_are_not() -> None:
    source = Source()
    source.error = Unavailable("away")
    for asked in (1, 2):
        with pytest.raises(Unavailable):
            await source.cached.get()
        assert source.asked == asked
    source.error = NotAllowed("no")
    for _ in range(5):
        with pytest.raises(NotAllowed):
            await source.cached.get()
    assert source.asked == 3
    source.now_s += limits.REFUSAL_S
    source.error = None
    assert await source.cached.get() == 4


async def test_a_refusal_replaces_the_cached_answer() -> None:
    source = Source()
    await source.cached.get()
    source.error = NotAllowed("no")
    source.now_s = 2.0
    assert await source.cached.get() == 1
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(NotAllowed):
        await source.cached.get()


async def test_soon_gives_up_after_its_patience() -> None:
    source = Source()
    source.open.clear()
    assert await source.cached.soon(0.001) is None
    source.open.set()
    assert await source.cached.soon(10) == 1
    await source.cached.close()
