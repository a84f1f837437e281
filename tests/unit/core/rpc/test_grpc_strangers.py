"""Calls over gRPC of somebody unknown: nothing is received of them but what makes them known, and little of that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kera.core.access.identity import Identity
from kera.core.errors import ProtocolError, RecordTooLarge, Unavailable
from kera.core.rpc import api
from kera.core.rpc.grpc_options import AUTHORIZATION, BEARER
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.rpc.grpc_strangers import GrpcStrangers
from kera.core.rpc.method import Call, Evidence, Peer, Reply
from kera.core.rpc.strangers import STRANGER_BYTES_MAX
from kera.v1 import access_pb2 as messages
from tests.unit.core.rpc.transports import ECHO, HOST, UNARY, Closing, UnaryRequest, echo, unary_echo

KNOWN = ((AUTHORIZATION, f"{BEARER}good"),)


class Gate:
    """Knows who shows a token."""

    def admit(self, peer: Peer, evidence: Evidence) -> None:
        if evidence.token:
            peer.identity = Identity("alice")


def authenticate(call: Call[messages.AuthenticateRequest]) -> Reply[messages.AuthenticateResponse]:
    return Reply(messages.AuthenticateResponse(principal=call.message.token))


@pytest.fixture
async def channel() -> AsyncIterator[Any]:
    closing = Closing()
    services: list[Any] = [{UNARY: unary_echo, ECHO: echo, api.AUTHENTICATE: authenticate}]
    server = closing(GrpcServer(services, doorkeeper=Gate()))
    channel = closing(grpc.aio.insecure_channel(f"{HOST}:{await server.listen(HOST, 0)}"))
    yield channel
    await closing.close()


async def status_of(call: Any) -> grpc.StatusCode:
    async with asyncio.timeout(20):
        code: grpc.StatusCode = await call.code()
        return code


@pytest.mark.parametrize("method", [UNARY, ECHO], ids=["unary", "stream"])
async def test_of_a_strangers_call_nothing_is_received(channel: Any, method: Any) -> None:
    """It is refused before it has sent anything of its message."""
    call = channel.stream_stream(method.path)() if method.bulk else channel.stream_unary(method.path)()
    assert await status_of(call) is grpc.StatusCode.UNAUTHENTICATED


async def test_who_is_known_asks_what_it_likes(channel: Any) -> None:
    data = UnaryRequest(name="hello").SerializeToString()
    assert await channel.unary_unary(UNARY.path)(data, metadata=KNOWN)


async def test_a_stranger_becomes_known_by_what_it_asks(channel: Any) -> None:
    data = messages.AuthenticateRequest(token="good").SerializeToString()
    answer = await channel.unary_unary(api.AUTHENTICATE.path)(data)
    assert messages.AuthenticateResponse.FromString(answer).principal == "good"
    large = messages.AuthenticateRequest(token="x" * STRANGER_BYTES_MAX).SerializeToString()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await channel.unary_unary(api.AUTHENTICATE.path)(large)
    assert raised.value.code() is grpc.StatusCode.UNKNOWN
    assert "of who has not authenticated" in str(raised.value.details())


async def test_everybody_may_ask_for_health_and_nobody_may_wait_for_it(channel: Any) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    answer = await health.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert await status_of(health.Watch(health_pb2.HealthCheckRequest())) is grpc.StatusCode.UNAUTHENTICATED
    watching = health.Watch(health_pb2.HealthCheckRequest(), metadata=KNOWN)
    assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
    watching.cancel()


async def test_services_are_described_to_who_is_known(channel: Any) -> None:
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    wanted = reflection_pb2.ServerReflectionRequest(list_services="")
    assert await status_of(reflection.ServerReflectionInfo([wanted])) is grpc.StatusCode.UNAUTHENTICATED
    call = reflection.ServerReflectionInfo([wanted], metadata=KNOWN)
    assert "kera.v1.Authentication" in str(await call.read())
    call.cancel()


class Message:
    """What a stranger sends, when it does."""

    def __init__(self) -> None:
        self.data: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        return await self.data


async def test_of_too_many_messages_that_do_not_come_the_oldest_of_the_most_crowded_host_makes_room() -> None:
    strangers = GrpcStrangers(receiving_max=2)
    sent = [Message() for _ in range(4)]
    waiting = []
    for message, host in zip(sent, "abbb", strict=True):
        waiting.append(asyncio.ensure_future(strangers.receive(message, f"ipv4:{host}:1")))
        await asyncio.sleep(0)
    for number in (1, 2):
        with pytest.raises(Unavailable, match="too many are about to authenticate"):
            await waiting[number]
    for number in (0, 3):
        sent[number].data.set_result(b"%d" % number)
        assert await waiting[number] == b"%d" % number


async def test_a_message_that_does_not_come_is_waited_for_no_longer() -> None:
    with pytest.raises(ProtocolError, match=r"has not come whole within 0\.01 s"):
        await GrpcStrangers(receive_s=0.01).receive(Message(), "")


async def test_a_large_message_of_a_stranger_is_refused() -> None:
    message = Message()
    message.data.set_result(b"x" * (STRANGER_BYTES_MAX + 1))
    with pytest.raises(RecordTooLarge):
        await GrpcStrangers().receive(message, "")
