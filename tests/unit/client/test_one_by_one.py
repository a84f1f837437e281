"""`OneByOne`: an asynchronous iterator over records that are ready and then over more of them."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from kera.client.consuming.delivering.one_by_one import OneByOne

pytestmark = pytest.mark.parametrize("kind", [OneByOne])


async def nothing_more() -> Any:
    raise StopAsyncIteration


async def test_ready_records_come_first_and_then_more_are_requested(kind: Any) -> None:
    asked: list[int] = []

    async def more() -> Any:
        asked.append(len(asked))
        await asyncio.sleep(0)
        if len(asked) > 2:
            raise StopAsyncIteration
        found.take(iter([(f"again {len(asked)}",)]))
        return ("more",)

    found = kind(more)
    found.take(iter([(), (1, 2)]))
    assert await anext(found) == ()
    assert asked == []
    assert [each async for each in found] == [(1, 2), ("more",), ("again 1",), ("more",), ("again 2",)]


async def test_new_records_replace_the_ready_ones(kind: Any) -> None:
    found = kind(nothing_more)
    found.take(iter([1, 2]))
    async for each in found:
        assert each == 1
        found.take(iter(()))


async def test_a_new_loop_goes_on_where_the_last_one_stopped(kind: Any) -> None:
    found = kind(nothing_more)
    found.take(iter(range(5)))
    async for each in found:
        if each == 2:
            break
    assert [each async for each in found] == [3, 4]


async def test_exceptions_are_plain_values_also_when_taken_by_tasks(kind: Any) -> None:
    values: list[Any] = [StopIteration(7), ValueError(8), (9, 10), StopAsyncIteration()]
    found = kind(nothing_more)
    found.take(iter(values))

    async def take() -> Any:
        return await anext(found)

    assert [await asyncio.create_task(take()) for _ in values[:2]] == values[:2]
    assert await asyncio.wait_for(anext(found), 10) is values[2]
    assert await asyncio.gather(*[anext(found, "end") for _ in range(2)]) == [values[3], "end"]


async def test_concurrent_requests_get_different_records(kind: Any) -> None:
    found = kind(nothing_more)
    found.take(iter("abc"))
    asked = [anext(found) for _ in range(3)]
    assert [await each for each in asked] == ["a", "b", "c"]
    with pytest.raises(RuntimeError, match="cannot reuse already awaited"):
        await asked[0]


@pytest.mark.parametrize("kind_of_error", [ValueError, RuntimeError])
async def test_an_error_is_raised_each_time(kind: Any, kind_of_error: type[Exception]) -> None:
    def wrong() -> Iterator[Any]:
        yield 1
        raise kind_of_error("at hand")

    async def more() -> Any:
        raise kind_of_error("more")

    found = kind(more)
    found.take(wrong())
    assert await anext(found) == 1
    with pytest.raises(kind_of_error, match="at hand"):
        await anext(found)
    for _ in range(2):
        with pytest.raises(kind_of_error, match="more"):
            await anext(found)


async def test_a_cancelled_wait_loses_no_record(kind: Any) -> None:
    coming: asyncio.Queue[int] = asyncio.Queue()
    found = kind(coming.get)
    waiting = asyncio.ensure_future(anext(found))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    coming.put_nowait(1)
    assert await anext(found) == 1


async def test_a_wait_that_never_begins_loses_no_record(kind: Any) -> None:
    found = kind(nothing_more)
    found.take(iter([1, 2, 3]))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(found), 0)
    task = asyncio.ensure_future(anext(found))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    assert [each async for each in found] == [1, 2, 3]


async def test_the_iterator_does_not_keep_its_owner_alive(kind: Any) -> None:
    class Owner:
        def __init__(self) -> None:
            self.found = kind(self.more)

        async def more(self) -> Any:
            raise StopAsyncIteration

    owner = Owner()
    owner.found.take(iter([owner]))
    assert await anext(owner.found) is owner
    seen = weakref.ref(owner)
    owner.found.take(iter([1, 2]))
    del owner
    gc.collect()
    assert seen() is None
