"""A whole broker in this process, with a fake coordinator and real sockets."""

import asyncio
import contextlib
import json
import os
import socket
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kera.broker.application import serve
from kera.broker.log.arena_head import HEAD_BYTES
from kera.broker.registration import BrokerDirectory
from kera.broker.settings import BrokerSettings
from kera.core.base.ids import EARLIEST
from kera.core.base.process import node_id
from kera.core.base.settings import KIB
from kera.core.errors import PathNotWritable
from kera.core.push import Decoder, PushKind
from kera.core.rpc import api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.method import call
from kera.server.registration import CoordinatorUnreachable
from kera.v1 import push_pb2
from tests.unit.broker.fake_coordinator import BROKER_ID, EPOCH, FakeCoordinator, serving
from tests.unit.broker.support import STREAM_ID, batch_chunk, next_of, read_range, sequences_of, stream_info

TIMEOUT_S = 30.0


@pytest.fixture
async def coordinator() -> AsyncIterator[FakeCoordinator]:
    async with serving(FakeCoordinator(streams=[stream_info()])) as coordinator:
        yield coordinator


@pytest.fixture
def settings(coordinator: FakeCoordinator, root: Path, shm_dir: Path) -> BrokerSettings:
    return BrokerSettings.for_testing(root / "broker", coordinator.address).model_copy(update={"shm_dir": shm_dir})


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


async def describe(channel: Any) -> int:
    """The number of entries in the broker's description of its streamlet."""
    request = api.DESCRIBE_STREAMLETS.request(stream_id=STREAM_ID)
    try:
        answer = await call(channel, api.DESCRIBE_STREAMLETS, request, timeout_s=TIMEOUT_S)
    finally:
        await channel.close()
    return len(answer.streamlets[0].entries)


async def test_a_broker_serves_its_streams_at_its_announced_addresses(
    settings: BrokerSettings, coordinator: FakeCoordinator
) -> None:
    async with serve(settings) as ready:
        assert Path(ready["arena_path"]).parent == settings.shm_dir
        assert ready["broker_id"] == BROKER_ID
        assert await describe(GrpcChannel(ready["grpc_address"])) == 1
        assert await describe(await FrameChannel.connect_tcp(ready["frames_address"], timeout_s=TIMEOUT_S)) == 1
        assert await describe(await FrameChannel.connect_unix(ready["frames_unix_path"], timeout_s=TIMEOUT_S)) == 1
        broker = coordinator.registered[0].broker
        places = ("grpc_address", "frames_address", "frames_unix_path", "push_unix_path")
        assert {name: getattr(broker, name) for name in places} == {name: ready[name] for name in places}
        assert (broker.segment_bytes, broker.arena_bytes) == (settings.segment_bytes, settings.arena_bytes)
        assert broker.node_id == node_id()


@pytest.mark.parametrize("ephemeral", [False, True])
async def test_the_head_of_the_arena_names_its_data_directory(settings: BrokerSettings, ephemeral: bool) -> None:
    async with serve(settings.model_copy(update={"ephemeral": ephemeral})) as ready:
        head = json.loads(Path(ready["arena_path"]).read_bytes()[:HEAD_BYTES].rstrip(b"\0"))

    assert (head["data_dir"], head["ephemeral"]) == (str(settings.data_dir), ephemeral)


async def test_a_read_without_a_limit_gets_what_the_transport_can_send(settings: BrokerSettings) -> None:
    async with serve(settings.model_copy(update={"message_bytes_max": 65 * KIB})) as ready:
        channel = await FrameChannel.connect_tcp(ready["frames_address"], timeout_s=TIMEOUT_S)
        for sequence in range(2):
            request = api.MULTI_WRITE_CHUNKS.request(chunk_count=1)
            await channel.submit(
                api.MULTI_WRITE_CHUNKS, request, [batch_chunk(1, sequence, size=40 * KIB)], timeout_s=TIMEOUT_S
            )
        everything = api.MULTI_READ_CHUNKS.request(ranges=[read_range()])
        reply = await channel.submit(api.MULTI_READ_CHUNKS, everything, timeout_s=TIMEOUT_S)
        await channel.close()

    assert sequences_of(reply) == [0]


