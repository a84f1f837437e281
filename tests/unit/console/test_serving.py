"""The server with slow, stalled, malformed and too many connections."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from kera.client.testing import FakeCluster
from kera.console import limits, serving
from kera.console.house import Cluster
from kera.console.settings import ConsoleSettings
from tests.unit.console.conftest import all_is_well

SOON_S = 0.2
LONG_S = 30


@pytest.fixture
async def port(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """The port of a console that waits long for requests: a test of a time-out shortens it for its own connection."""
    monkeypatch.setattr(limits, "REQUEST_TIMEOUT_S", LONG_S)
    monkeypatch.setattr(limits, "IDLE_CONNECTION_S", LONG_S)
    monkeypatch.setattr(limits, "DOWNLOADS_MAX", 2)
    told: asyncio.Queue[str] = asyncio.Queue()
    settings = ConsoleSettings(port=0, admin=True)
    running = asyncio.ensure_future(
        serving.serve(settings, Cluster(cluster.bootstrap, cluster.settings(), all_is_well), ready=told.put_nowait)
    )
    try:
        async with asyncio.timeout(LONG_S):
            found = urlsplit(await told.get()).port
        assert found is not None
        yield found
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def exchange(port: int, *parts: bytes, on: Connection | None = None) -> bytes:
    """Send parts; return everything received until the server closes the connection. `on`: one that is open."""
    reader, writer = on or await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        async with asyncio.timeout(LONG_S):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_a_server_that_cannot_start_ends_with_its_error(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def startup(*_: object, **__: object) -> None:
        raise OSError("no sockets are left")

    monkeypatch.setattr(uvicorn.Server, "startup", startup)
    told: list[str] = []
    here = Cluster(cluster.bootstrap, cluster.settings(), all_is_well)
    async with asyncio.timeout(LONG_S):
        with pytest.raises(OSError, match="no sockets are left"):
            await serving.serve(ConsoleSettings(port=0), here, ready=told.append)
    assert told == []


def request(method: str, address: str, *headers: str) -> bytes:
    lines = [f"{method} {address} HTTP/1.1", "Host: localhost", "Origin: http://localhost", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def is_well(port: int) -> None:
    assert b"200 OK" in await exchange(port, request("GET", "/streams", "Connection: close"))


async def after_one_request(port: int) -> Connection:
    """Open a connection that has had its first answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request("GET", "/static/icon.svg"))
    async with asyncio.timeout(LONG_S):
        await reader.readuntil(b"</svg>")
    return reader, writer


async def test_a_connection_without_a_complete_request_is_closed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(limits, "REQUEST_TIMEOUT_S", SOON_S)
        assert await exchange(port) == b""
        assert await exchange(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n") == b""
    await is_well(port)


FORM = ("Content-Type: application/x-www-form-urlencoded", "Content-Length: 100", "Connection: close")


@pytest.mark.parametrize(
    ("sent", "answer"),
    [(b"GET / HT", b""), (request("POST", "/streams/create", *FORM) + b"name=a", b"HTTP/1.1 408")],
    ids=["half a head", "half a form"],
)
async def test_a_second_request_that_arrives_too_slowly_ends_its_connection(
    port: int, sent: bytes, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await after_one_request(port)
    with monkeypatch.context() as patch:
        patch.setattr(limits, "REQUEST_TIMEOUT_S", SOON_S)
        assert (await exchange(port, sent, on=connection)).strip()[:12] == answer
    await is_well(port)


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", marks=pytest.mark.slow),
        b"GET / HTTP/1.1\r\n",
        request("POST", "/streams/create", "Content-Length: 100"),
    ],
    ids=["nothing", "half a head", "a head"],
)
async def test_slow_clients_do_not_block_others(port: int, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS_MAX", 4)
    kept_reader, kept = await after_one_request(port)
    slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
    for _, writer in slow:
        writer.write(sent)

    await is_well(port)

    if b"POST" not in sent:  # a connection that has sent a whole head counts as a request, too
        kept.write(request("GET", "/static/icon.svg", "Connection: close"))
        async with asyncio.timeout(LONG_S):
            assert b"200 OK" in await kept_reader.read(), "a client with an earlier request keeps its place"
    for _, writer in [*slow, (kept_reader, kept)]:
        writer.close()


STRANGE = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: localhost\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "a proxy's": b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
    "a huge header": request("GET", "/", "Connection: close", "X: " + "x" * (64 << 10)),
    "two lengths": request("POST", "/", "Connection: close", "Content-Length: 1", "Transfer-Encoding: chunked"),
    "a length below 0": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    "websocket": b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade, close\r\n\r\n",
    "all bytes": bytes(range(256)),
}


