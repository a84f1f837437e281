"""Long requests run in slices: one slice in a round of the loop, and requesters take turns."""

import asyncio
from collections.abc import Generator
from time import perf_counter

from kera.core.base.turns import Turns

ALWAYS_OVER = 0.0
"""A slice that is over after one step."""


def steps(name: str, count: int, done: list[str]) -> Generator[None, None, str]:
    for _ in range(count):
        done.append(name)
        yield
    return name


async def test_many_requests_get_one_slice_in_a_round_of_the_loop() -> None:
    turns, done = Turns(ALWAYS_OVER), list[str]()
    running = [asyncio.ensure_future(turns.run(steps("a", 5, done), n)) for n in range(40)]
    most = 0
    while not all(task.done() for task in running):
        before = len(done)
        await asyncio.sleep(0)
        most = max(most, len(done) - before)
    assert len(done) == 200
    assert most == 1


async def test_a_single_request_gets_as_many_slices_as_all_of_another_requester() -> None:
    turns, done = Turns(ALWAYS_OVER), list[str]()
    many = [asyncio.ensure_future(turns.run(steps("many", 10, done), "many")) for _ in range(40)]
    assert await turns.run(steps("one", 10, done), "one") == "one"
    assert done.count("many") <= 12
    await asyncio.gather(*many)


async def test_a_cancelled_request_takes_no_turn() -> None:
    turns, done = Turns(ALWAYS_OVER), list[str]()
    gone = [asyncio.ensure_future(turns.run(steps("gone", 10, done), "gone")) for _ in range(5)]
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    before = len(done)
    assert await turns.run(steps("here", 3, done), "here") == "here"
    assert done[before:] == ["here"] * 3


async def test_a_requester_that_takes_too_long_waits_while_others_run() -> None:
    worked_s = 0.0
    turns = Turns(now=lambda: worked_s + perf_counter())
    order: list[str] = []

    async def work(requester: str, took_s: float) -> None:
        nonlocal worked_s
        await turns.turn(requester)
        order.append(requester)
        worked_s += took_s

    slow = [asyncio.ensure_future(work("slow", 1.0)) for _ in range(3)]
    await slow[0]
    await asyncio.sleep(0)
    await asyncio.gather(*(work("quick", 0.0001) for _ in range(5)))
    assert order == ["slow", *["quick"] * 5], "nobody else waits for those who rest"
    await asyncio.gather(*slow)
    assert order[6:] == ["slow"] * 2
