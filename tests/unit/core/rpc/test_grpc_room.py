"""Silent connections to gRPC make room for clients that speak, and stay open while there are places."""

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from kera.core.errors import Unavailable
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.grpc_room import FULL, ROOMY, Room
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.rpc.sockets import copies_of_sockets, open_descriptors
from kera.core.security import Tls
from tests.unit.core.rpc.transports import HOST, TIMEOUT_S, UNARY, Closing, UnaryRequest, eventually, unary_echo

CONNECTIONS_MAX = 400
"""More than the other descriptors of a process."""
HANDSHAKE_MS = 600_000
LOOK_EVERY_S = 0.05
QUIET_S = 0.2


@pytest.fixture(autouse=True)
def _silence_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kera.core.rpc.grpc_room.LOOK_EVERY_S", LOOK_EVERY_S)
    monkeypatch.setattr("kera.core.rpc.grpc_room.QUIET_S", QUIET_S)


async def serving(closing: Closing, tls: Tls | None) -> int:
    server = GrpcServer([{UNARY: unary_echo}], connections_max=CONNECTIONS_MAX, handshake_ms=HANDSHAKE_MS, tls=tls)
    return await closing(server).listen(HOST, 0)


@contextlib.contextmanager
def silent(port: int, count: int, said: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that send `said`, and nothing more."""
    with contextlib.ExitStack() as opened:
        socks = [opened.enter_context(socket.create_connection((HOST, port), TIMEOUT_S)) for _ in range(count)]
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.sendall(said)
            sock.setblocking(False)
        yield socks


def is_open(sock: socket.socket) -> bool:
    """True until the socket has seen the end of its connection."""
    try:
        return bool(sock.recv(1 << 16))
    except BlockingIOError:
        return True
    except OSError:
        return False


async def answers(channel: GrpcChannel) -> bool:
    try:
        await channel.submit(UNARY, UnaryRequest(), timeout_s=TIMEOUT_S)
    except Unavailable:
        return False
    return True


@pytest.mark.parametrize(
    ("encrypted", "said"),
    [(False, b""), pytest.param(True, b"", marks=pytest.mark.slow), (True, b"\x16\x03\x01\x00\xf0")],
)
async def test_silent_connections_make_room_for_a_client(
    closing: Closing, tls: Tls, *, encrypted: bool, said: bytes
) -> None:
    own = tls if encrypted else None
    port = await serving(closing, own)
    with silent(port, CONNECTIONS_MAX, said) as socks, capture_logs() as lines:
        channel = closing(GrpcChannel(f"{HOST}:{port}", tls=own))
        deadline_s = time.monotonic() + TIMEOUT_S
        while not await answers(channel):
            assert time.monotonic() < deadline_s
        await eventually(lambda: sum(map(is_open, socks)) <= FULL * CONNECTIONS_MAX)
        assert sum(map(is_open, socks)) >= ROOMY * CONNECTIONS_MAX - 2
        # The loop logs this after a thread has closed the connections.
        await eventually(lambda: any("make room" in line["event"] for line in lines))
    assert [line["limit"] for line in lines if "make room" in line["event"]] == [CONNECTIONS_MAX]


async def test_connections_that_send_single_bytes_make_room_too(closing: Closing, tls: Tls) -> None:
    port = await serving(closing, tls)
    with silent(port, CONNECTIONS_MAX - 10, b"\x16\x03\x01\x02\x00") as socks:
        deadline_s = time.monotonic() + TIMEOUT_S
        while sum(map(is_open, socks)) > FULL * CONNECTIONS_MAX:
            assert time.monotonic() < deadline_s
            for sock in socks:
                with contextlib.suppress(OSError):
                    sock.sendall(b"\x00")
            await asyncio.sleep(0.02)


async def test_a_client_that_has_called_keeps_its_connection(closing: Closing, tls: Tls) -> None:
    port = await serving(closing, tls)
    first = closing(GrpcChannel(f"{HOST}:{port}", tls=tls))
    assert await answers(first)
    with silent(port, CONNECTIONS_MAX - 10) as socks:
        await eventually(lambda: sum(map(is_open, socks)) <= FULL * CONNECTIONS_MAX)
    assert await answers(first)


async def test_silent_connections_stay_open_while_there_are_places(closing: Closing, tls: Tls) -> None:
    port = await serving(closing, tls)
    with silent(port, int(ROOMY * CONNECTIONS_MAX)) as socks:
        begun_s = time.monotonic()
        channel = closing(GrpcChannel(f"{HOST}:{port}", tls=tls))
        while time.monotonic() < begun_s + 3 * QUIET_S:
            assert await answers(channel)
        assert all(map(is_open, socks))


async def test_a_failed_look_is_logged_and_the_next_one_makes_room(
    closing: Closing, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(errno.EMFILE, "Too many open files"), RuntimeError("anything")]

    def failing() -> int:
        if failures:
            raise failures.pop()
        return open_descriptors()

    monkeypatch.setattr("kera.core.rpc.grpc_room.open_descriptors", failing)
    with capture_logs() as lines:
        port = await serving(closing, tls)
        with silent(port, CONNECTIONS_MAX - 10) as socks:
            await eventually(lambda: sum(map(is_open, socks)) <= FULL * CONNECTIONS_MAX)
    assert [line["error"] for line in lines if "cannot look" in line["event"]] == ["RuntimeError('anything')"]


async def test_a_peer_that_leaves_during_a_look_does_not_stop_the_look(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer leaves before the query of its state, or before its shutdown."""

    class Left(socket.socket):
        asked = 0

        def getsockopt(self, *arguments: Any) -> Any:
            Left.asked += 1
            if Left.asked % 10 == 0:
                raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
            return super().getsockopt(*arguments)

        def shutdown(self, how: int) -> None:
            super().shutdown(how)
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    def left() -> Iterator[socket.socket]:
        for sock in copies_of_sockets():
            with Left(fileno=sock.detach()) as copy:
                yield copy

    monkeypatch.setattr("kera.core.rpc.grpc_room.copies_of_sockets", left)
    port = await serving(closing, None)
    with silent(port, CONNECTIONS_MAX) as socks, capture_logs() as lines:
        await eventually(lambda: sum(map(is_open, socks)) <= FULL * CONNECTIONS_MAX)
    assert [line for line in lines if "cannot look" in line["event"]] == []


async def test_a_server_finishes_closing_after_a_failed_step(closing: Closing, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(_room: Room) -> None:
        raise OSError("no more")

    server = GrpcServer([{UNARY: unary_echo}])
    port = await server.listen(HOST, 0)
    channel = closing(GrpcChannel(f"{HOST}:{port}"))
    assert await answers(channel)
    monkeypatch.setattr(Room, "close", fails)
    with pytest.raises(OSError, match="no more"):
        await server.close()
    monkeypatch.undo()
    assert not await answers(channel)
    await server.close()
