"""The coordinator as a process: its start and end, and what survives a restart."""

import asyncio
import json
import os
import signal
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kera.core.errors import StaleEpoch, StreamExists, TooFewBackups, Unavailable, Uncertain, UnknownStream
from kera.core.rpc import api
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.rpc.method import Call, Method, Reply, call
from kera.v1 import broker_pb2, common_pb2
from kera.v1 import coordinator_pb2 as messages
from tests.integration.support import until_found

TIMEOUT_S = 30.0
"""Bound on all waits: long, since it only ends a test that fails."""


class Process:
    """``python -m kera.coordinator`` with settings from the environment."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.ready: dict[str, Any] = {}

    @classmethod
    async def start(cls, data_dir: Path, **settings: object) -> "Process":
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KERA_")}
        for name, value in {"port": 0, "data_dir": data_dir, **settings}.items():
            environment[f"KERA_COORDINATOR_{name.upper()}"] = str(value)
        command = (sys.executable, "-m", "kera.coordinator")
        pipe = asyncio.subprocess.PIPE
        self = cls(await asyncio.create_subprocess_exec(*command, env=environment, stdout=pipe, stderr=pipe))
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), TIMEOUT_S)
        self.ready = json.loads(line) if line else {}
        return self

    async def end(self, number: int | None = None) -> tuple[int, str, str]:
        """Exit code, and the rest of standard output and standard error."""
        if number is not None:
            self.process.send_signal(number)
        stdout, stderr = await asyncio.wait_for(self.process.communicate(), TIMEOUT_S)
        assert self.process.returncode is not None
        return self.process.returncode, stdout.decode(), stderr.decode()


class Client:
    """Calls a coordinator."""

    def __init__(self, channel: GrpcChannel) -> None:
        self._channel = channel

    async def call(self, method: Method[Any, Any], message: Any) -> Any:
        return await call(self._channel, method, message, timeout_s=TIMEOUT_S)

    async def create(self, name: str, streamlets: int = 1, replication: int | None = None) -> common_pb2.StreamInfo:
        config = common_pb2.StreamConfig(streamlets=streamlets, entries=1, group_segments=4, replication=replication)
        answer = await self.call(api.CREATE_STREAM, messages.CreateStreamRequest(name=name, config=config))
        stream: common_pb2.StreamInfo = answer.stream
        return stream

    async def register(self, address: str, launch_id: str, broker_id: int = 0) -> messages.RegisterBrokerResponse:
        info = common_pb2.BrokerInfo(broker_id=broker_id, grpc_address=address, node_id="node")
        request = messages.RegisterBrokerRequest(broker=info, launch_id=launch_id)
        answer: messages.RegisterBrokerResponse = await self.call(api.REGISTER_BROKER, request)
        return answer

    async def register_backup(self, launch_id: str, backup_id: int = 0) -> messages.RegisterBackupResponse:
        info = common_pb2.BackupInfo(backup_id=backup_id, grpc_address="127.0.0.1:1", node_id="node", memory_bytes=10)
        request = messages.RegisterBackupRequest(backup=info, launch_id=launch_id)
        answer: messages.RegisterBackupResponse = await self.call(api.REGISTER_BACKUP, request)
        return answer

    async def backups(self) -> list[common_pb2.BackupInfo]:
        answer = await self.call(api.DESCRIBE_CLUSTER, messages.DescribeClusterRequest())
        return list(answer.backups)

    async def stream_names(self) -> list[str]:
        answer = await self.call(api.LIST_STREAMS, messages.ListStreamsRequest())
        assert not answer.more
        return [stream.name for stream in answer.streams]

    async def brokers(self) -> list[common_pb2.BrokerInfo]:
        answer = await self.call(api.DESCRIBE_CLUSTER, messages.DescribeClusterRequest())
        return list(answer.brokers)


class Broker:
    """The part of a broker that the coordinator calls."""

    def __init__(self) -> None:
        self.streams: dict[int, common_pb2.StreamInfo] = {}
        self.asked = asyncio.Event()
        self.answering = asyncio.Event()
        self.answering.set()
        self._server: GrpcServer | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = GrpcServer([{api.OPEN_STREAMLETS: self._open, api.DROP_STREAM: self._drop}])
        self.port = await self._server.listen("127.0.0.1", self.port)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.close(0)
            self._server = None

    async def _open(self, request: Call[broker_pb2.OpenStreamletsRequest]) -> Reply[Any]:
        self.asked.set()
        await self.answering.wait()
        stream = request.message.stream
        self.streams[stream.stream_id] = stream
        return Reply(broker_pb2.OpenStreamletsResponse())

    async def _drop(self, request: Call[broker_pb2.DropStreamRequest]) -> Reply[Any]:
        del self.streams[request.message.stream_id]
        return Reply(broker_pb2.DropStreamResponse())


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Starts coordinators, and ends those that still run."""
    started: list[Process] = []

    async def start_one(data_dir: Path = tmp_path / "data", **settings: object) -> Process:
        started.append(await Process.start(data_dir, **settings))
        return started[-1]

    yield start_one
    for process in started:
        if process.process.returncode is None:
            await process.end(signal.SIGKILL)


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    made = Broker()
    await made.start()
    yield made
    await made.stop()


