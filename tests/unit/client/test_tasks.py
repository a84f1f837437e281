"""Background work of an owner: heard when it fails, ended with it."""

import asyncio

from kera.client.tasks import Tasks
from tests.unit.client.support import until


async def test_what_goes_wrong_is_told_to_the_owner() -> None:
    errors: list[BaseException] = []
    tasks = Tasks(errors.append)

    async def fail() -> None:
        raise ValueError("so be it")

    tasks.start(fail())
    await until(lambda: not len(tasks))
    assert [str(error) for error in errors] == ["so be it"]


async def test_all_ends_with_the_owner_also_what_has_not_begun() -> None:
    errors: list[BaseException] = []
    tasks = Tasks(errors.append)
    tasks.start(asyncio.Event().wait())
    await asyncio.sleep(0)
    tasks.start(asyncio.Event().wait())
    await tasks.end()
    assert (len(tasks), errors) == (0, [])
