"""Metadata are restored from an older copy, with real daemons: nothing is destroyed, and all data come back."""

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kera.client import Client
from kera.core.errors import InvalidArgument, StreamExists, UnknownStream
from kera.local.cluster import LocalCluster
from tests.integration.control_support import broker_id_of, connect, control_cluster, until_recovered

TIMEOUT_S = 30.0
RECORDS = 500
Restored = Callable[[LocalCluster, Path, Path], contextlib.AbstractAsyncContextManager[None]]


async def write(client: Client, stream: str, numbers: range) -> None:
    async with client.producer() as producer:
        await producer.prepare(stream)
        for delivery in [producer.send(stream, b"%d" % number) for number in numbers]:
            await delivery


async def read(client: Client, stream: str) -> list[int]:
    async with asyncio.timeout(TIMEOUT_S), client.consumer(stream, start="earliest", end="latest") as consumer:
        return sorted([int(record.value or b"") async for record in consumer])


async def until_caught_up(cluster: LocalCluster) -> None:
    """Wait until the coordinator reports that its metadata are no longer older than the cluster."""
    async with await Client.connect(cluster.bootstrap) as client, asyncio.timeout(TIMEOUT_S):
        while (await client.admin.describe_cluster()).catching_up:
            await asyncio.sleep(0.05)


async def until_noted(data_dir: Path) -> None:
    """Wait until a broker has noted that another coordinator leads than before."""

    def noted() -> int:
        return int(json.loads((data_dir / "broker.json").read_text())["coordinator_epoch"])

    async with asyncio.timeout(TIMEOUT_S):
        before = noted()
        while noted() == before:
            await asyncio.sleep(0.02)


async def until_listed(client: Client, expected: dict[str, int]) -> None:
    """Wait until brokers have reported these streams, unknown to the coordinator, with these numbers of records."""
    found: dict[str, int] = {}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(TIMEOUT_S):
            while found != expected or not found:
                found = {one.name: one.records for one in (await client.admin.describe_cluster()).unknown_streams}
                await asyncio.sleep(0.05)
    assert found == expected


def kera(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kera.cli", "cluster", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@contextlib.asynccontextmanager
async def put_back(cluster: LocalCluster, directory: Path, copy: Path) -> AsyncIterator[None]:
    """Copy the coordinator's directory while it is down; at the end, put the copy in its place while it is down again.

    The copy has no mark, but all brokers have heard from a coordinator that it does not know.
    """
    await cluster.kill("coordinator")
    shutil.copytree(directory, copy)
    brokers = [name for name in cluster.ready if name.startswith("broker")]
    async with asyncio.TaskGroup() as waiting:
        for name in brokers:
            waiting.create_task(until_noted(directory.parent / name))
        await cluster.restart("coordinator")
    yield
    await cluster.kill("coordinator")
    shutil.rmtree(directory)
    copy.rename(directory)


@contextlib.asynccontextmanager
async def put_back_by_command(cluster: LocalCluster, directory: Path, copy: Path) -> AsyncIterator[None]:
    """The same with a copy that is made while everything runs."""
    done = await asyncio.to_thread(kera, "backup", str(copy), "--bootstrap", cluster.bootstrap)
    assert done.returncode == 0, done.stderr
    yield
    restore = ("restore", str(copy), "--data-dir", str(directory))
    refused = await asyncio.to_thread(kera, *restore, "--force")
    assert refused.returncode == 2
    assert "another coordinator" in refused.stderr
    await cluster.kill("coordinator")
    refused = await asyncio.to_thread(kera, *restore)
    assert refused.returncode == 1
    assert "--force" in refused.stderr
    done = await asyncio.to_thread(kera, *restore, "--force")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("brokers_end", "restored"), [pytest.param(False, put_back, marks=pytest.mark.slow), (True, put_back_by_command)]
)
async def test_streams_younger_than_the_restored_metadata_are_kept_and_can_be_adopted(
    tmp_path: Path,
    brokers_end: bool,
    restored: Restored,
) -> None:
    metadata = tmp_path / "data" / "coordinator"
    async with control_cluster(tmp_path / "data", brokers=2, backups=2) as cluster:
        async with await connect(cluster) as client:
            await client.admin.create_stream("old", streamlets=2)
            await write(client, "old", range(10))
        async with restored(cluster, metadata, tmp_path / "copy"), await connect(cluster) as client:
            ids = {}
            for replication in (0, 1):
                name = f"young-{replication}"
                await client.admin.create_stream(name, streamlets=2, replication=replication)
                ids[name] = await client.admin.stream_id(name)
                await write(client, name, range(RECORDS))
        if brokers_end:
            await cluster.kill("broker-1")
        await cluster.restart("coordinator")
        if brokers_end:
            await cluster.restart("broker-1")
            await cluster.restart("broker-2")  # it is stopped first

        async with await connect(cluster) as client:
            await until_listed(client, {"young-0": RECORDS, "young-1": RECORDS})
            await client.admin.create_stream("other", streamlets=2)
            await write(client, "other", range(10))
            assert await read(client, "other") == list(range(10))
            assert await read(client, "old") == list(range(10))
            with pytest.raises(UnknownStream):
                await client.admin.stream_id("young-0")
            with pytest.raises(StreamExists, match="--name"):
                await client.admin.adopt_stream("young-0", "other")
            with pytest.raises((UnknownStream, InvalidArgument)):
                await client.admin.adopt_stream("nobody")
            for name, stream_id in ids.items():
                adopted = await client.admin.adopt_stream(name, "renamed" if name == "young-0" else "")
                assert adopted.stream_id == stream_id
                await write(client, adopted.name, range(RECORDS, RECORDS + 10))
                assert await read(client, adopted.name) == list(range(RECORDS + 10))
            assert (await client.admin.describe_cluster()).unknown_streams == ()
            await client.admin.delete_stream("renamed")


