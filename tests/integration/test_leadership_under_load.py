"""Two coordinators on a ZooKeeper; the leader is killed or paused under load."""

import asyncio
import random
from pathlib import Path

import pytest

from kera.client import Client
from kera.core.errors import StreamExists
from tests.chaos.control import Chaos
from tests.integration.control_support import connect, control_cluster
from tests.integration.zookeeper import ZooKeeper

CREATED = 40


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param("broker+coordinator", id="in-a-recovery"),
        pytest.param("move+coordinator", id="in-a-move"),
        pytest.param("frozen-coordinator", id="and-wakes"),
    ],
)
async def test_a_lost_leader_leaves_nothing_half_done(
    tmp_path: Path,
    zookeeper: ZooKeeper,
    scenario: str,
) -> None:
    async with (
        control_cluster(
            tmp_path, backups=2, coordinators=2, zookeeper=f"{zookeeper.address}/{scenario.replace('+', '-')}"
        ) as cluster,
        Chaos(cluster, random.Random(7), replication=1) as chaos,
    ):
        await chaos.round(scenario)


@pytest.mark.slow
async def test_no_stream_is_lost_or_doubled_when_the_leader_is_killed_during_creations(
    tmp_path: Path,
    zookeeper: ZooKeeper,
) -> None:
    async with (
        control_cluster(
            tmp_path, brokers=1, backups=0, coordinators=2, zookeeper=f"{zookeeper.address}/burst"
        ) as cluster,
        await connect(cluster) as client,
    ):
        leader_at = (await client.admin.describe_cluster()).coordinators[0]
        leader = next(name for name, ready in cluster.ready.items() if ready.get("grpc_address") == leader_at)
        names = [f"s-{number}" for number in range(CREATED)]
        created = [asyncio.create_task(client.admin.create_stream(name)) for name in names]
        await asyncio.wait(created, return_when=asyncio.FIRST_COMPLETED)
        await cluster.kill(leader)
        made = {stream.name: stream.stream_id for stream in await asyncio.gather(*created)}
        listed = await client.admin.list_streams()
        assert {stream.name: stream.stream_id for stream in listed} == made
        assert len(listed) == len(set(made.values())) == CREATED
        with pytest.raises(StreamExists):
            await client.admin.create_stream(names[0])
        async with client.producer() as producer:
            for name in names:
                await producer.prepare(name)
                await producer.send(name, name.encode())
        await cluster.restart(leader)
        # A follower names the leader, so a client that knows only the follower gets there.
        async with await Client.connect(cluster.ready[leader]["grpc_address"]) as other:
            assert len(await other.admin.list_streams()) == CREATED
