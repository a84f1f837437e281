"""Several coordinators on a real ZooKeeper: election, takeover, and the state that survives a leader."""

import asyncio
import contextlib
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kera.client import Client, ClientSettings
from kera.client.admin.daemons import describe_daemon
from kera.coordinator.store.leadership import LEADER
from kera.coordinator.store.metadata import StoredRecord, Write
from kera.coordinator.store.zookeeper_session import ZooKeeperAddress, ZooKeeperSession
from kera.coordinator.store.zookeeper_store import ZooKeeperStore
from kera.core.base.settings import MIB
from kera.core.errors import KeraError, NotLeader, StreamExists, Uncertain, UnknownStream
from kera.core.rpc import api
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.method import call
from kera.local.cluster import LocalCluster
from kera.v1 import broker_pb2
from kera.v1 import coordinator_pb2 as messages
from tests.integration.shared_cluster import SharedCluster
from tests.integration.support import until
from tests.integration.zookeeper import ZooKeeper

SESSION_TIMEOUT_MS = 1500
TAKEOVER_S = 30.0
"""Bound on the time until another one leads: the session's time-out and little more; machines may be slow."""
TIMEOUT_S = 60.0
_roots = itertools.count(1)


class World:
    """A cluster, the store it shares, and one client."""

    def __init__(self, cluster: LocalCluster | SharedCluster, client: Client, store: ZooKeeperStore) -> None:
        self.cluster = cluster
        self.client = client
        self.store = store
        self._logged = {name: self._log_path(name).stat().st_size for name in self.names}
        """The initial length of each log: everything before is of earlier tests."""

    @property
    def names(self) -> list[str]:
        return [name for name in self.cluster.ready if name.startswith("coordinator")]

    def address(self, name: str) -> str:
        return str(self.cluster.ready[name]["grpc_address"])

    async def leader(self) -> str:
        """The name of the coordinator that leads and answers."""
        known = await self.client.admin.describe_cluster()
        return next(name for name in self.names if self.address(name) == known.coordinators[0])

    async def followers(self) -> list[str]:
        leader = await self.leader()
        return [name for name in self.names if name != leader]

    async def other_leads(self, than: str) -> str:
        """Wait until another coordinator leads; returns its name."""
        async with asyncio.timeout(TAKEOVER_S):
            while True:
                with contextlib.suppress(KeraError):
                    leader = await self.leader()
                    if leader != than:
                        return leader
                await asyncio.sleep(0.02)

    async def record(self) -> dict[str, Any]:
        """The store's record of the leader."""
        record = await self.store.get(LEADER)
        assert isinstance(record, StoredRecord)
        return dict(json.loads(record.value))

    def _log_path(self, name: str) -> Path:
        return self.cluster.log_dir / f"{name}.log"

    def log(self, name: str) -> list[dict[str, Any]]:
        lines = self._log_path(name).read_bytes()[self._logged[name] :].splitlines()
        return [json.loads(line) for line in lines if line.startswith(b"{")]

    async def refused(self, name: str) -> NotLeader:
        """The answer of a coordinator that does not lead."""
        channel = GrpcChannel(self.address(name))
        try:
            with pytest.raises(NotLeader) as error:
                await call(channel, api.LIST_STREAMS, messages.ListStreamsRequest(), timeout_s=TIMEOUT_S)
            return error.value
        finally:
            await channel.close()

    async def settled(self) -> None:
        """Wait until every coordinator knows the leader."""
        async with asyncio.timeout(TIMEOUT_S):
            while len((await self.client.admin.describe_cluster()).coordinators) < len(self.names):
                await asyncio.sleep(0.02)


def cluster_at(root: str, coordinators: int = 2) -> LocalCluster:
    return LocalCluster(
        brokers=1,
        arena_bytes=32 * MIB,
        coordinators=coordinators,
        zookeeper=root,
        coordinator_settings={
            "zookeeper_session_timeout_ms": SESSION_TIMEOUT_MS,
            "heartbeat_interval_ms": 200,
            "heartbeats_missed_max": 50,
        },
    )


