"""Answers that clients do not take: how they count, which are refused, and which connection makes room."""

import asyncio
import socket
from typing import Any

import pytest

from kera.core.errors import Unavailable
from kera.core.rpc.grpc_untaken import SMALL_BYTES_MAX, Untaken, UntakenLimits
from kera.core.rpc.sockets import shut_down

LARGE = 1 << 20


@pytest.fixture
def closed() -> list[str]:
    return []


def with_limits(closed: list[str], **limits: Any) -> Untaken:
    """An `Untaken` with room for three large answers."""
    return Untaken(UntakenLimits(3 * LARGE, **limits), close=closed.append)


@pytest.fixture
async def untaken(closed: list[str]) -> Untaken:
    return with_limits(closed)


async def test_a_taken_answer_makes_room(untaken: Untaken) -> None:
    for number in range(10):
        hold = untaken.admit(f"peer {number}", LARGE)
        assert untaken.held_bytes == LARGE
        hold.release()
        hold.release()
    assert untaken.held_bytes == 0


async def test_small_answers_are_always_sent(untaken: Untaken) -> None:
    holds = [untaken.admit("peer", SMALL_BYTES_MAX) for _ in range(10_000)]
    assert untaken.held_bytes == 0
    for hold in holds:
        hold.release()


async def test_an_answer_without_room_is_refused(untaken: Untaken, closed: list[str]) -> None:
    holds = [untaken.admit("peer", LARGE) for _ in range(3)]
    with pytest.raises(Unavailable, match="not taken answers of 3145728 bytes"):
        untaken.admit("other", LARGE)
    assert not closed
    holds[0].release()
    untaken.admit("other", LARGE)


async def test_a_single_answer_may_exceed_the_limit(untaken: Untaken) -> None:
    untaken.admit("peer", 4 * LARGE)


async def test_the_connection_that_takes_nothing_for_longest_makes_room(
    closed: list[str],
) -> None:
    untaken = with_limits(closed, impatient_s=0.0)
    for peer in ("first", "second", "first"):
        untaken.admit(peer, LARGE)
    untaken.admit("third", LARGE)
    assert closed == ["first"]
    assert untaken.held_bytes == 2 * LARGE  # all answers of the closed connection are gone
    untaken.admit("third", LARGE)
    assert closed == ["first"]


async def test_a_stalled_connection_is_closed_even_if_there_is_room(
    closed: list[str],
) -> None:
    untaken = with_limits(closed, stalled_s=0.01, slowest_bytes_per_s=1 << 40)
    taken, stalled = untaken.admit("taken", LARGE), untaken.admit("stalled", LARGE)
    taken.release()
    async with asyncio.timeout(10):
        while untaken.held_bytes:
            await asyncio.sleep(0.001)
    stalled.release()
    assert closed == ["stalled"]


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_connection_is_shut_down_by_the_address_of_its_peer(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with (
        socket.create_server((host, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as peer,
        server.accept()[0] as served,
        socket.create_connection(server.getsockname()[:2]) as other,
        server.accept()[0] as other_served,
    ):
        assert shut_down(host, peer.getsockname()[1])
        assert served.recv(1) == b""
        other.sendall(b"x")
        assert other_served.recv(1) == b"x"
        assert not shut_down(host, 1)


def test_a_connection_over_ipv4_is_shut_down_on_an_ipv6_socket() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as peer, server.accept()[0] as served:
            assert shut_down("127.0.0.1", peer.getsockname()[1])
            assert served.recv(1) == b""
