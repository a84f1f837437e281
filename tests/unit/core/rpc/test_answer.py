"""An answer calls its callback within the call that sets it."""

import asyncio
from typing import Any

import pytest

from kera.core.rpc import Answer


@pytest.fixture
async def answer() -> Answer[int]:
    return Answer(loop=asyncio.get_running_loop())


async def test_the_callback_gets_a_result_at_once(answer: Answer[int]) -> None:
    told: list[int] = []
    answer.when_done(lambda done: told.append(done.result()))
    answer.set_result(7)
    assert told == [7]
    assert await answer == 7
    assert told == [7]


async def test_the_callback_gets_an_error_at_once(answer: Answer[int]) -> None:
    told: list[Any] = []
    answer.when_done(lambda done: told.append(done.exception()))
    error = ValueError("no")
    answer.set_exception(error)
    assert told == [error]


async def test_a_callback_of_a_finished_answer_runs_in_the_next_round(answer: Answer[int]) -> None:
    told: list[int] = []
    answer.set_result(7)
    answer.when_done(lambda done: told.append(done.result()))
    assert told == []
    await asyncio.sleep(0)
    assert told == [7]


async def test_a_cancelled_answer_calls_its_callback_in_the_next_round(answer: Answer[int]) -> None:
    told: list[bool] = []
    answer.when_done(lambda done: told.append(done.cancelled()))
    assert answer.cancel()
    assert told == []
    await asyncio.sleep(0)
    assert told == [True]
    assert not answer.cancel()


async def test_tasks_can_await_an_answer_that_has_a_callback(answer: Answer[int]) -> None:
    told: list[int] = []
    answer.when_done(lambda done: told.append(done.result()))
    waiting = [asyncio.ensure_future(asyncio.wait_for(asyncio.shield(answer), 5)) for _ in range(2)]
    await asyncio.sleep(0)
    answer.set_result(7)
    assert await asyncio.gather(*waiting) == [7, 7]
    assert told == [7]


async def test_a_failing_callback_is_reported_and_the_answer_keeps_its_result(answer: Answer[int]) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    def fail(_: Answer[int]) -> None:
        raise ValueError("no")

    answer.when_done(fail)
    answer.set_result(7)
    assert [str(context["exception"]) for context in reported] == ["no"]
    assert await answer == 7
