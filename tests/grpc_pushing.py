"""gRPC connections that send as much as the server allows, as an attacker would; and a server for them.

They implement HTTP/2 themselves, because a gRPC library does not start a message without finishing it. They respect
the flow-control windows of the server, which would close the connection otherwise.

``python -m tests.grpc_pushing --connections 1000 --mib 4 --method unary`` measures the memory of a server under that.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, cast

from kera.core.access.certificates import DAEMONS, USERS, CertificateNames
from kera.core.rpc import api
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.rpc.method import Call, Reply
from kera.server.access.audit import Audit
from kera.server.access.authenticator import Authenticator
from kera.server.access.guard import Guard
from kera.v1 import broker_pb2, coordinator_pb2
from tests.fuzz.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADER_BYTES,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    headers,
)

HOST = "127.0.0.1"
MIB = 1 << 20
ACK = 1
WINDOW_BYTES = 65_535
FRAME_BYTES = 16_384
INITIAL_WINDOW = 4
"""A setting of HTTP/2."""
METHODS = {
    "unary": api.LIST_STREAMS.path,
    "bulk": api.MULTI_WRITE_CHUNKS.path,
    "authenticate": api.AUTHENTICATE.path,
    "health": "/grpc.health.v1.Health/Check",
    "watch": "/grpc.health.v1.Health/Watch",
    "reflection": "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
}
QUIET_S = 0.5
"""After this time without a byte, the server takes no more."""


@dataclass
class _Stream:
    room: int = WINDOW_BYTES
    sent: int = 0


@dataclass
class Pusher(asyncio.Protocol):
    """A connection and its calls; each call announces a message of `message_bytes`, and sends all but the last byte."""

    method: str
    message_bytes: int
    calls: int = 1
    metadata: Iterable[tuple[bytes, bytes]] = ()
    sent: int = 0
    """Bytes of messages."""
    ended: int = 0
    """Calls that the server has ended."""
    _room: int = WINDOW_BYTES
    _initial: int = WINDOW_BYTES
    _received: bytes = b""
    _streams: dict[int, _Stream] = field(default_factory=dict)
    _transport: asyncio.Transport | None = None
    _paused: bool = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass, but works
        transport.write(PREFACE + frame(SETTINGS, 0, 0))
        pairs = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", METHODS[self.method].encode()),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            *self.metadata,
        ]
        for number in range(1, 2 * self.calls, 2):
            self._streams[number] = _Stream()
            transport.write(frame(HEADERS, END_HEADERS, number, headers(pairs)))
        self._push()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._push()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _push(self) -> None:
        """Send as much as the windows allow."""
        last = self.message_bytes + 5 - 1
        for number, stream in self._streams.items():
            while not self._paused and (size := min(FRAME_BYTES, self._room, stream.room, last - stream.sent)) > 5:
                data = bytes(size)
                if not stream.sent:
                    data = b"\0" + self.message_bytes.to_bytes(4, "big") + data[5:]
                assert self._transport is not None
                self._transport.write(frame(DATA, 0, number, data))
                stream.room -= size
                stream.sent += size
                self._room -= size
                self.sent += size

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= HEADER_BYTES:
            size = int.from_bytes(self._received[:3], "big")
            if len(self._received) < HEADER_BYTES + size:
                break
            kind, flags = self._received[3], self._received[4]
            stream = int.from_bytes(self._received[5:9], "big") & 0x7FFF_FFFF
            payload = self._received[HEADER_BYTES : HEADER_BYTES + size]
            self._received = self._received[HEADER_BYTES + size :]
            self._take(kind, flags, stream, payload)
        self._push()

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        assert self._transport is not None
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                if int.from_bytes(payload[at : at + 2], "big") == INITIAL_WINDOW:
                    initial = int.from_bytes(payload[at + 2 : at + 6], "big")
                    for stream in self._streams.values():
                        stream.room += initial - self._initial
                    self._initial = initial
            self._transport.write(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._transport.write(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            more = int.from_bytes(payload, "big") & 0x7FFF_FFFF
            if not number:
                self._room += more
            elif number in self._streams:
                self._streams[number].room += more
        elif (kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM)) and number in self._streams:
            del self._streams[number]
            self.ended += 1


async def push(
    port: int, method: str, message_bytes: int, *, connections: int = 1, calls: int = 1, timeout_s: float = 60.0
) -> list[Pusher]:
    """Connections that send until the server takes no more."""
    loop = asyncio.get_running_loop()
    pushers = []
    for _ in range(connections):
        _, pusher = await loop.create_connection(lambda: Pusher(method, message_bytes, calls), HOST, port)
        pushers.append(pusher)
    until_s = quiet_s = loop.time()
    until_s += timeout_s
    sent = -1
    while loop.time() < min(until_s, quiet_s + QUIET_S):
        now = sum(pusher.sent + pusher.ended for pusher in pushers)
        if now != sent:
            sent, quiet_s = now, loop.time()
        await asyncio.sleep(0.02)
    return pushers


class Pushed:
    """A server with security on, in a separate process to measure its memory."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.grpc_pushing", "--serve"]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.begun = self.memory

    @property
    def memory(self) -> int:
        """Resident memory of the server, in bytes."""
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * mmap.PAGESIZE

    async def most_memory(self, method: str, message_bytes: int, connections: int, calls: int = 1) -> tuple[int, int]:
        """The maximal growth of its memory during the push, and the number of sent bytes."""
        pushing = asyncio.create_task(push(self.port, method, message_bytes, connections=connections, calls=calls))
        most = 0
        while not pushing.done():
            most = max(most, self.memory - self.begun)
            await asyncio.sleep(0.01)
        pushers = await pushing
        for pusher in pushers:
            pusher.close()
        return most, sum(pusher.sent for pusher in pushers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


async def _serve() -> None:
    def streams(_: Call[coordinator_pb2.ListStreamsRequest]) -> Reply[coordinator_pb2.ListStreamsResponse]:
        return Reply(coordinator_pb2.ListStreamsResponse())

    def written(_: Call[broker_pb2.MultiWriteChunksRequest]) -> Reply[broker_pb2.MultiWriteChunksResponse]:
        return Reply(broker_pb2.MultiWriteChunksResponse())

    door = Authenticator(CertificateNames.of(DAEMONS, USERS), now_s=time.monotonic)
    guard = Guard(door, Audit(time.monotonic))
    service = guard.guarded({**guard.service(), api.LIST_STREAMS: streams, api.MULTI_WRITE_CHUNKS: written})
    server = GrpcServer([service], doorkeeper=guard.doorkeeper)
    with guard:
        print(await server.listen(HOST, 0), flush=True)
        await asyncio.Event().wait()


async def _measure(arguments: argparse.Namespace) -> None:
    with Pushed() as pushed:
        message_bytes = round(arguments.mib * MIB)
        most, sent = await pushed.most_memory(arguments.method, message_bytes, arguments.connections, arguments.calls)
    print(
        f"{arguments.connections} connections, {arguments.calls} calls each of {arguments.method} with"
        f" {arguments.mib:g} MiB: {sent / MIB:,.0f} MiB were taken, memory grew by {most / MIB:,.0f} MiB"
        f" ({most / MIB / arguments.connections:.2f} per connection)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--serve", action="store_true", help="be the server, and print the port")
    parser.add_argument("--method", choices=METHODS, default="unary")
    parser.add_argument("--mib", type=float, default=4.0, help="size of each message")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=1, help="of each connection at once")
    arguments = parser.parse_args()
    asyncio.run(_serve() if arguments.serve else _measure(arguments))


if __name__ == "__main__":
    main()