@pytest.mark.slow
@pytest.mark.parametrize("restored", [put_back, put_back_by_command])
async def test_streamlets_recovered_since_a_copy_stay_with_their_new_owners(tmp_path: Path, restored: Restored) -> None:
    """The lost broker knows no more than the copy, and starts together with the others."""
    metadata, streams = tmp_path / "data" / "coordinator", {"replicated": 1, "single": 0}
    async with control_cluster(tmp_path / "data", brokers=3, backups=3) as cluster:
        async with await connect(cluster) as client:
            for name, replication in streams.items():
                await client.admin.create_stream(name, streamlets=6, replication=replication)
                await write(client, name, range(100))
        async with restored(cluster, metadata, tmp_path / "copy"):
            async with await connect(cluster) as client:
                for name in streams:
                    await write(client, name, range(100, 200))
                await cluster.kill("broker-1")
                await until_recovered(client, [broker_id_of(cluster, "broker-1")], 0)
                await write(client, "replicated", range(200, 300))
            for name in [one for one in cluster.processes if one != "coordinator"]:
                await cluster.kill(name)
        await cluster.restart("coordinator")
        names = [name for name in cluster.ready if name != "coordinator"]
        await asyncio.gather(*map(cluster.restart, names))

        await until_caught_up(cluster)
        async with await connect(cluster) as client:
            assert await read(client, "replicated") == list(range(300))
            assert await read(client, "single") == list(range(200))
            for name in streams:
                await write(client, name, range(300, 400))
            assert await read(client, "replicated") == list(range(400))
            assert await read(client, "single") == [*range(200), *range(300, 400)]
            assert (await client.admin.describe_cluster()).unknown_streams == ()


@pytest.mark.slow
@pytest.mark.parametrize("restored", [put_back, put_back_by_command])
async def test_a_running_broker_younger_than_the_restored_metadata_continues(
    tmp_path: Path, restored: Restored
) -> None:
    metadata = tmp_path / "data" / "coordinator"
    async with control_cluster(tmp_path / "data", brokers=2, backups=2) as cluster:
        async with await connect(cluster) as client:
            await client.admin.create_stream("orders", streamlets=4, replication=1)
            await write(client, "orders", range(100))
        async with restored(cluster, metadata, tmp_path / "copy"), await connect(cluster) as client:
            await cluster.kill("broker-1")
            await cluster.restart("broker-1")
            await write(client, "orders", range(100, 200))
            running = {name: process for name, process in cluster.processes.items() if name.startswith("broker")}
        await cluster.restart("coordinator")

        async with await connect(cluster) as client:
            async with asyncio.timeout(TIMEOUT_S):
                while not all(one.alive for one in (await client.admin.describe_cluster()).brokers):
                    await asyncio.sleep(0.05)
            await until_caught_up(cluster)
            await write(client, "orders", range(200, 300))
            assert await read(client, "orders") == list(range(300))
            assert (await client.admin.describe_cluster()).unknown_streams == ()
            assert await client.admin.recoveries() == []
        assert {name: cluster.processes.get(name) for name in running} == running
