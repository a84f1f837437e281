"""A query commits its cursor per stream; the failure of one stream does not affect the others."""

import asyncio
from typing import Any

import pytest

from kera.core.base.ids import EntryId
from kera.core.errors import Unavailable
from kera.spark_connector.planning.offsets import EntryOffset, Offsets, StreamOffsets
from kera.spark_connector.reading import cursor
from tests.unit.spark_connector.fakes import FakeClient, at

DONE = Offsets(
    {
        "numbers": StreamOffsets(7, {0: (EntryOffset(at(1), 4),), 2: (EntryOffset(at(3), 6),)}),
        "other": StreamOffsets(8, {0: (EntryOffset(at(0), 0),)}),
    }
)


class Failing(FakeClient):
    """Fails or never answers for the stream "numbers"."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__({})
        self.error = error

    async def commit(self, consumer_group: str, stream: str, positions: Any, *, unnamed: bool = False) -> None:
        assert unnamed
        if stream == "numbers":
            if self.error is None:
                await asyncio.Event().wait()
            else:
                raise self.error
        await super().commit(consumer_group, stream, positions)


async def test_the_position_of_every_entry_is_committed() -> None:
    client = FakeClient({})

    assert await cursor.store(client, "etl", DONE, unnamed=True) == {}  # type: ignore[arg-type]

    assert client.committed == {
        ("etl", "numbers"): {EntryId(7, 0, 0): at(1), EntryId(7, 2, 0): at(3)},
        ("etl", "other"): {EntryId(8, 0, 0): at(0)},
    }


async def test_a_failed_commit_is_returned_and_other_streams_are_committed() -> None:
    client = Failing(Unavailable("gone"))

    assert await cursor.store(client, "etl", DONE, unnamed=True) == {"numbers": "gone"}  # type: ignore[arg-type]

    assert set(client.committed) == {("etl", "other")}


async def test_a_commit_without_an_answer_times_out() -> None:
    failures = await cursor.store(Failing(None), "etl", DONE, unnamed=True, timeout_s=0.01)  # type: ignore[arg-type]

    assert list(failures) == ["numbers"]
    assert "no answer" in failures["numbers"]


async def test_an_unexpected_exception_of_a_commit_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await cursor.store(Failing(ZeroDivisionError()), "etl", DONE, unnamed=True)  # type: ignore[arg-type]
