"""Calls of the coordinator to daemons, over real connections."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kera.coordinator.cluster import peers
from kera.coordinator.cluster.backup_calls import GrpcBackupCalls
from kera.coordinator.cluster.broker_calls import GrpcBrokerCalls
from kera.core.errors import InvalidArgument, StaleEpoch, Unavailable, Uncertain
from kera.core.rpc import api
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.rpc.method import Call, Reply
from kera.v1 import backup_pb2, broker_pb2, common_pb2

TIMEOUT_MS = 30_000
STREAM = common_pb2.StreamInfo(stream_id=7, name="s")
STATE = common_pb2.StreamletState(streamlet_id=1, next_group_id=5)


class Daemon:
    """A daemon that notes its requests and gives the answers of the test."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.answer: Callable[[Any], Any] = lambda _: None
        self.address = ""

    async def serve(self, call: Call[Any]) -> Reply[Any]:
        self.asked.append(call.message)
        return Reply(self.answer(call.message))

    @property
    def broker(self) -> common_pb2.BrokerInfo:
        return common_pb2.BrokerInfo(broker_id=1, grpc_address=self.address)

    @property
    def backup(self) -> common_pb2.BackupInfo:
        return common_pb2.BackupInfo(backup_id=1, grpc_address=self.address)


@contextlib.asynccontextmanager
async def running(*methods: Any) -> AsyncIterator[Daemon]:
    daemon = Daemon()
    server = GrpcServer([dict.fromkeys(methods, daemon.serve)])
    daemon.address = f"127.0.0.1:{await server.listen('127.0.0.1', 0)}"
    try:
        yield daemon
    finally:
        await server.close()


@pytest.fixture
async def brokers() -> AsyncIterator[GrpcBrokerCalls]:
    made = GrpcBrokerCalls(timeout_ms=TIMEOUT_MS)
    yield made
    await made.close()


async def test_orders_to_brokers_contain_the_coordinator_epoch(brokers: GrpcBrokerCalls) -> None:
    methods = (api.OPEN_STREAMLETS, api.DROP_STREAM, api.SEAL_STREAMLETS, api.TAKE_OVER)
    async with running(*methods) as daemon:
        daemon.answer = lambda _: broker_pb2.OpenStreamletsResponse()
        await brokers.open_streamlets(daemon.broker, STREAM, coordinator_epoch=3, handed_over=[STATE])
        daemon.answer = lambda _: broker_pb2.DropStreamResponse()
        await brokers.drop_stream(daemon.broker, 7, coordinator_epoch=3)
        daemon.answer = lambda _: broker_pb2.SealStreamletsResponse(states=[STATE])
        states = await brokers.seal_streamlets(
            daemon.broker, 7, [1], wait_ms=9, coordinator_epoch=3, assignments_version=4
        )
        daemon.answer = lambda _: broker_pb2.TakeOverResponse(bytes_total=5)
        taken = await brokers.take_over(daemon.broker, broker_pb2.TakeOverRequest(coordinator_epoch=3))

    assert (states, taken.bytes_total) == ([STATE], 5)
    assert daemon.asked == [
        broker_pb2.OpenStreamletsRequest(stream=STREAM, coordinator_epoch=3, handed_over=[STATE]),
        broker_pb2.DropStreamRequest(stream_id=7, coordinator_epoch=3),
        broker_pb2.SealStreamletsRequest(
            coordinator_epoch=3, stream_id=7, streamlet_ids=[1], wait_ms=9, assignments_version=4
        ),
        broker_pb2.TakeOverRequest(coordinator_epoch=3),
    ]


async def test_a_refusal_reaches_the_caller_and_a_returned_broker_is_reachable_again(brokers: GrpcBrokerCalls) -> None:
    def refuse(_: Any) -> Any:
        raise StaleEpoch("a later coordinator leads")

    async with running(api.DROP_STREAM) as daemon:
        daemon.answer = refuse
        with pytest.raises(StaleEpoch):
            await brokers.drop_stream(daemon.broker, 7, coordinator_epoch=1)
    with pytest.raises((Unavailable, Uncertain)):
        await brokers.drop_stream(daemon.broker, 7, coordinator_epoch=1)

    server = GrpcServer([{api.DROP_STREAM: daemon.serve}])
    host, port = daemon.address.split(":")
    await server.listen(host, int(port))
    daemon.answer = lambda _: broker_pb2.DropStreamResponse()
    await brokers.drop_stream(daemon.broker, 7, coordinator_epoch=1)
    await server.close()


