"""Strangers who make daemons use memory, and how much a daemon uses for each of their connections.

Many connect to each TCP port at once. Each announces a lot of data, and sends it as long as the daemon takes it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from kera.core.rpc import api
from kera.core.rpc.frames import HEADER_BYTES, FrameKind, with_header
from kera.core.rpc.grpc_options import AUTHENTICATE_METADATA
from kera.v1 import access_pb2
from tests.fuzz.exchanges import Frame, checked
from tests.fuzz.talking import Access, Port, Talk

CONNECTIONS = 32
CALLERS = 8
"""Connections of gRPC."""
CALLS = 50
"""Simultaneous calls of each of these connections."""
SENT_BYTES = 8 << 20
"""The most that each connection, or call, sends: a daemon may take less."""
PIECE_BYTES = 1 << 16
TAKEN_BYTES_MAX = 1 << 20
"""The most of a daemon's memory for each connection."""
CALLS_TAKEN_BYTES_MAX = 8 << 20
"""The most for each connection of gRPC: a daemon receives 64 KiB and the metadata of a call before it refuses."""
WAIT_S = 2.0
LOOK_S = 0.01
HEALTH = "/grpc.health.v1.Health/Check"
GRPC_PATHS = (
    *(api.AUTHENTICATE.path, HEALTH, api.MULTI_WRITE_CHUNKS.path, api.DESCRIBE_DAEMON.path),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)


def _frame(method: int, head_bytes: int, bulk_bytes: int) -> bytes:
    """The header of a frame that announces these sizes."""
    header = bytearray(with_header(b"", FrameKind.REQUEST, method, 1, 0)[:HEADER_BYTES])
    header[16:20], header[20:24] = head_bytes.to_bytes(4, "little"), bulk_bytes.to_bytes(4, "little")
    return checked(header)


def _frames() -> Iterator[bytes]:
    """The beginnings of the data that is sent over connections of frames."""
    login = access_pb2.AuthenticateRequest(token="x" * (60 << 10)).SerializeToString()
    yield Frame(FrameKind.REQUEST, api.AUTHENTICATE.number, 1, login).data * 64
    for method in (api.AUTHENTICATE, api.MULTI_WRITE_CHUNKS, api.REPLICATE, api.DESCRIBE_DAEMON):
        yield _frame(method.number, 64 << 10, 0)
        yield _frame(method.number, 4 << 20, 0)
        yield _frame(method.number, 0, 32 << 20)


BEGINNINGS: Mapping[str, tuple[bytes, ...]] = {
    "frames_address": tuple(_frames()),
    "metrics_address": (b"GET /metrics HTTP/1.1\r\nx: ", b"POST / HTTP/1.1\r\ncontent-length: 9999999999\r\n\r\n", b""),
}


async def _pour(port: Port, access: Access, beginning: bytes) -> None:
    """Send data over one connection until it ends."""
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(WAIT_S):
            _, writer = await Talk(port, access).connected()
            try:
                writer.write(beginning)
                for _ in range(SENT_BYTES // PIECE_BYTES):
                    if writer.transport.is_closing():
                        break
                    writer.write(bytes(PIECE_BYTES))
                    await writer.drain()
                await writer.wait_closed()
            finally:
                writer.transport.abort()


async def _call(channel: grpc.aio.Channel, path: str, data: bytes) -> None:
    metadata = ((AUTHENTICATE_METADATA, b"x" * (20 << 10)),) if path == api.AUTHENTICATE.path else ()
    call: Any = channel.stream_stream(path)(timeout=WAIT_S, metadata=metadata)
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(data)
        async for _ in call:
            pass


async def _call_much(port: Port, access: Access, path: str) -> None:
    """Send data in simultaneous calls over one connection of gRPC."""
    if access.ca is None:
        raise AssertionError("strangers are those whom daemons ask")
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    credentials = grpc.ssl_channel_credentials(access.ca.read_bytes())
    async with grpc.aio.secure_channel(port.address, credentials, options=options) as channel:
        data = bytes(SENT_BYTES)
        await asyncio.gather(*(_call(channel, path, data) for _ in range(CALLS)))


def anonymous_bytes(pid: int) -> int:
    """The anonymous memory of a process, which it does not share."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@contextlib.asynccontextmanager
async def _watched(pid: int) -> AsyncIterator[list[int]]:
    """The most memory that a process has taken meanwhile beyond its memory before."""
    before = anonymous_bytes(pid)
    most = [0]

    async def look() -> None:
        while True:
            most[0] = max(most[0], anonymous_bytes(pid) - before)
            await asyncio.sleep(LOOK_S)

    looking = asyncio.ensure_future(look())
    try:
        yield most
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking


def limit(port: Port) -> int:
    """The most memory that a daemon may take for each connection to a port."""
    return CALLS_TAKEN_BYTES_MAX if port.kind == "grpc_address" else TAKEN_BYTES_MAX


async def taken(port: Port, access: Access, pid: int, *, own_bytes: int = 0) -> dict[str, int]:
    """By the data sent: the most memory that the daemon took meanwhile, for each connection.

    `own_bytes`: memory that the daemon may take meanwhile for other clients. It does not count.
    """
    found = {}
    count = CALLERS if port.kind == "grpc_address" else CONNECTIONS
    ways: dict[str, Callable[[], Awaitable[None]]]
    if port.kind == "grpc_address":
        ways = {path: lambda path=path: _call_much(port, access, path) for path in GRPC_PATHS}  # type: ignore[misc]
    else:
        ways = {
            beginning[:32].hex(): lambda beginning=beginning: _pour(port, access, beginning)  # type: ignore[misc]
            for beginning in BEGINNINGS[port.kind]
        }
    for name, one in ways.items():
        async with _watched(pid) as most:
            await asyncio.gather(*(one() for _ in range(count)))
        found[name] = max(0, most[0] - own_bytes) // count
    return found