@asynccontextmanager
async def connected(process: Process) -> AsyncIterator[Client]:
    channel = GrpcChannel(process.ready["grpc_address"])
    try:
        yield Client(channel)
    finally:
        await channel.close()


# --- the process -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
async def test_a_coordinator_prints_its_address_and_stops_on_a_signal(start: Any, number: int) -> None:
    process = await start()

    address = process.ready.pop("grpc_address")
    assert process.ready == {"ready": "coordinator", "pid": process.process.pid}
    socket.create_connection(("127.0.0.1", int(address.removeprefix("127.0.0.1:")))).close()
    code, stdout, stderr = await process.end(number)

    assert (code, stdout) == (0, "")
    events = [json.loads(line)["event"] for line in stderr.splitlines()]
    assert events == ["metadata loaded", "leading", "ready", "stopping", "stopped"]


async def test_a_coordinator_stops_in_time_while_a_broker_does_not_answer(start: Any, broker: Broker) -> None:
    process = await start(broker_timeout_ms=200)
    broker.answering.clear()
    async with connected(process) as client:
        await client.register(broker.address, "launch")
        creation = asyncio.create_task(client.create("orders"))
        await asyncio.wait_for(broker.asked.wait(), TIMEOUT_S)

        code, _, stderr = await process.end(signal.SIGTERM)

        assert code == 0
        assert "Traceback" not in stderr
        with pytest.raises((Uncertain, Unavailable)):
            await creation
    broker.answering.set()


def assert_not_started(outcome: tuple[int, str, str], *texts: str) -> None:
    code, stdout, stderr = outcome
    lines = stderr.splitlines()
    errors = [line for line in lines if line.startswith("kera: error: ")]
    assert (code, stdout, len(errors)) == (2, "", 1)
    assert lines[-1] == errors[0]
    assert "Traceback" not in stderr
    for text in texts:
        assert text in errors[0]


@pytest.mark.slow
async def test_the_start_error_names_a_taken_metrics_port(start: Any, tmp_path: Path) -> None:
    first = await start(metrics_port=0)
    port = first.ready["metrics_address"].rpartition(":")[2]

    second = await start(tmp_path / "other", metrics_port=port)

    assert_not_started(await second.end(), f"metrics: cannot listen on 127.0.0.1:{port}")


async def test_a_second_coordinator_on_a_data_directory_is_refused(start: Any) -> None:
    first = await start()

    second = await start()

    assert_not_started(await second.end(), f"another coordinator (process {first.process.pid}) uses data directory")
    await first.end(signal.SIGKILL)  # a lock ends with its process, even when it is killed
    assert (await start()).ready


