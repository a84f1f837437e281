"""Framed connections of unknown peers: how many, for how long, and for how many requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kera.core.access.identity import Identity
from kera.core.errors import AuthenticationFailed, KeraError
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.frame_server import FrameServer
from kera.core.rpc.method import Call, Evidence, Peer, Reply, call
from kera.core.rpc.strangers import (
    STRANGER_REQUESTS_MAX,
    STRANGERS_MAX,
    Strangers,
)
from tests.unit.core.rpc.transports import HOST, TIMEOUT_S, UNARY, Closing, UnaryRequest


class Gate:
    """Admits the peers of one host."""

    def admit(self, peer: Peer, evidence: Evidence) -> None:
        del evidence
        if peer.address.startswith("10.0.0.1:"):
            peer.identity = Identity("alice")


class Connection:
    def __init__(self, address: str) -> None:
        self.peer = Peer("tcp", address)
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


class Plain(asyncio.BaseTransport):
    """A transport that is not encrypted."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        del name
        return default


@pytest.fixture
def strangers() -> Strangers:
    return Strangers(Gate(), 1 << 20)


def arrive(strangers: Strangers, address: str) -> Connection:
    connection = Connection(address)
    bounds = strangers.arrives(connection, Plain())
    assert bounds.is_stranger is (connection.peer.identity is None)
    return connection


def test_strangers_of_a_crowded_host_make_room(strangers: Strangers) -> None:
    alone, known = arrive(strangers, "10.0.0.2:1"), arrive(strangers, "10.0.0.1:1")
    crowd = [arrive(strangers, f"10.0.0.3:{port}") for port in range(1, STRANGERS_MAX + 10)]
    assert [alone.aborted, known.aborted] == [False, False]
    assert [each.aborted for each in crowd] == [True] * 10 + [False] * (STRANGERS_MAX - 1)
    assert len(strangers) == STRANGERS_MAX


def test_a_stranger_that_becomes_known_or_leaves_frees_its_place(strangers: Strangers) -> None:
    first, second = arrive(strangers, "10.0.0.2:1"), arrive(strangers, "10.0.0.2:2")
    assert strangers.look(first).is_stranger
    first.peer.identity = Identity("alice")
    assert not strangers.look(first).is_stranger
    strangers.goes(second)
    assert strangers.look(second).is_stranger, "an answer to it was still under way"
    assert len(strangers) == 0


async def test_a_stranger_that_asks_too_often_is_disconnected() -> None:
    closing, asked = Closing(), 0

    def refused(_: Call[Any]) -> Reply[Any]:
        nonlocal asked
        asked += 1
        raise AuthenticationFailed("nobody has authenticated")

    server = closing(FrameServer({UNARY: refused}, doorkeeper=Gate()))
    address = f"{HOST}:{await server.listen_tcp(HOST, 0)}"
    channel = closing(await FrameChannel.connect_tcp(address, timeout_s=TIMEOUT_S))
    for _ in range(STRANGER_REQUESTS_MAX):
        with pytest.raises(AuthenticationFailed):
            await call(channel, UNARY, UnaryRequest(), timeout_s=TIMEOUT_S)
    with pytest.raises(KeraError, match=f"it has asked {STRANGER_REQUESTS_MAX} times"):
        await call(channel, UNARY, UnaryRequest(), timeout_s=TIMEOUT_S)
    assert channel.closed
    assert asked == STRANGER_REQUESTS_MAX
    await closing.close()
