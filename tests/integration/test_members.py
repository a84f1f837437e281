"""Members behind another address, members with ids of their choice, and members that are gone for good: real
daemons.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kera.client import Client, ClientSettings
from kera.core.base.settings import MIB
from kera.core.errors import InvalidArgument
from kera.local.cluster import LocalCluster
from tests.integration.control_support import broker_id_of, connect, control_cluster

TIMEOUT_S = 30.0


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kera.cli", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@contextlib.asynccontextmanager
async def relay(target: list[str], connections: list[str]) -> AsyncIterator[str]:
    """Another address for the server at `target`, which is known later; notes each connection."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(target[0])
        host, _, port = target[0].rpartition(":")
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def test_a_broker_is_reached_at_the_address_that_it_advertises() -> None:
    """It listens at all addresses; clients and the coordinator connect to a relay."""
    grpc_at, frames_at, connections = [""], [""], list[str]()
    async with relay(grpc_at, connections) as grpc_address, relay(frames_at, connections) as frames_address:
        ports = {"port": free_port(), "frames_port": free_port()}
        grpc_at[0], frames_at[0] = (f"127.0.0.1:{port}" for port in ports.values())
        told = {"advertised_address": grpc_address, "advertised_frames_address": frames_address}
        settings = {"host": "0.0.0.0", "insecure": True, **ports, **told}
        async with LocalCluster(broker_settings=settings) as cluster:
            for transport in ("tcp", "grpc", "auto"):
                connections.clear()
                limits = ClientSettings.load(transport=transport)
                async with await Client.connect(cluster.bootstrap, limits) as client, client.producer() as producer:
                    if transport == "tcp":
                        await client.admin.create_stream("s")
                        assert set(connections) == {grpc_at[0]}, "the coordinator's orders"
                        connections.clear()
                    await producer.prepare("s")
                    await producer.send("s", b"x")
                    (broker,) = (await client.admin.describe_cluster()).brokers
                    assert (broker.grpc_address, broker.frames_address) == (grpc_address, frames_address)
                expected = {"tcp": {frames_at[0]}, "grpc": {grpc_at[0]}, "auto": set()}
                assert set(connections) == expected[transport], "on the same host a client takes the unix socket"


@pytest.mark.parametrize("daemon", ["broker", "backup"])
@pytest.mark.parametrize("host", ["0.0.0.0", pytest.param("::", marks=pytest.mark.slow)])
def test_a_daemon_that_listens_everywhere_needs_an_advertised_address(tmp_path: Path, daemon: str, host: str) -> None:
    done = run(daemon, "--host", host, "--insecure", "--data-dir", str(tmp_path / "data"))
    assert done.returncode == 2
    assert f"kera: error: advertised_address: other hosts cannot reach {host}; set" in done.stderr
    assert not (tmp_path / "data").exists()


async def test_a_broker_keeps_its_chosen_id_and_conflicts_are_refused(tmp_path: Path) -> None:
    async with LocalCluster(data_dir=tmp_path, broker_settings={"broker_id": 42}, arena_bytes=16 * MIB) as cluster:
        assert broker_id_of(cluster, "broker-1") == 42
        await cluster.restart("broker-1")
        assert broker_id_of(cluster, "broker-1") == 42
        common = ("--coordinator", cluster.bootstrap, "--arena-bytes", "16MiB")
        taken = await asyncio.to_thread(
            run, "broker", *common, "--data-dir", str(tmp_path / "other"), "--broker-id", "42"
        )
        assert taken.returncode != 0
        assert "there is a broker 42 already" in taken.stderr
        await cluster.kill("broker-1")
        Path(cluster.ready["broker-1"]["arena_path"]).unlink()
        path = str(cluster.directory / "broker-1")
        other = await asyncio.to_thread(run, "broker", *common, "--data-dir", path, "--broker-id", "7")
        assert other.returncode == 2
        assert f"{path} belongs to broker 42, not 7" in other.stderr


async def test_a_lost_broker_can_be_forgotten_and_its_stream_continues(tmp_path: Path) -> None:
    async with control_cluster(tmp_path, brokers=2, backups=0) as cluster, await connect(cluster) as client:
        await client.admin.create_stream("s", streamlets=2)
        async with client.producer() as producer:
            await producer.prepare("s")
            for number in range(10):
                await producer.send("s", b"before-%d" % number, streamlet=number % 2)
        stream = await client.admin.describe_stream("s")
        gone = broker_id_of(cluster, "broker-2")
        lost = next(number for number, one in stream.assignments.items() if one.broker_id == gone)
        refused = await asyncio.to_thread(run, "cluster", "forget", f"broker-{gone}", "--bootstrap", cluster.bootstrap)
        assert "is alive" in refused.stderr
        await cluster.kill("broker-2")
        await _until_dead(client, gone)
        with pytest.raises(InvalidArgument, match="'s', which has no replicas"):
            await client.admin.forget_broker(gone)

        forced = await asyncio.to_thread(
            run, "cluster", "forget", f"broker-{gone}", "--force", "--bootstrap", cluster.bootstrap
        )
        assert forced.returncode == 0, forced.stderr
        assert "lost: stream 's', which has no replicas: all records of 1 of its streamlets" in forced.stdout
        assert [one.broker_id for one in (await client.admin.describe_cluster()).brokers] == [3 - gone]

    async with control_cluster_again(tmp_path) as cluster, await connect(cluster) as client:
        async with client.producer() as producer:
            await producer.prepare("s")
            for number in range(10):
                await producer.send("s", b"after-%d" % number, streamlet=number % 2)
        async with client.consumer("s", start="earliest", end="latest") as consumer:
            read = [record.value async for record in consumer]
        kept = {b"before-%d" % number for number in range(10) if number % 2 != lost}
        assert set(read) == kept | {b"after-%d" % number for number in range(10)}
        assert len(read) == 15


def control_cluster_again(tmp_path: Path) -> contextlib.AbstractAsyncContextManager[LocalCluster]:
    """The cluster with its remaining members."""
    return control_cluster(tmp_path, brokers=1, backups=0)


async def _until_dead(client: Client, broker_id: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while any(one.alive and one.broker_id == broker_id for one in (await client.admin.describe_cluster()).brokers):
            await asyncio.sleep(0.05)