async def test_the_start_error_names_a_wrong_setting(start: Any) -> None:
    assert_not_started(await (await start(heartbeat_interval_ms="soon")).end(), "heartbeat_interval_ms")


async def test_metrics_are_served(start: Any) -> None:
    process = await start(metrics_port=0)
    async with connected(process) as client:
        await client.stream_names()
        with pytest.raises(UnknownStream):
            await client.call(api.DELETE_STREAM, messages.DeleteStreamRequest(name="none"))

    url = f"http://{process.ready['metrics_address']}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=TIMEOUT_S).read().decode())

    assert 'kera_coordinator_requests_total{method="ListStreams",outcome="ok"} 1.0' in text
    assert 'kera_coordinator_requests_total{method="DeleteStream",outcome="unknown_stream"} 1.0' in text
    assert "kera_coordinator_streams 0.0" in text


# --- what survives it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
async def test_a_restart_keeps_every_acknowledged_change(start: Any, broker: Broker, number: int) -> None:
    process = await start()
    async with connected(process) as client:
        registered = await client.register(broker.address, "launch")
        stream = await client.create("orders", streamlets=3)
        await client.create("deleted")
        await client.call(api.DELETE_STREAM, messages.DeleteStreamRequest(name="deleted"))
        producer = await client.call(api.INIT_PRODUCER, messages.InitProducerRequest())
    await process.end(number)

    async with connected(await start()) as client:
        described = await client.call(api.DESCRIBE_STREAM, messages.DescribeStreamRequest(name="orders"))
        assert described.stream == stream
        assert [(info.broker_id, info.alive) for info in described.brokers] == [(registered.broker_id, True)]
        assert await client.stream_names() == ["orders"]
        epoch = registered.broker_epoch
        await client.call(api.HEARTBEAT, messages.HeartbeatRequest(broker_id=1, broker_epoch=epoch))
        later = await client.call(api.INIT_PRODUCER, messages.InitProducerRequest())
        assert later.producer_id > producer.producer_id
        assert (await client.create("deleted")).stream_id > stream.stream_id
        again = await client.register(broker.address, "launch", broker_id=1)
        assert (again.cluster_id, again.broker_epoch) == (registered.cluster_id, epoch)
        assert sorted(owned.name for owned in again.streams) == ["deleted", "orders"]
    assert broker.streams[stream.stream_id] == stream


# --- brokers ---------------------------------------------------------------------------------------------------


async def test_brokers_open_and_drop_the_streams_that_are_created_and_deleted(start: Any, broker: Broker) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(connected(await start()))
        other = Broker()
        await other.start()
        stack.push_async_callback(other.stop)
        await client.register(broker.address, "a")
        await client.register(other.address, "b")

        stream = await client.create("orders", streamlets=5)

        assert [owner.broker_id for owner in stream.assignments] == [1, 2, 1, 2, 1]
        assert broker.streams == other.streams == {stream.stream_id: stream}
        with pytest.raises(StreamExists):
            await client.create("orders")
        await client.call(api.DELETE_STREAM, messages.DeleteStreamRequest(name="orders"))
        assert broker.streams == other.streams == {}


async def test_creating_a_stream_fails_while_its_broker_is_unreachable(start: Any, broker: Broker) -> None:
    async with connected(await start()) as client:
        await client.register(broker.address, "launch")
        await client.create("before")
        await broker.stop()

        for _ in range(5):  # so often that gRPC would wait before it connects again
            with pytest.raises(Unavailable, match=f"broker 1 at {broker.address} gives no answer") as error:
                await client.create("orders")
            assert error.value.retriable
        assert await client.stream_names() == ["before"]

        await broker.start()
        await client.create("orders")
        assert sorted(stream.name for stream in broker.streams.values()) == ["before", "orders"]


