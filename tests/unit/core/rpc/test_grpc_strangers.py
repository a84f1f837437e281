"""Calls over gRPC of somebody unknown: nothing is received of them, and what makes them known is beside the call."""

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
from kera.core.rpc import api
from kera.core.rpc.grpc_options import AUTHENTICATE_METADATA, AUTHORIZATION, BEARER
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.rpc.method import Call, Evidence, Peer, Reply
from kera.v1 import access_pb2 as messages
from tests.unit.core.rpc.transports import ECHO, HOST, UNARY, Closing, UnaryRequest, echo, unary_echo

HEALTH = "/grpc.health.v1.Health/Check"
TOKEN_CHARS = 16 << 10
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


async def test_a_stranger_becomes_known_by_what_it_shows_beside_its_call(channel: Any) -> None:
    token = "x" * TOKEN_CHARS
    data = messages.AuthenticateRequest(token=token).SerializeToString()
    ask = channel.unary_unary(api.AUTHENTICATE.path)
    answer = await ask(b"", metadata=((AUTHENTICATE_METADATA, data),))
    assert messages.AuthenticateResponse.FromString(answer).principal == token
    assert await status_of(ask(data)) is grpc.StatusCode.UNAUTHENTICATED
    answer = await ask(data, metadata=KNOWN)
    assert messages.AuthenticateResponse.FromString(answer).principal == token


@pytest.mark.parametrize("path", [api.AUTHENTICATE.path, HEALTH])
async def test_no_message_of_a_stranger_is_received(channel: Any, path: str) -> None:
    """It is answered while the message has only been begun."""
    call = channel.stream_unary(path)()
    expected = grpc.StatusCode.OK if path == HEALTH else grpc.StatusCode.UNAUTHENTICATED
    assert await status_of(call) is expected


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