@asynccontextmanager
async def world_of(cluster: LocalCluster | SharedCluster, root: str) -> AsyncIterator[World]:
    """A running cluster with metadata at `root`."""
    session = await ZooKeeperSession.connect(ZooKeeperAddress.parse(root), session_timeout_ms=30_000)
    try:
        async with await Client.connect(cluster.bootstrap, ClientSettings.load(request_timeout_ms=1000)) as client:
            yield World(cluster, client, await ZooKeeperStore.open(session))
    finally:
        await session.close()


@pytest.fixture(scope="module")
def shared(zookeeper: ZooKeeper) -> Iterator[tuple[SharedCluster, list[str]]]:
    """A cluster, and the roots of its metadata: the last one is current."""
    roots: list[str] = []

    def make() -> LocalCluster:
        roots.append(f"{zookeeper.address}/ha-{next(_roots)}")
        return cluster_at(roots[-1])

    with SharedCluster(make) as cluster:
        yield cluster, roots


@pytest.fixture
async def world(shared: tuple[SharedCluster, list[str]]) -> AsyncIterator[World]:
    cluster, roots = shared
    await cluster.make_whole()
    async with world_of(cluster, roots[-1]) as made:
        yield made


async def test_one_coordinator_leads_and_the_other_names_it(world: World) -> None:
    await world.settled()
    leader = await world.leader()
    (follower,) = await world.followers()

    assert (await world.refused(follower)).attributes == {"leader": world.address(leader)}
    known = await world.client.admin.describe_cluster()
    assert known.coordinators == (world.address(leader), world.address(follower))
    assert (await world.record())["address"] == world.address(leader)
    async with await Client.connect(world.address(follower)) as knows_one:
        await knows_one.admin.create_stream("s")
        await knows_one.admin.delete_stream("s")


async def test_the_leader_restores_a_record_that_is_deleted_in_zookeeper(world: World) -> None:
    """The next coordinator would refuse to lead without it."""
    await world.settled()
    await world.client.admin.create_stream("kept")
    leader = await world.leader()
    key, record = next(iter((await world.store.list("streams/")).items()))
    await world.store.write(Write(key, None, record.version))
    async with asyncio.timeout(TIMEOUT_S):
        while (put_back := await world.store.get(key)) is None:
            await asyncio.sleep(0.05)
    assert put_back.value == record.value
    (said,) = [line for line in world.log(leader) if line["event"].startswith("restored records of the metadata")]
    assert (said["level"], said["deleted"], said["changed"]) == ("error", [key], [])
    checks = (await describe_daemon(world.address(leader))).checks
    (records,) = [check for check in checks if check.name == "records"]
    assert records.state == "warning"
    assert records.text.startswith(f"another program deleted record {key} in the store")
    await world.cluster.kill(leader)
    await world.other_leads(than=leader)
    assert [stream.name for stream in await world.client.admin.list_streams()] == ["kept"]
    await world.client.admin.delete_stream("kept")