async def test_a_push_connection_begins_with_a_hello_that_names_the_broker(settings: BrokerSettings) -> None:
    async with serve(settings) as ready:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ready["push_unix_path"])
            ((kind, body),) = Decoder().feed(await asyncio.get_running_loop().sock_recv(sock, 1 << 16))
        hello = push_pb2.PushHello.FromString(body)

    assert (kind, hello.broker_id, hello.broker_epoch) == (PushKind.HELLO, BROKER_ID, EPOCH)
    assert hello.arena_path == ready["arena_path"]


async def test_a_stopped_broker_leaves_only_its_identity_and_its_log(settings: BrokerSettings) -> None:
    async with serve(settings) as ready:
        assert Path(ready["frames_unix_path"]).is_socket()
        assert Path(ready["push_unix_path"]).is_socket()

    assert list(settings.shm_dir.iterdir()) == []
    assert sorted(path.name for path in settings.data_dir.iterdir()) == [
        "broker.copy.json",
        "broker.json",
        "lock",
        "log",
    ]
    BrokerDirectory(settings.data_dir).close()


async def write(address: str, *chunks: bytes) -> list[str]:
    """Write chunks, and return the error codes of their statuses."""
    channel = await FrameChannel.connect_tcp(address, timeout_s=TIMEOUT_S)
    request = api.MULTI_WRITE_CHUNKS.request(chunk_count=len(chunks))
    try:
        reply = await channel.submit(api.MULTI_WRITE_CHUNKS, request, list(chunks), timeout_s=TIMEOUT_S)
    finally:
        await channel.close()
    return [status.error.code for status in reply.message.statuses]


async def read(address: str) -> list[int]:
    """The sequences of all chunks."""
    channel = await FrameChannel.connect_tcp(address, timeout_s=TIMEOUT_S)
    following, found = EARLIEST, list[int]()
    try:
        while True:
            request = api.MULTI_READ_CHUNKS.request(ranges=[read_range(following)])
            reply = await channel.submit(api.MULTI_READ_CHUNKS, request, timeout_s=TIMEOUT_S)
            if not reply.bulk:
                return found
            found += sequences_of(reply)
            following = next_of(reply.message.results[0])
    finally:
        await channel.close()


async def test_a_restarted_broker_has_all_chunks_and_producer_sequences(settings: BrokerSettings) -> None:
    lasting = settings.model_copy(update={"ephemeral": False})
    for launch in range(3):
        async with serve(lasting) as ready:
            assert await write(ready["frames_address"], batch_chunk(1, 2 * launch), batch_chunk(1, 2 * launch + 1)) == [
                "",
                "",
            ]
            assert await read(ready["frames_address"]) == list(range(2 * launch + 2))
        assert list(settings.shm_dir.iterdir()) == [], "all is on disk"
    async with serve(lasting) as ready:
        assert await write(ready["frames_address"], batch_chunk(1, 5), batch_chunk(1, 7)) == ["", "out_of_sequence"]


async def test_a_broker_removes_the_arena_that_its_last_launch_left(settings: BrokerSettings) -> None:
    (settings.shm_dir / f"kera-{os.getuid()}-00000000.arena").touch(0o600)
    async with serve(settings) as ready:
        assert list(settings.shm_dir.iterdir()) == [Path(ready["arena_path"])]


async def test_metrics_are_served_at_the_announced_address(settings: BrokerSettings) -> None:
    async with serve(settings.model_copy(update={"metrics_port": 0})) as ready:
        address = f"http://{ready['metrics_address']}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(address, timeout=10).read().decode())

    assert "kera_broker_arena_slots_free 256.0" in text


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_clients_can_connect_to_announced_ipv6_addresses(settings: BrokerSettings) -> None:
    async with serve(settings.model_copy(update={"host": "::1"})) as ready:
        assert ready["grpc_address"].startswith("[::1]:")
        assert await describe(GrpcChannel(ready["grpc_address"])) == 1
        assert await describe(await FrameChannel.connect_tcp(ready["frames_address"], timeout_s=TIMEOUT_S)) == 1


