"""The lock for changes: it admits one change at a time, and requesters take turns."""

import asyncio

import pytest

from kera.coordinator.cluster.changing import REQUESTER, Changing


async def change(lock: Changing, requester: str, done: list[str]) -> None:
    REQUESTER.set(requester)
    async with lock:
        done.append(requester)
        await asyncio.sleep(0)


async def test_requesters_take_turns() -> None:
    lock, done = Changing(), list[str]()
    many = [asyncio.create_task(change(lock, "many", done)) for _ in range(40)]
    await asyncio.sleep(0)
    await change(lock, "one", done)
    assert done.index("one") <= 2
    await asyncio.gather(*many)
    assert done.count("many") == 40


async def test_only_one_task_holds_the_lock() -> None:
    lock, held = Changing(), list[int]()

    async def hold() -> None:
        async with lock:
            held.append(1)
            await asyncio.sleep(0)
            assert held == [1]
            held.clear()

    await asyncio.gather(*(hold() for _ in range(5)))


@pytest.mark.parametrize("rounds", [0, 1, 2])
async def test_a_cancelled_waiter_leaves_the_lock_to_the_next_one(rounds: int) -> None:
    lock, done = Changing(), list[str]()
    await lock.__aenter__()
    given_up = asyncio.create_task(change(lock, "a", done))
    waiting = asyncio.create_task(change(lock, "b", done))
    await asyncio.sleep(0)
    if rounds:
        await lock.__aexit__()  # so the cancelled task has got the lock already
    given_up.cancel()
    if not rounds:
        await lock.__aexit__()
    await waiting
    assert done == ["b"]
    await change(lock, "c", done)
