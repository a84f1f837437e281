"""Consoles of a cluster in this process."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from kera.client import ChunkPlace, ChunkQuery, Client, ClientSettings, StreamDescription
from kera.client.testing import FakeCluster
from kera.console.application import application
from kera.console.house import Cluster, House
from tests.unit.console.browser import Browser

MakeBrowser = Callable[..., Awaitable[Browser]]


async def all_is_well(_: Client, __: ClientSettings, ___: Sequence[StreamDescription]) -> list[Any]:
    return []


@pytest.fixture(autouse=True)
def _entries_are_read_from_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake brokers cannot locate a record: reads start at the beginning, and skip the records before it."""

    async def locate(_: Client, __: str, queries: Sequence[ChunkQuery]) -> list[ChunkPlace]:
        return [ChunkPlace(query.start, 0, 0) for query in queries]

    monkeypatch.setattr(Client, "locate", locate)


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster(brokers=2) as fake:
        yield fake


@pytest.fixture
async def console(cluster: FakeCluster) -> AsyncIterator[MakeBrowser]:
    async with AsyncExitStack() as stack:

        async def make(*, admin: bool = False, names: Sequence[str] = ("localhost",)) -> Browser:
            house = House(Cluster(cluster.bootstrap, cluster.settings(), all_is_well), admin=admin, encrypted=False)
            await house.open()
            stack.push_async_callback(house.close)
            return Browser(application(house, names))

        yield make