class Opened:
    """A factory of channels that remembers them."""

    def __init__(self) -> None:
        self.channels: list[GrpcChannel] = []

    def __call__(self, address: str, **options: Any) -> GrpcChannel:
        self.channels.append(GrpcChannel(address, **options))
        return self.channels[-1]

    @property
    def closed(self) -> list[bool]:
        return [channel.closed for channel in self.channels]


async def test_a_call_without_an_answer_times_out_and_ends_no_other_call() -> None:
    opened, go_on, never = Opened(), asyncio.Event(), asyncio.Event()
    brokers = GrpcBrokerCalls(timeout_ms=20, channel=opened)

    async def take_over(_: Call[Any]) -> Reply[Any]:
        await go_on.wait()
        return Reply(broker_pb2.TakeOverResponse(bytes_total=5))

    async def hang(_: Call[Any]) -> Reply[Any]:
        await never.wait()
        return Reply(broker_pb2.DropStreamResponse())

    server = GrpcServer([{api.TAKE_OVER: take_over, api.DROP_STREAM: hang}])
    broker = common_pb2.BrokerInfo(grpc_address=f"127.0.0.1:{await server.listen('127.0.0.1', 0)}")
    taking = asyncio.create_task(brokers.take_over(broker, broker_pb2.TakeOverRequest()))
    for _ in range(2):
        with pytest.raises(Uncertain, match="no answer"):
            await brokers.drop_stream(broker, 7, coordinator_epoch=1)
    assert opened.closed == [False, True], "the calls that follow have a connection of their own"
    go_on.set()
    assert (await taking).bytes_total == 5
    assert opened.closed == [True, True]
    never.set()
    await server.close()


async def test_an_idle_connection_is_closed_when_another_one_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Opened()
    brokers = GrpcBrokerCalls(timeout_ms=TIMEOUT_MS, channel=opened)
    async with running(api.DROP_STREAM) as one, running(api.DROP_STREAM) as two:
        one.answer = two.answer = lambda _: broker_pb2.DropStreamResponse()
        await brokers.drop_stream(one.broker, 7, coordinator_epoch=1)
        monkeypatch.setattr(peers, "IDLE_S", -1.0)
        await brokers.drop_stream(two.broker, 7, coordinator_epoch=1)
        assert opened.closed == [True, False]
        await brokers.close()
    assert opened.closed == [True, True]


async def test_an_address_without_a_listener_refuses_connections(
    brokers: GrpcBrokerCalls,
) -> None:
    async with running(api.DROP_STREAM) as daemon:
        assert not await brokers.refuses(daemon.broker)
    assert await brokers.refuses(daemon.broker)
    with pytest.raises(InvalidArgument):
        await brokers.refuses(common_pb2.BrokerInfo(grpc_address="nowhere"))


async def test_a_host_with_several_addresses_refuses_when_all_of_them_do(
    brokers: GrpcBrokerCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def both(_: str, port: int, **__: Any) -> list[Any]:
        kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        return [(*kind, (host, port)) for host in ("127.0.0.2", "127.0.0.1")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
    async with running(api.DROP_STREAM) as daemon:
        named = common_pb2.BrokerInfo(grpc_address=daemon.address.replace("127.0.0.1", "broker"))
        assert not await brokers.refuses(named)  # one of the two listens
    assert await brokers.refuses(named)


async def test_backups_are_fenced_freed_and_counted() -> None:
    backups = GrpcBackupCalls(timeout_ms=TIMEOUT_MS)
    replicas = {1: [3, 5, 9], 2: [4], 3: list[int]()}

    def page(request: backup_pb2.ListReplicasRequest) -> backup_pb2.ListReplicasResponse:
        left = [one for one in replicas[request.broker_id] if one > request.after_virtual_segment_id]
        infos = [backup_pb2.ReplicaInfo(virtual_segment_id=one) for one in left[:2]]
        return backup_pb2.ListReplicasResponse(replicas=infos, complete=len(left) <= 2)

    async with running(api.FENCE_BROKER, api.FREE_REPLICAS, api.LIST_REPLICAS) as daemon:
        daemon.answer = lambda _: backup_pb2.FenceBrokerResponse()
        await backups.fence(daemon.backup, 4, 9)
        daemon.answer = lambda _: backup_pb2.FreeReplicasResponse()
        await backups.free(daemon.backup, 4, 11, before_epoch=9)
        daemon.answer = page
        assert await backups.count_replicas(daemon.backup, [1, 2, 3]) == 4

    assert daemon.asked[:2] == [
        backup_pb2.FenceBrokerRequest(broker_id=4, broker_epoch=9),
        backup_pb2.FreeReplicasRequest(broker_id=4, broker_epoch=11, before_epoch=9),
    ]
    await backups.close()