@pytest.mark.parametrize("graceful", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_a_leader_that_ends_during_creations_loses_and_doubles_no_stream(world: World, *, graceful: bool) -> None:
    leader = await world.leader()
    epoch = (await world.record())["epoch"]
    names = [f"s-{number}" for number in range(40)]
    creations = [asyncio.create_task(world.client.admin.create_stream(name)) for name in names]
    await asyncio.wait(creations, return_when=asyncio.FIRST_COMPLETED)
    if graceful:
        pid = world.cluster.processes[leader]
        await asyncio.to_thread(subprocess.run, ["kill", f"-{signal.SIGTERM}", str(pid)], check=True)
    else:
        await world.cluster.kill(leader)

    made = await asyncio.wait_for(asyncio.gather(*creations), TIMEOUT_S)

    assert await world.other_leads(leader) != leader
    await until(lambda: leader not in world.cluster.processes)  # otherwise it ends in the next test
    listed = await world.client.admin.list_streams()
    assert {stream.name: stream.stream_id for stream in listed} == {stream.name: stream.stream_id for stream in made}
    assert sorted(stream.name for stream in listed) == sorted(names)
    assert len({stream.stream_id for stream in listed}) == len(names)
    with pytest.raises(StreamExists):
        await world.client.admin.create_stream(names[0])
    assert (await world.record())["epoch"] > epoch


@pytest.mark.slow
async def test_each_name_goes_to_one_of_two_competing_creations_when_the_leader_ends(world: World) -> None:
    leader = await world.leader()
    names = [f"s-{number}" for number in range(20)]
    async with await Client.connect(world.cluster.bootstrap, ClientSettings.load(request_timeout_ms=1000)) as other:
        bursts = [
            [asyncio.create_task(client.admin.create_stream(name)) for name in names]
            for client in (world.client, other)
        ]
        await asyncio.wait(bursts[0] + bursts[1], return_when=asyncio.FIRST_COMPLETED)
        await world.cluster.kill(leader)
        made = [await asyncio.gather(*burst, return_exceptions=True) for burst in bursts]
    listed = {stream.name: stream.stream_id for stream in await world.client.admin.list_streams()}

    assert sorted(listed) == sorted(names)
    for name, *outcomes in zip(names, *made, strict=True):
        (stream,) = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        assert stream.stream_id == listed[name]
        (refused,) = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert isinstance(refused, StreamExists)


@pytest.mark.slow
async def test_brokers_drop_all_deleted_streams_when_the_leader_ends_during_deletions(world: World) -> None:
    leader = await world.leader()
    made = await asyncio.gather(*(world.client.admin.create_stream(f"s-{number}") for number in range(20)))
    deletions = [asyncio.create_task(world.client.admin.delete_stream(stream.name)) for stream in made]
    await asyncio.wait(deletions, return_when=asyncio.FIRST_COMPLETED)
    await world.cluster.kill(leader)

    await asyncio.wait_for(asyncio.gather(*deletions), TIMEOUT_S)

    assert await world.client.admin.list_streams() == []
    broker = GrpcChannel(str(world.cluster.ready["broker-1"]["grpc_address"]))
    async with asyncio.timeout(TIMEOUT_S):
        while [stream for stream in made if await has(broker, stream.stream_id)]:
            await asyncio.sleep(0.05)
        while await world.store.list("drops/"):
            await asyncio.sleep(0.05)
    await broker.close()


async def has(broker: GrpcChannel, stream_id: int) -> bool:
    """Whether a broker has a stream."""
    request = broker_pb2.DescribeStreamletsRequest(stream_id=stream_id)
    try:
        await call(broker, api.DESCRIBE_STREAMLETS, request, timeout_s=TIMEOUT_S)
    except UnknownStream:
        return False
    return True


async def test_a_broker_continues_with_the_next_leader_and_streams_stay_usable(world: World) -> None:
    leader = await world.leader()
    await world.client.admin.create_stream("s")
    async with world.client.producer() as producer:
        await producer.prepare("s")
        await producer.send("s", b"before")
        await world.cluster.kill(leader)
        await producer.send("s", b"while nobody leads")
        await producer.drain()
        await world.other_leads(leader)
        async with asyncio.timeout(TIMEOUT_S):
            while not all(broker.alive for broker in (await world.client.admin.describe_cluster()).brokers):
                await asyncio.sleep(0.02)
        await producer.send("s", b"after")
        await producer.drain()
    values = []
    async with world.client.consumer("s", start="earliest", end="latest") as consumer:
        values = [record.value async for record in consumer]
    assert values == [b"before", b"while nobody leads", b"after"]
    assert set(world.cluster.processes) == {"broker-1", *world.names} - {leader}


@pytest.mark.slow
async def test_a_leader_that_was_paused_too_long_changes_nothing_and_follows(world: World) -> None:
    await world.settled()
    leader = await world.leader()
    epoch = (await world.record())["epoch"]
    await world.client.admin.create_stream("before")
    channel = GrpcChannel(world.address(leader))
    await call(channel, api.LIST_STREAMS, messages.ListStreamsRequest(), timeout_s=TIMEOUT_S)
    await world.cluster.pause(leader)
    # Requests that it finds when it wakes: they came to a leader that is a follower now, and must not be carried out.
    late = [
        asyncio.create_task(
            call(
                channel,
                api.CREATE_STREAM,
                messages.CreateStreamRequest(name=f"late-{number}", creation_id=f"late-{number}"),
                timeout_s=TIMEOUT_S,
            )
        )
        for number in range(5)
    ]
    other = await world.other_leads(leader)
    await world.client.admin.create_stream("between")
    await world.cluster.resume(leader)

    for outcome in await asyncio.gather(*late, return_exceptions=True):
        assert isinstance(outcome, NotLeader | Uncertain)
    await world.settled()
    assert await world.leader() == other
    assert (await world.refused(leader)).attributes == {"leader": world.address(other)}
    assert [stream.name for stream in await world.client.admin.list_streams()] == ["before", "between"]
    record = await world.record()
    assert record["address"] == world.address(other)
    assert record["epoch"] > epoch
    await channel.close()


@pytest.mark.slow
async def test_a_leader_that_was_paused_for_a_moment_keeps_leading(world: World) -> None:
    leader = await world.leader()
    before = await world.record()
    await world.cluster.pause(leader)
    await asyncio.sleep(SESSION_TIMEOUT_MS / 1000 / 4)  # sleep: the test is about the length of the pause
    await world.cluster.resume(leader)

    await world.client.admin.create_stream("s")

    assert await world.leader() == leader
    assert await world.record() == before


async def test_the_cluster_continues_after_an_outage_of_zookeeper(zookeeper: ZooKeeper, world: World) -> None:
    await world.client.admin.create_stream("before")
    await asyncio.to_thread(zookeeper.stop)
    try:
        await until(lambda: any(entry.get("event") == "no longer leading" for entry in self_logs(world)))
        for name in world.names:
            assert (await world.refused(name)).retriable
    finally:
        await asyncio.to_thread(zookeeper.start)

    await asyncio.wait_for(world.client.admin.create_stream("after"), TIMEOUT_S)

    assert [stream.name for stream in await world.client.admin.list_streams()] == ["after", "before"]
    assert set(world.cluster.processes) == {"broker-1", *world.names}


@pytest.mark.slow
async def test_the_cluster_continues_after_zookeeper_hung(zookeeper: ZooKeeper, world: World) -> None:
    await world.client.admin.create_stream("before")
    zookeeper.pause()
    try:
        await until(lambda: any(entry.get("event") == "no longer leading" for entry in self_logs(world)))
    finally:
        zookeeper.resume()

    await asyncio.wait_for(world.client.admin.create_stream("after"), TIMEOUT_S)

    assert [stream.name for stream in await world.client.admin.list_streams()] == ["after", "before"]


async def test_coordinators_stop_in_time_while_zookeeper_hangs(zookeeper: ZooKeeper) -> None:
    root = f"{zookeeper.address}/ha-{next(_roots)}"
    async with cluster_at(root) as cluster, world_of(cluster, root) as world:
        zookeeper.pause()
        try:
            creation = asyncio.create_task(world.client.admin.create_stream("never"))
            assert await cluster.stop() == []
            codes = [cluster._children[name].returncode for name in world.names]
            creation.cancel()
        finally:
            zookeeper.resume()

        assert codes == [0, 0]


@pytest.mark.slow
async def test_all_coordinators_can_be_restarted_one_after_the_other(
    zookeeper: ZooKeeper,
) -> None:
    root = f"{zookeeper.address}/ha-{next(_roots)}"
    async with cluster_at(root, coordinators=3) as cluster, world_of(cluster, root) as world:
        for number, name in enumerate(world.names):
            await world.client.admin.create_stream(f"s-{number}")
            await cluster.restart(name)
            await world.settled()

        assert [stream.name for stream in await world.client.admin.list_streams()] == ["s-0", "s-1", "s-2"]
        (broker,) = (await world.client.admin.describe_cluster()).brokers
        assert broker.alive


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--zookeeper", "nonsense"], "zookeeper: 'nonsense' is not an address"),
        (["--advertised-address", "here"], "advertised_address: 'here' is not an address"),
        (["--zookeeper", "127.0.0.1:1", "--host", "0.0.0.0"], "--advertised-address"),
        pytest.param(["--zookeeper", "127.0.0.1:1", "--host", "::"], "--advertised-address", marks=pytest.mark.slow),
    ],
)
async def test_a_coordinator_does_not_start_with_a_wrong_address(
    arguments: list[str], said: str, tmp_path: Any
) -> None:
    command = [sys.executable, "-m", "kera.cli", "coordinator", "--port", "0", "--data-dir", str(tmp_path), *arguments]
    ended = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ended.returncode == 2
    assert said in ended.stderr


def self_logs(world: World) -> list[dict[str, Any]]:
    return [entry for name in world.names for entry in world.log(name)]
