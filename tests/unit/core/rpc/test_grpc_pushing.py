"""What a gRPC server with security on takes of those who show nothing, and send as much as they are let."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.grpc_pushing import METHODS, MIB, Pushed, push

RECEIVED = {"authenticate", "health"}
"""Whose messages are received, few at a time."""


@pytest.fixture(scope="module")
def server() -> Iterator[Pushed]:
    """For tests that do not look at its memory."""
    with Pushed() as pushed:
        yield pushed


@pytest.mark.parametrize("method", sorted(METHODS.keys() - RECEIVED))
async def test_what_one_of_whom_nothing_is_known_would_send_stays_where_it_is(server: Pushed, method: str) -> None:
    (pusher,) = await push(server.port, method, 36 * MIB)
    assert pusher.ended == 1
    assert pusher.sent <= MIB // 2
    pusher.close()


@pytest.mark.parametrize("method", ["unary", pytest.param("bulk", marks=pytest.mark.slow), "authenticate"])
async def test_a_hundred_connections_that_push_take_little_memory(method: str) -> None:
    with Pushed() as pushed:
        most, _ = await pushed.most_memory(method, 4 * MIB, 100)
    assert most < 100 * MIB


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
