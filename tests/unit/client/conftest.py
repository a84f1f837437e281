from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kera.client.consuming.group_consumer import GroupConsumer
from kera.client.consuming.groups.keep_alive import KeepAlive
from kera.client.consuming.groups.leases import STEPS_MAX
from kera.client.consuming.groups.settings import GroupConsumerSettings
from kera.client.producing.producer import Producer
from kera.client.producing.sending.routes import LIMITS, ProducerLimits
from kera.client.settings import ProducerSettings
from kera.core.base.clock import FakeClock, SystemClock
from kera.v1 import common_pb2
from tests.unit.client.fake_support import Fleet, MakeFleet, a_fleet
from tests.unit.client.group_support import ROWS, GroupCluster, numbered
from tests.unit.client.support import FakeCluster
from tests.unit.coordinator.fake_cluster import Cluster

MakeCluster = Callable[..., FakeCluster]
MakeProducer = Callable[..., Producer]
MakeMember = Callable[..., GroupConsumer]


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


@pytest.fixture
async def groups(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[GroupCluster]:
    """A cluster whose stream has one streamlet, or as many as the test's parameter says."""
    monkeypatch.setattr(KeepAlive, "_say", lambda _: None)  # no server listens there, and many attempts take long
    coordinator = Cluster()
    coordinator.clock = SystemClock()  # type: ignore[assignment]
    await coordinator.restart()
    cluster = GroupCluster(tmp_path, coordinator, entries=1, streamlets=getattr(request, "param", 1))
    yield cluster
    await cluster.close()
    cluster.arena.close()


@pytest.fixture
def members_clock(groups: GroupCluster) -> FakeClock:
    """The clock of members that are made from then on; the coordinator keeps that of the machine."""
    clock = FakeClock()
    groups.runtime = replace(groups.runtime, clock=clock)
    return clock


@pytest.fixture
async def make_member(groups: GroupCluster) -> AsyncIterator[MakeMember]:
    async with AsyncExitStack() as stack:

        def make(
            *, on_lost: Any = None, steps_max: int = STEPS_MAX, decoding: Any = None, **settings: Any
        ) -> GroupConsumer:
            given = {
                "fetch_wait_ms": 20,
                "heartbeat_interval_ms": 20,
                "commit_interval_ms": 20,
                "joined_bytes_max": 0,
                **settings,
            }
            consumer = GroupConsumer(
                groups,  # type: ignore[arg-type]
                "app",
                ["s"],
                GroupConsumerSettings(**given),
                on_lost=on_lost,
                steps_max=steps_max,
                decoding=decoding,
            )
            stack.push_async_callback(consumer.close)
            return consumer

        yield make


@pytest.fixture
async def fill_groups(groups: GroupCluster, make_producer: MakeProducer) -> Callable[..., Any]:
    producer = make_producer(groups, chunk_bytes_max=10_000)
    sent = 0

    async def send(count: int = ROWS) -> None:
        nonlocal sent
        values = [numbered(number) for number in range(sent, sent + count)]
        sent += count
        await producer.send_batch("s", pa.record_batch({"value": values}))
        await producer.flush()

    return send