async def test_a_failed_start_leaves_neither_memory_nor_an_identity(settings: BrokerSettings) -> None:
    unreachable = settings.model_copy(update={"coordinator": "127.0.0.1:1", "coordinator_timeout_ms": 0})
    with pytest.raises(CoordinatorUnreachable):
        async with serve(unreachable):
            pass

    assert list(settings.shm_dir.iterdir()) == []
    assert sorted(path.name for path in settings.data_dir.iterdir()) == ["lock", "log"]
    BrokerDirectory(settings.data_dir).close()


@pytest.mark.parametrize("name", ["nowhere", "x" * 300], ids=["missing", "too long"])
async def test_the_error_names_an_impossible_directory_for_the_arena(settings: BrokerSettings, name: str) -> None:
    with pytest.raises(PathNotWritable, match=f"in shm_dir .*/{name}: .*; choose another --shm-dir$"):
        async with serve(settings.model_copy(update={"shm_dir": settings.shm_dir / name})):
            pass


async def test_a_stopping_broker_announces_its_restart_and_takes_nothing_once_it_announces_its_stop(
    settings: BrokerSettings, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kera.server.registration.ANNOUNCE_TIMEOUT_S", 30.0)
    codes: list[str] = []

    async def write_one() -> None:
        codes.extend(await write(ready["frames_address"], batch_chunk(1, len(codes))))

    lasting = settings.model_copy(update={"ephemeral": False, "handover_ms": 70})
    async with serve(lasting) as ready:
        coordinator.before_restart_answer = write_one
        await write_one()
        assert coordinator.restarts == []
    assert codes == ["", "", "not_owner"]
    first, second = coordinator.restarts
    assert (first.broker_id, first.epoch, first.wait_ms, first.stopping) == (BROKER_ID, EPOCH, 70, False)
    assert (second.broker_id, second.epoch, second.stopping) == (BROKER_ID, EPOCH, True)


@pytest.mark.parametrize("change", [{"ephemeral": True}, {"handover_ms": 0}])
async def test_an_ephemeral_broker_or_one_without_handover_time_announces_no_restart(
    settings: BrokerSettings, coordinator: FakeCoordinator, change: dict[str, Any]
) -> None:
    async with serve(settings.model_copy(update={"ephemeral": False, **change})):
        pass
    assert coordinator.restarts == []


async def test_a_broker_stops_cleanly_although_the_coordinator_is_gone(
    tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kera.server.registration.ANNOUNCE_TIMEOUT_S", 0.2)
    async with contextlib.AsyncExitStack() as stack, serving(FakeCoordinator(streams=[stream_info()])) as fake:
        settings = BrokerSettings.for_testing(tmp_path / "broker", fake.address)
        lasting = settings.model_copy(update={"shm_dir": shm_dir, "ephemeral": False})
        ready = await stack.enter_async_context(serve(lasting))
        assert await write(ready["frames_address"], batch_chunk(1, 0)) == [""]
        moved = stack.pop_all()
    await moved.aclose()
    assert list(shm_dir.iterdir()) == [], "and all is on disk"


async def test_a_broker_registers_its_advertised_address_and_chosen_id(
    settings: BrokerSettings, coordinator: FakeCoordinator
) -> None:
    told = {"host": "0.0.0.0", "insecure": True, "advertised_address": "broker.example.org", "broker_id": BROKER_ID}
    async with serve(settings.model_copy(update=told)) as ready:
        (registered,) = coordinator.registered
        assert registered.broker.grpc_address == ready["grpc_address"]
        assert ready["grpc_address"].startswith("broker.example.org:")
        assert ready["frames_address"].startswith("broker.example.org:")
        assert (registered.broker.broker_id, registered.chosen_id) == (BROKER_ID, True)
