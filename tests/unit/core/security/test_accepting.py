"""Clients that connect over TLS and do not shake hands: they cost little, and not for long."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kera.core.security import Tls, TlsFiles
from kera.core.security.accepting import TlsListener, listening
from kera.core.security.issuing import Authority
from tests.unit.core.rpc.transports import eventually

HOST = "127.0.0.1"
HANDSHAKES_MAX = 3


class Taken(asyncio.Protocol):
    """Counts accepted connections."""

    made = 0

    def connection_made(self, _transport: asyncio.BaseTransport) -> None:
        Taken.made += 1


@pytest.fixture
def tls(authority: Authority) -> Tls:
    one = authority.issue(HOST)
    return Tls(TlsFiles(one.cert, one.key, authority.path))


@pytest.fixture
async def listener(tls: Tls) -> AsyncIterator[TlsListener]:
    Taken.made = 0
    listener = TlsListener(
        listening(HOST, 0, 100), Taken, tls, "frames", handshakes_max=HANDSHAKES_MAX, handshake_s=0.3
    )
    yield listener
    listener.close()


async def knock(listener: TlsListener) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*listener.sockets[0].getsockname())


async def test_a_silent_connection_is_closed_after_the_timeout(listener: TlsListener) -> None:
    reader, writer = await knock(listener)
    assert await reader.read() == b""
    assert listener.handshakes == 0
    assert Taken.made == 0
    writer.close()


async def test_a_connection_without_a_handshake_message_is_closed(listener: TlsListener) -> None:
    reader, writer = await knock(listener)
    writer.write(b"GET / HTTP/1.1\r\n\r\n" * 10)
    async with asyncio.timeout(30):
        await reader.read()
    assert listener.handshakes == 0
    writer.close()


async def test_silent_connections_make_room_for_one_that_shakes_hands(listener: TlsListener, tls: Tls) -> None:
    silent = [await knock(listener) for _ in range(2 * HANDSHAKES_MAX)]
    await eventually(lambda: listener.handshakes == HANDSHAKES_MAX)
    address = listener.sockets[0].getsockname()
    _, writer = await asyncio.open_connection(*address, ssl=tls.client_context(), server_hostname=HOST)
    await eventually(lambda: Taken.made == 1)
    writer.close()
    for _, each in silent:
        each.close()


async def test_many_connections_of_one_host_do_not_crowd_out_another_host(listener: TlsListener, tls: Tls) -> None:
    address = listener.sockets[0].getsockname()
    _, alone = await asyncio.open_connection(*address, local_addr=("127.0.0.2", 0))
    many = [await knock(listener) for _ in range(3 * HANDSHAKES_MAX)]
    await alone.start_tls(tls.client_context(), server_hostname=HOST)
    await eventually(lambda: Taken.made == 1)
    for each in (alone, *(writer for _, writer in many)):
        each.close()


async def test_a_closed_listener_closes_its_connections(tls: Tls) -> None:
    listener = TlsListener(listening(HOST, 0, 100), Taken, tls, "frames")
    reader, writer = await knock(listener)
    await eventually(lambda: listener.handshakes == 1)
    listener.close()
    assert await reader.read() == b""
    await eventually(lambda: listener.handshakes == 0)
    assert listener.sockets[0].fileno() == -1
    writer.close()
