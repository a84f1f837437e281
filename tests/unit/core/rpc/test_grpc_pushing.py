"""Memory of a gRPC server with security on, when unknown peers send as much as they can."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.examples import first_quick
from tests.grpc_pushing import METHODS, MIB, Pushed, push

RECEIVED = {"authenticate", "health"}
"""The methods whose messages are received, a few at a time."""


@pytest.fixture(scope="module")
def server() -> Iterator[Pushed]:
    """A server for tests that do not look at its memory."""
    with Pushed() as pushed:
        yield pushed


@pytest.mark.parametrize("method", first_quick([name for name in METHODS if name not in RECEIVED], 2))
async def test_the_server_does_not_receive_messages_of_an_unknown_peer(server: Pushed, method: str) -> None:
    (pusher,) = await push(server.port, method, 36 * MIB)
    assert pusher.ended == 1
    assert pusher.sent <= MIB // 2
    pusher.close()


@pytest.mark.parametrize("method", first_quick(["authenticate", "unary", "bulk"], 1))
async def test_a_hundred_connections_that_push_take_little_memory(method: str) -> None:
    with Pushed() as pushed:
        most, _ = await pushed.most_memory(method, 4 * MIB, 100)
    assert most < 100 * MIB


@pytest.mark.slow
async def test_a_hundred_calls_of_each_connection_take_little_memory() -> None:
    with Pushed() as pushed:
        most, _ = await pushed.most_memory("bulk", 16 * MIB, 10, 100)
    assert most < 150 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
async def test_a_thousand_connections_that_push_take_little_memory(method: str) -> None:
    with Pushed() as pushed:
        most, _ = await pushed.most_memory(method, 4 * MIB, 1000)
    assert most < 400 * MIB