async def test_malformed_or_foreign_requests_do_no_harm(port: int) -> None:
    for kind, sent in STRANGE.items():
        answer = await exchange(port, sent)
        assert b"Traceback" not in answer, kind
        assert not answer or b" 4" in answer[:13] or b"200 OK" in answer[:20] or b" 303 " in answer[:20], kind
        await is_well(port)


async def test_a_client_that_does_not_read_the_answer_loses_its_place(
    port: int, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.create_stream("s")
    async with cluster.client().producer() as producer:
        await producer.prepare("s")
        await producer.send("s", bytes(900_000))
    monkeypatch.setattr(limits, "REQUESTS_MAX", 2)
    monkeypatch.setattr(limits, "ANSWER_TIMEOUT_S", 0.5)
    writers = []
    for _ in range(2):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(8):
            writer.write(request("GET", "/streams/s/value?streamlet=0&entry=0&offset=0"))
        writers.append(writer)
    async with asyncio.timeout(LONG_S):
        while b"200 OK" not in await exchange(port, request("GET", "/streams", "Connection: close")):
            await asyncio.sleep(0.05)
    for writer in writers:
        writer.transport.abort()


async def test_stalled_downloads_are_limited_and_make_no_copies(
    port: int, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each download has its value in memory once, and hands it to the network in pieces."""
    cluster.create_stream("s")
    value = bytes(900_000)
    async with cluster.client().producer() as producer:
        await producer.prepare("s")
        await producer.send("s", value)
    handed: list[int] = []
    original = RequestResponseCycle.send

    async def send(self: RequestResponseCycle, message: Any) -> None:
        handed.append(len(message.get("body", b"")))
        await original(self, message)

    monkeypatch.setattr(RequestResponseCycle, "send", send)
    download = request("GET", "/streams/s/value?streamlet=0&entry=0&offset=0", "Connection: close")
    whole = await exchange(port, download)
    assert whole.partition(b"\r\n\r\n")[2] == value
    assert max(handed) <= limits.ANSWER_PIECE_BYTES
    writers = []
    for _ in range(2):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(download)
        writers.append(writer)
    async with asyncio.timeout(LONG_S):
        while b" 503 " not in (await exchange(port, download))[:20]:
            await asyncio.sleep(0.01)
    await is_well(port)
    for writer in writers:
        writer.transport.abort()
    async with asyncio.timeout(LONG_S):
        while b"200 OK" not in (await exchange(port, download))[:20]:
            await asyncio.sleep(0.01)


async def test_a_connection_beyond_the_limit_closes_the_oldest_waiting_one(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS_MAX", 3)
    await is_well(port)
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    for _, writer in held:
        writer.write(b"GET")
        await writer.drain()

    await is_well(port)

    async with asyncio.timeout(LONG_S):
        with contextlib.suppress(ConnectionError):
            assert await held[0][0].read() == b""
    held[0][1].close()
    for reader, writer in held[1:]:
        writer.write(b" /static/icon.svg HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        async with asyncio.timeout(LONG_S):
            assert b"200 OK" in await reader.read()
        writer.close()


async def test_a_connection_beyond_the_limit_is_refused_while_all_others_are_busy(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS_MAX", 3)
    monkeypatch.setattr(serving._Connection, "is_waiting", False)
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    for _, writer in held:
        writer.write(b"GET")
        await writer.drain()
    assert await exchange(port, request("GET", "/streams")) == b""
    held[0][1].close()
    async with asyncio.timeout(LONG_S):
        while not await exchange(port, request("GET", "/streams", "Connection: close")):
            await asyncio.sleep(0.01)
    for _, writer in held[1:]:
        writer.close()