async def test_a_silent_broker_counts_as_dead_until_its_next_heartbeat(start: Any, broker: Broker) -> None:
    async with connected(await start(heartbeat_interval_ms=20, heartbeats_missed_max=2)) as client:
        answer = await client.register(broker.address, "launch")
        assert answer.heartbeat_interval_ms == 20

        async def dead() -> bool:
            return not (await client.brokers())[0].alive

        await until_found(dead)
        with pytest.raises(Unavailable, match="there is none"):
            await client.create("orders")

        beat = messages.HeartbeatRequest(broker_id=answer.broker_id, broker_epoch=answer.broker_epoch)

        async def heard() -> bool:
            await client.call(api.HEARTBEAT, beat)
            return (await client.brokers())[0].alive

        await until_found(heard)


async def test_a_new_launch_fences_the_old_one_and_starts_beyond_its_groups(start: Any, broker: Broker) -> None:
    async with connected(await start()) as client:
        first = await client.register(broker.address, "first")
        before = await client.create("orders")

        second = await client.register(broker.address, "second", broker_id=first.broker_id)

        (after,) = second.streams
        assert after.stream_id == before.stream_id
        assert after.assignments[0].broker_epoch == second.broker_epoch > first.broker_epoch
        assert after.assignments[0].first_group_id > before.assignments[0].first_group_id
        beat = messages.HeartbeatRequest(broker_id=1, broker_epoch=first.broker_epoch)
        with pytest.raises(StaleEpoch):
            await client.call(api.HEARTBEAT, beat)


# --- backups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
async def test_a_restart_keeps_backups_and_replication(start: Any, broker: Broker, number: int) -> None:
    process = await start(default_replication=1)
    async with connected(process) as client:
        await client.register(broker.address, "launch")
        registered = await client.register_backup("x")
        stream = await client.create("orders")
        assert (stream.config.replication, stream.config.durability) == (1, common_pb2.DURABILITY_REPLICATED)
    await process.end(number)

    async with connected(await start()) as client:
        described = await client.call(api.DESCRIBE_STREAM, messages.DescribeStreamRequest(name="orders"))
        assert described.stream == stream
        again = await client.register_backup("x", backup_id=1)
        assert (again.cluster_id, again.backup_epoch) == (registered.cluster_id, registered.backup_epoch)
        relaunched = await client.register_backup("y", backup_id=1)
        assert relaunched.backup_epoch > registered.backup_epoch
        old = messages.BackupHeartbeatRequest(backup_id=1, backup_epoch=registered.backup_epoch)
        with pytest.raises(StaleEpoch):
            await client.call(api.BACKUP_HEARTBEAT, old)
        assert (await client.register_backup("z")).backup_id == 2


async def test_a_silent_backup_takes_no_new_stream_until_its_next_heartbeat(start: Any, broker: Broker) -> None:
    async with connected(await start(heartbeat_interval_ms=200, heartbeats_missed_max=2)) as client:
        at_broker = await client.register(broker.address, "launch")
        backup = await client.register_backup("x")
        broker_beat = messages.HeartbeatRequest(broker_id=1, broker_epoch=at_broker.broker_epoch)

        async def dead() -> bool:
            answer = await client.call(api.HEARTBEAT, broker_beat)
            return not answer.backups[0].alive

        await until_found(dead)
        with pytest.raises(TooFewBackups, match=r"needs 1 live backup .*, there is none") as error:
            await client.create("orders", replication=1)
        assert error.value.retriable
        assert error.value.attributes == {"stream": "orders", "replication": 1, "live_backups": 0}

        beat = messages.BackupHeartbeatRequest(
            backup_id=backup.backup_id, backup_epoch=backup.backup_epoch, free_memory_bytes=7, free_disk_bytes=8
        )

        async def created() -> bool:
            await client.call(api.HEARTBEAT, broker_beat)
            await client.call(api.BACKUP_HEARTBEAT, beat)
            try:
                await client.create("orders", replication=1)
            except (TooFewBackups, Unavailable):
                return False
            return True

        await until_found(created)
        (known,) = await client.backups()
        assert (known.free_memory_bytes, known.free_disk_bytes) == (7, 8)
