"""Clients that request much and read no answer: memory stays bounded, and writers continue."""

import asyncio
import contextlib
import os
import socket
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc.aio
import psutil
import pytest

from kera.client import Client
from kera.core.base.address import split_address
from kera.core.base.settings import KIB, MIB
from kera.core.push import PushKind, encode
from kera.core.rpc import api
from kera.core.rpc.frames import FrameKind, encode_frame
from kera.core.rpc.method import Method
from kera.local.cluster import LocalCluster, RunningCluster
from kera.local.running import run_in_thread
from kera.v1 import backup_pb2, broker_pb2, common_pb2, push_pb2

CONNECTIONS = int(os.environ.get("KERA_UNTAKEN_CONNECTIONS", "40"))
PIPELINED = 16
"""Requests of each connection."""
ARENA_BYTES = 64 * MIB
SEGMENT_BYTES = 1 * MIB
KEPT_BYTES = 24 * MIB
"""The amount of data that can be read."""
WRITTEN_BYTES = 2 * ARENA_BYTES
"""Written while answers are not read: more than fits into memory."""
GROWTH_BYTES_MAX = 400 * MIB
"""The limit for the growth of a daemon's own memory."""
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """A broker and a backup with something to read."""
    made = LocalCluster(
        backups=1,
        data_dir=tmp_path_factory.mktemp("untaken"),
        arena_bytes=ARENA_BYTES,
        backup_memory_bytes=ARENA_BYTES,
        segment_bytes=SEGMENT_BYTES,
        broker_settings={"metrics_port": 0},
        backup_settings={"metrics_port": 0},
    )
    with run_in_thread(made) as running:
        yield running


async def metric(cluster: RunningCluster, daemon: str, name: str) -> float:
    """A metric of a daemon."""
    url = f"http://{cluster.ready[daemon]['metrics_address']}/metrics"

    def get() -> str:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return str(response.read().decode())

    lines = (await asyncio.to_thread(get)).splitlines()
    (value,) = (float(line.split()[1]) for line in lines if line.startswith(f"{name} "))
    return value


