"""A connection over the quota of its user: each request over it gets the reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kera.core.errors import QuotaExceeded, Uncertain
from kera.core.rpc import Channel
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.frame_server import FrameServer
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.rpc.method import Evidence, Peer
from tests.unit.core.rpc.transports import ECHO, HOST, TIMEOUT_S, Closing, echo, eventually, numbered

BULK = [b"x" * 100_000]


class Full:
    """Refuses every peer."""

    def admit(self, peer: Peer, evidence: Evidence) -> None:
        del peer, evidence
        raise QuotaExceeded("user:alice has 3 connections", quota="connections", value=3, principal="user:alice")


@pytest.fixture
async def closing() -> AsyncIterator[Closing]:
    closing = Closing()
    yield closing
    await closing.close()


async def connected(transport: str, closing: Closing, directory: Path) -> Channel:
    if transport == "grpc":
        server: Any = closing(GrpcServer([{ECHO: echo}], doorkeeper=Full()))
        return closing(GrpcChannel(f"{HOST}:{await server.listen(HOST, 0)}"))
    server = closing(FrameServer({ECHO: echo}, doorkeeper=Full()))
    if transport == "unix":
        await server.listen_unix(directory / "socket")
        return closing(await FrameChannel.connect_unix(str(directory / "socket"), timeout_s=TIMEOUT_S))
    address = f"{HOST}:{await server.listen_tcp(HOST, 0)}"
    return closing(await FrameChannel.connect_tcp(address, timeout_s=TIMEOUT_S))


@pytest.mark.parametrize("transport", ["tcp", "unix", "grpc"])
async def test_a_request_on_a_refused_connection_gets_the_reason(
    transport: str, closing: Closing, tmp_path: Path
) -> None:
    channel = await connected(transport, closing, tmp_path)
    futures = [channel.submit(ECHO, numbered(number), BULK, timeout_s=TIMEOUT_S) for number in range(3)]
    with pytest.raises(QuotaExceeded) as raised:
        await futures[0]
    assert raised.value.attributes == {"quota": "connections", "value": 3, "principal": "user:alice"}
    for error in await asyncio.gather(*futures, return_exceptions=True):
        assert isinstance(error, QuotaExceeded | Uncertain)


@pytest.mark.parametrize("transport", ["tcp", "unix"])
async def test_a_later_request_on_a_refused_connection_gets_the_reason(
    transport: str, closing: Closing, tmp_path: Path
) -> None:
    channel = await connected(transport, closing, tmp_path)
    await eventually(lambda: channel.closed)
    with pytest.raises(QuotaExceeded, match="user:alice has 3 connections"):
        await channel.submit(ECHO, numbered(1), timeout_s=TIMEOUT_S)
