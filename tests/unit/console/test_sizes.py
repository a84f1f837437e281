"""Sizes of streams: bounded concurrent requests, a cache, and bounded waits."""

import asyncio

import pytest

from kera.client import EntryBounds
from kera.console import limits
from kera.console.watching.sizes import Size, Sizes
from kera.core.base.ids import EARLIEST
from kera.core.errors import KeraError, NotAllowed, Unavailable, UnknownStream

LONG_S = 30.0


class Brokers:
    """Streams with as many records as letters in their names; the test sets the time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.asked: list[str] = []
        self.at_once = self.at_once_max = 0
        self.errors: dict[str, KeraError] = {}
        self.answering = asyncio.Event()
        self.answering.set()

    async def bounds(self, name: str) -> dict[int, list[EntryBounds]]:
        self.asked.append(name)
        self.at_once += 1
        self.at_once_max = max(self.at_once_max, self.at_once)
        try:
            await self.answering.wait()
            if name in self.errors:
                raise self.errors[name]
            return {0: [EntryBounds(EARLIEST, EARLIEST, 5, 5 + len(name), 100)]}
        finally:
            self.at_once -= 1

    def sizes(self, streams_max: int = 1000) -> Sizes:
        return Sizes(self.bounds, now_s=lambda: self.now_s, streams_max=streams_max)


async def test_sizes_are_requested_a_few_at_a_time_and_cached() -> None:
    brokers = Brokers()
    names = [f"stream-{at:03}" for at in range(100)]
    sizes = brokers.sizes()
    assert await sizes.of(names, LONG_S) == dict.fromkeys(names, Size(10, 100))
    assert brokers.at_once_max <= limits.SIZES_ASKED_AT_ONCE
    assert brokers.asked == names, "the first rows of a page come first"
    await sizes.of(names, LONG_S)
    assert len(brokers.asked) == 100
    brokers.now_s += limits.SIZES_FRESH_S
    await sizes.of(names[:10], LONG_S)
    assert len(brokers.asked) == 110


async def test_a_page_waits_for_its_patience_and_the_next_page_has_the_rest() -> None:
    brokers = Brokers()
    sizes = brokers.sizes()
    brokers.answering.clear()
    assert await sizes.of(["a", "b"], 0.01) == {}
    brokers.answering.set()
    assert await sizes.of(["a", "b"], LONG_S) == {"a": Size(1, 100), "b": Size(1, 100)}


async def test_slow_sizes_of_many_streams_are_requested_less_often() -> None:
    brokers = Brokers()
    sizes = brokers.sizes()
    names = [f"stream-{at}" for at in range(200)]

    async def slow(name: str) -> dict[int, list[EntryBounds]]:
        brokers.now_s += 1.0
        return await brokers.bounds(name)

    sizes = Sizes(slow, now_s=lambda: brokers.now_s)
    await sizes.of(names, LONG_S)
    asked = len(brokers.asked)
    brokers.now_s += 10 * limits.SIZES_FRESH_S
    await sizes.of(names, LONG_S)
    assert len(brokers.asked) == asked


async def test_the_last_size_is_shown_while_a_broker_is_away() -> None:
    brokers = Brokers()
    sizes = brokers.sizes()
    await sizes.of(["a"], LONG_S)
    brokers.errors["a"] = Unavailable("the broker is away")
    brokers.now_s += 1000
    assert await sizes.of(["a"], LONG_S) == {"a": Size(1, 100)}


@pytest.mark.parametrize("error", [NotAllowed("you may not"), UnknownStream("gone")])
async def test_a_refused_or_missing_stream_is_omitted_and_not_requested_again_soon(error: KeraError) -> None:
    brokers = Brokers()
    sizes = brokers.sizes()
    brokers.errors["a"] = error
    assert await sizes.of(["a", "b"], LONG_S) == {"b": Size(1, 100)}
    brokers.now_s += limits.REFUSAL_S - 1
    await sizes.of(["a"], LONG_S)
    assert brokers.asked.count("a") == 1
    brokers.now_s += 2
    await sizes.of(["a"], LONG_S)
    assert brokers.asked.count("a") == 2


async def test_no_more_streams_are_requested_than_the_limit() -> None:
    brokers = Brokers()
    sizes = brokers.sizes(streams_max=10)
    await sizes.of([f"stream-{at}" for at in range(50)], LONG_S)
    assert len(brokers.asked) == 10


async def test_forget_requests_sizes_again_and_shows_the_old_ones_until_then() -> None:
    brokers = Brokers()
    sizes = brokers.sizes()
    await sizes.of(["a"], LONG_S)
    sizes.forget()
    brokers.answering.clear()
    assert await sizes.of(["a"], 0.01) == {"a": Size(1, 100)}
    assert brokers.asked == ["a", "a"]
    await sizes.close()
    assert brokers.at_once == 0
