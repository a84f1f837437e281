"""Calls over gRPC of unknown peers: the server receives no message, and credentials arrive in metadata."""

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
    """Admits a peer that shows a token."""

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
async def test_a_strangers_call_is_refused_before_its_message(channel: Any, method: Any) -> None:
    """The server refuses the call before the peer has sent any of its message."""
    call = channel.stream_stream(method.path)() if method.bulk else channel.stream_unary(method.path)()
    assert await status_of(call) is grpc.StatusCode.UNAUTHENTICATED


async def test_a_known_peer_can_call(channel: Any) -> None:
    data = UnaryRequest(name="hello").SerializeToString()
    assert await channel.unary_unary(UNARY.path)(data, metadata=KNOWN)


async def test_a_stranger_authenticates_by_metadata_and_not_by_a_message(channel: Any) -> None:
    token = "x" * TOKEN_CHARS
    data = messages.AuthenticateRequest(token=token).SerializeToString()
    ask = channel.unary_unary(api.AUTHENTICATE.path)
    answer = await ask(b"", metadata=((AUTHENTICATE_METADATA, data),))
    assert messages.AuthenticateResponse.FromString(answer).principal == token
    assert await status_of(ask(data)) is grpc.StatusCode.UNAUTHENTICATED
    answer = await ask(data, metadata=KNOWN)
    assert messages.AuthenticateResponse.FromString(answer).principal == token


@pytest.mark.parametrize("path", [api.AUTHENTICATE.path, HEALTH])
async def test_authenticate_and_health_calls_of_a_stranger_end_before_their_message(channel: Any, path: str) -> None:
    """The server answers before the message is complete."""
    call = channel.stream_unary(path)()
    expected = grpc.StatusCode.OK if path == HEALTH else grpc.StatusCode.UNAUTHENTICATED
    assert await status_of(call) is expected


async def test_strangers_may_check_health_but_not_watch_it(channel: Any) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    answer = await health.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert await status_of(health.Watch(health_pb2.HealthCheckRequest())) is grpc.StatusCode.UNAUTHENTICATED
    watching = health.Watch(health_pb2.HealthCheckRequest(), metadata=KNOWN)
    assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
    watching.cancel()


async def test_reflection_is_for_known_peers_only(channel: Any) -> None:
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    wanted = reflection_pb2.ServerReflectionRequest(list_services="")
    assert await status_of(reflection.ServerReflectionInfo([wanted])) is grpc.StatusCode.UNAUTHENTICATED
    call = reflection.ServerReflectionInfo([wanted], metadata=KNOWN)
    assert "kera.v1.Authentication" in str(await call.read())
    call.cancel()
