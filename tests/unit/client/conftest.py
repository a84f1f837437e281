from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kera.client.producing.limits import LIMITS, ProducerLimits
from kera.client.producing.producer import Producer
from kera.client.settings import ProducerSettings
from kera.v1 import common_pb2
from tests.unit.client.fake_support import Fleet, MakeFleet, a_fleet
from tests.unit.client.support import FakeCluster

MakeCluster = Callable[..., FakeCluster]
MakeProducer = Callable[..., Producer]


@pytest.fixture
async def make_cluster(tmp_path: Path) -> AsyncIterator[MakeCluster]:
    """Makes clusters of one broker without processes."""
    made: list[FakeCluster] = []

    def make(*infos: common_pb2.StreamInfo, **options: Any) -> FakeCluster:
        made.append(FakeCluster(tmp_path, *infos, **options))
        return made[-1]

    yield make
    for cluster in made:
        cluster.arena.close()


@pytest.fixture
async def make_fleet() -> AsyncIterator[MakeFleet]:
    """Makes fake clusters with a stream ``s``."""
    async with AsyncExitStack() as stack:

        async def make(**options: Any) -> Fleet:
            return await stack.enter_async_context(a_fleet(**options))

        yield make


@pytest.fixture
async def cluster(make_cluster: MakeCluster) -> FakeCluster:
    """One stream, ``s``, with one streamlet."""
    return make_cluster()


@pytest.fixture
async def make_producer() -> AsyncIterator[MakeProducer]:
    """Makes producers; they are closed at the end, without flushing."""
    async with AsyncExitStack() as stack:

        def make(cluster: FakeCluster, *, limits: ProducerLimits = LIMITS, **settings: Any) -> Producer:
            producer = Producer(cluster, ProducerSettings(**settings), limits=limits)  # type: ignore[arg-type]
            stack.push_async_callback(producer.close, flush=False)
            return producer

        yield make
