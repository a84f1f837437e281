"""Idle connections, and announced requests that are never sent: daemons still serve everybody else."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from kera.client import Client
from kera.core.base.address import split_address
from kera.core.base.settings import KIB, MIB
from kera.core.rpc import api
from kera.core.rpc.frames import FrameKind, encode_frame
from kera.local.cluster import LocalCluster, RunningCluster
from kera.local.running import run_in_thread
from kera.v1 import backup_pb2, broker_pb2

DESCRIPTORS = 256
IDLE = 300
IDLE_AT_METRICS = 24
"""More than the server serves at once. Few, as its queue is short: the kernel makes all others wait."""
SERVED_S = 30.0
"""Longer than a coordinator keeps a connection that never sends the beginning of HTTP/2."""
ANNOUNCING = 40


class NarrowCluster(LocalCluster):
    """A cluster whose daemons may have few file descriptors."""

    def _argv_of(self, name: str) -> list[str]:
        return ["sh", "-c", f'ulimit -n {DESCRIPTORS} && exec "$@"', "sh", *super()._argv_of(name)]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """A broker, a backup and a coordinator that may have 256 file descriptors each."""
    cluster = NarrowCluster(
        backups=1,
        data_dir=tmp_path_factory.mktemp("narrow"),
        arena_bytes=4 * MIB,
        backup_memory_bytes=8 * MIB,
        segment_bytes=64 * KIB,
        broker_settings={"message_bytes_max": 32 * MIB, "metrics_port": 0},
        backup_settings={"message_bytes_max": 32 * MIB},
    )
    with run_in_thread(cluster) as running:
        yield running


@contextlib.contextmanager
def connections(address: str, count: int) -> Iterator[list[socket.socket]]:
    """`count` silent connections; a daemon may close them."""
    made: list[socket.socket] = []
    try:
        for _ in range(count):
            with contextlib.suppress(ConnectionError):
                made.append(socket.create_connection(split_address(address), timeout=SERVED_S))
        yield made
    finally:
        for each in made:
            each.close()


async def served(client: Client, stream: str) -> None:
    """Create a stream, write until its segments go to disk, and read."""
    async with asyncio.timeout(SERVED_S):
        await client.admin.create_stream(stream, replication=1, durability="replicated")
        async with client.producer() as producer:
            await producer.prepare(stream)
            sent = [producer.send(stream, bytes(10 * KIB), keys=b"k") for _ in range(100)]
            for delivery in sent:
                await delivery
        async with client.consumer(stream, start="earliest", end="latest") as consumer:
            assert len([record async for record in consumer]) == len(sent)


@pytest.mark.slow
async def test_idle_connections_leave_descriptors_for_other_clients(narrow: RunningCluster) -> None:
    ready = narrow.ready
    addresses = [
        ready["coordinator"]["grpc_address"],
        ready["broker-1"]["frames_address"],
        ready["broker-1"]["grpc_address"],
        ready["backup-1"]["frames_address"],
        ready["backup-1"]["grpc_address"],
    ]
    async with await Client.connect(narrow.bootstrap) as known:
        await served(known, "before")
        with contextlib.ExitStack() as idle:
            for address in addresses:
                idle.enter_context(connections(address, IDLE))
            idle.enter_context(connections(ready["broker-1"]["metrics_address"], IDLE_AT_METRICS))
            await served(known, "known")
            async with await Client.connect(narrow.bootstrap) as new:
                await served(new, "new")
            for name, pid in narrow.processes.items():
                assert psutil.Process(pid).num_fds() < DESCRIPTORS - 16, f"{name} has descriptors left"


def announcement(daemon: str, bulk_bytes: int) -> bytes:
    """The first 33 bytes of a request with a large bulk."""
    method, message = (
        (api.MULTI_WRITE_CHUNKS, broker_pb2.MultiWriteChunksRequest())
        if daemon == "broker-1"
        else (api.REPLICATE, backup_pb2.ReplicateRequest())
    )
    pieces: list[Any] = encode_frame(FrameKind.REQUEST, method, 1, message, [bytes(bulk_bytes)], bulk_bytes)
    return bytes(pieces[0])[:32] + b"\0"


@pytest.mark.parametrize("daemon", ["broker-1", "backup-1"])
def test_an_announced_request_takes_no_memory_before_its_data_arrives(narrow: RunningCluster, daemon: str) -> None:
    process = psutil.Process(narrow.processes[daemon])
    address = narrow.ready[daemon]["frames_address"]
    data = announcement(daemon, 32 * MIB)
    with connections(address, ANNOUNCING) as made:
        before = process.memory_info().rss
        for each in made:
            each.sendall(data)
        # The answer to another connection shows that the daemon has processed what these have sent.
        with socket.create_connection(split_address(address), timeout=SERVED_S) as other:
            other.sendall(b"no frame" + bytes(32))
            while other.recv(1 << 16):
                pass
        assert process.memory_info().rss - before < 16 * MIB