async def written(client: Client, stream: str, total_bytes: int) -> None:
    """Write until `total_bytes` are acknowledged."""
    async with asyncio.timeout(TIMEOUT_S), client.producer() as producer:
        await producer.prepare(stream)
        for _ in range(total_bytes // (250 * KIB)):
            await producer.send(stream, bytes(250 * KIB), streamlet=0)


@pytest.fixture(scope="module")
def kept(cluster: RunningCluster) -> common_pb2.Cursor:
    """The beginning of a stream that has `KEPT_BYTES`, on the backup, too."""

    async def write() -> int:
        async with await Client.connect(cluster.bootstrap) as client:
            stream = await client.admin.create_stream("kept", replication=1, durability="replicated")
            await client.admin.create_stream("written", retention_bytes=4 * MIB)
            await written(client, "kept", KEPT_BYTES)
            return stream.stream_id

    return common_pb2.Cursor(stream_id=asyncio.run(write()))


def read_of_broker(at: common_pb2.Cursor) -> tuple[Method[Any, Any], Any]:
    """Request as much as an answer has room for."""
    return api.MULTI_READ_CHUNKS, broker_pb2.MultiReadChunksRequest(
        ranges=[broker_pb2.ReadRange(start=at)], bytes_max=1 << 30
    )


def frame_of(method: Method[Any, Any], message: Any) -> bytes:
    """A request as a frame."""
    return b"".join(bytes(piece) for piece in encode_frame(FrameKind.REQUEST, method, 1, message, [], 1 << 30))


@contextlib.asynccontextmanager
async def unread_frames(address: str, method: Method[Any, Any], message: Any) -> AsyncIterator[None]:
    """Requests over `CONNECTIONS` connections whose answers are not read."""
    with contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(split_address(address))
            sock.sendall(frame_of(method, message) * PIPELINED)
        yield


@contextlib.asynccontextmanager
async def unread_streams(address: str, method: Method[Any, Any], message: Any) -> AsyncIterator[None]:
    """The same over gRPC."""
    async with contextlib.AsyncExitStack() as stack:
        for number in range(CONNECTIONS):
            options = [("grpc.use_local_subchannel_pool", 1), ("kera.number", number)]
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
            call: Any = channel.stream_stream(method.path)()
            for _ in range(PIPELINED):
                await call.write(message.SerializeToString())
            stack.callback(call.cancel)
        yield


@contextlib.asynccontextmanager
async def unread_pushes(path: str, streams: Sequence[int]) -> AsyncIterator[None]:
    """Readers with push that neither read nor take or release anything."""
    lanes = [
        push_pb2.PushLane(lane=number, start=common_pb2.Cursor(stream_id=stream_id))
        for number, stream_id in enumerate(streams)
    ]
    message = encode(PushKind.SUBSCRIBE, push_pb2.PushSubscribe(lanes=lanes).SerializeToString())
    with contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(path)
            sock.sendall(message)
        yield


@pytest.mark.parametrize("transport", ["frames", pytest.param("grpc", marks=pytest.mark.slow)])
async def test_writers_continue_while_readers_take_no_answer(
    cluster: RunningCluster, kept: common_pb2.Cursor, transport: str
) -> None:
    process = psutil.Process(cluster.processes["broker-1"])
    before = process.memory_full_info().uss
    unread = unread_frames if transport == "frames" else unread_streams
    async with (
        await Client.connect(cluster.bootstrap) as client,
        unread(cluster.ready["broker-1"][f"{transport}_address"], *read_of_broker(kept)),
    ):
        await written(client, "written", WRITTEN_BYTES)
        slots = await metric(cluster, "broker-1", "kera_broker_arena_slots_leased")
        assert slots <= ARENA_BYTES // SEGMENT_BYTES // 4
        assert process.memory_full_info().uss - before < GROWTH_BYTES_MAX


async def test_writers_continue_while_readers_with_push_stand_still(
    cluster: RunningCluster, kept: common_pb2.Cursor
) -> None:
    async with await Client.connect(cluster.bootstrap) as client:
        streams = [kept.stream_id, await client.admin.stream_id("written")]
        async with unread_pushes(cluster.ready["broker-1"]["push_unix_path"], streams):
            await written(client, "written", WRITTEN_BYTES)
            slots = await metric(cluster, "broker-1", "kera_broker_arena_slots_leased")
            assert 0 < slots <= ARENA_BYTES // SEGMENT_BYTES // 2 + 1


@pytest.mark.parametrize("transport", ["frames", pytest.param("grpc", marks=pytest.mark.slow)])
async def test_a_backup_with_unread_answers_has_bounded_memory_and_takes_chunks(
    cluster: RunningCluster, kept: common_pb2.Cursor, transport: str
) -> None:
    del kept
    broker = cluster.ready["broker-1"]
    process = psutil.Process(cluster.processes["backup-1"])
    before = process.memory_full_info().uss
    unread = unread_frames if transport == "frames" else unread_streams
    address = cluster.ready["backup-1"][f"{transport}_address"]
    channel = grpc.aio.insecure_channel(cluster.ready["backup-1"]["grpc_address"])
    async with channel, await Client.connect(cluster.bootstrap) as client:
        listing: Any = channel.unary_unary(api.LIST_REPLICAS.path)
        listed = await listing(backup_pb2.ListReplicasRequest(broker_id=broker["broker_id"]).SerializeToString())
        replicas = backup_pb2.ListReplicasResponse.FromString(listed).replicas
        largest = max(replicas, key=lambda each: each.length)
        request = backup_pb2.ReadReplicaRequest(
            broker_id=largest.broker_id, virtual_segment_id=largest.virtual_segment_id, bytes_max=1 << 30
        )
        async with unread(address, api.READ_REPLICA, request):
            await written(client, "kept", 8 * MIB)
            growth = process.memory_full_info().uss - before
            assert growth < GROWTH_BYTES_MAX
