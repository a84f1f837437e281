"""Options of sockets, at both ends of a connection and as the kernel has them."""

import asyncio
import contextlib
import socket
from typing import Any

import pytest

from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.frame_server import FrameServer, ServerConnection
from kera.core.rpc.sockets import CALLER, SERVER, Patience
from tests.unit.core.rpc.transports import ECHO, HOST, TIMEOUT_S, Closing, echo, eventually, numbered, silent_listener


def options_of(protocol: object) -> tuple[int, ...]:
    transport: asyncio.Transport = protocol._transport  # type: ignore[attr-defined]
    sock = transport.get_extra_info("socket")
    tcp = (socket.TCP_NODELAY, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
    values = [sock.getsockopt(socket.IPPROTO_TCP, option) for option in tcp]
    return (sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), *values)


def expected(patience: Patience) -> tuple[int, ...]:
    return (1, 1, patience.idle_s, patience.interval_s, patience.silent_ms)


async def test_both_ends_set_keepalive_and_the_caller_is_less_patient(closing: Closing) -> None:
    accepted: list[ServerConnection] = []

    class Server(FrameServer):
        def accept(self, transport: str) -> ServerConnection:
            accepted.append(super().accept(transport))
            return accepted[-1]

    server = closing(Server({ECHO: echo}))
    port = await server.listen_tcp(HOST, 0)
    channel = closing(await FrameChannel.connect_tcp(f"{HOST}:{port}", timeout_s=TIMEOUT_S))
    await channel.submit(ECHO, numbered(1), timeout_s=TIMEOUT_S)
    (connection,) = accepted
    assert options_of(channel) == expected(CALLER)
    assert options_of(connection) == expected(SERVER)
    assert CALLER.silent_ms < SERVER.silent_ms < 60_000


async def test_connecting_to_a_silent_host_is_retried_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener with a full queue drops new connections, as a cut network does; once it has room, one gets in.

    TCP by itself would ask again only after a second, and then ever more rarely.
    """
    loop, attempts = asyncio.get_running_loop(), 0
    create_connection = loop.create_connection

    def attempt(*arguments: Any) -> Any:
        nonlocal attempts
        attempts += 1
        return create_connection(*arguments)

    monkeypatch.setattr(loop, "create_connection", attempt)
    with silent_listener() as listener:
        address = f"{HOST}:{listener.getsockname()[1]}"
        connecting = asyncio.ensure_future(FrameChannel.connect_tcp(address, timeout_s=TIMEOUT_S, attempt_s=0.02))
        await eventually(lambda: attempts >= 40, "40 attempts")
        assert not connecting.done()
        listener.setblocking(False)
        while not connecting.done():
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
            await asyncio.sleep(0.01)
        await connecting.result().close()
