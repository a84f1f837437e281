"""An ended call over gRPC is freed at once: daemons collect cycles so seldom that calls would pile up."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import grpc.aio
import pytest

from kera.core.access.identity import Identity
from kera.core.errors import InvalidArgument
from kera.core.rpc import Call, Peer, Reply
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.rpc.method import Evidence
from tests.unit.core.rpc.transports import (
    ECHO,
    HOST,
    UNARY,
    Closing,
    EchoRequest,
    UnaryRequest,
    echo,
    eventually,
    unary_echo,
)

CALLER: ContextVar[Peer | None] = ContextVar("caller", default=None)
REFUSED = "refused"
NO_MESSAGE = b"\xff"


class Gate:
    """Admits every peer."""

    def admit(self, peer: Peer, _evidence: Evidence) -> None:
        peer.identity = Identity("alice")


async def answered_later(call: Call[UnaryRequest]) -> Reply[Any]:
    CALLER.set(call.peer)  # as the coordinator does
    if call.message.name == REFUSED:
        raise InvalidArgument(REFUSED)
    return unary_echo(call)


def answered(call: Call[EchoRequest]) -> Reply[Any]:
    CALLER.set(call.peer)
    return echo(call)


@pytest.fixture(params=[None, Gate()], ids=["open", "behind a doorkeeper"])
async def channel(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    closing = Closing()
    server = closing(GrpcServer([{UNARY: answered_later, ECHO: answered}], doorkeeper=request.param))
    yield closing(grpc.aio.insecure_channel(f"{HOST}:{await server.listen(HOST, 0)}"))
    await closing.close()


def calls() -> list[Any]:
    """The contexts of all calls in memory, as gRPC gives them to handlers."""
    return [each for each in gc.get_objects() if type(each).__name__ == "_ServicerContext"]


@pytest.mark.parametrize(
    ("method", "request_", "code"),
    [
        (UNARY, UnaryRequest(name="hello").SerializeToString(), grpc.StatusCode.OK),
        (UNARY, UnaryRequest(name=REFUSED).SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT),
        (ECHO, EchoRequest(chunk_count=1).SerializeToString(), grpc.StatusCode.OK),
        (ECHO, NO_MESSAGE, None),
    ],
    ids=["call", "refused call", "stream", "stream of no messages"],
)
async def test_an_ended_call_is_freed_without_the_garbage_collector(
    channel: Any, method: Any, request_: bytes, code: grpc.StatusCode | None
) -> None:
    gc.collect()
    gc.freeze()  # so that objects of other tests are not searched again and again
    gc.disable()
    try:
        for _ in range(3):
            call = (channel.stream_stream if method.bulk else channel.stream_unary)(method.path)(iter([request_]))
            with contextlib.suppress(grpc.aio.AioRpcError):
                _ = [each async for each in call] if method.bulk else await call
            found = await call.code()
            assert found is code if code is not None else found is not grpc.StatusCode.OK
        await eventually(lambda: not calls())
    finally:
        gc.enable()  # but without gc.unfreeze(): each collection of later tests would search everything again
