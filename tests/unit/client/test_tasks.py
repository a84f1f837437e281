"""Background tasks of an owner: their errors reach the owner, and all tasks end together with the owner."""

import asyncio

from kera.client.tasks import Tasks
from tests.unit.client.support import until


async def test_the_error_of_a_task_reaches_the_owner() -> None:
    errors: list[BaseException] = []
    tasks = Tasks(errors.append)

    async def fail() -> None:
        raise ValueError("so be it")

    tasks.start(fail())
    await until(lambda: not len(tasks))
    assert [str(error) for error in errors] == ["so be it"]


async def test_ending_the_owner_ends_all_tasks_including_unstarted_ones() -> None:
    errors: list[BaseException] = []
    tasks = Tasks(errors.append)
    tasks.start(asyncio.Event().wait())
    await asyncio.sleep(0)
    tasks.start(asyncio.Event().wait())
    await tasks.end()
    assert (len(tasks), errors) == (0, [])
