"""The attacks of strangers without a password, and of known users with bad intentions: see `tests.chaos.crowd`.

Each attack goes on until it is cancelled, and counts its actions: one of `ARRIVED` each time that it reached a daemon,
`LET_IN` each time that a daemon served a stranger, and the outcomes of its attempts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import subprocess
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kera.core.access.passwords import Login
from kera.core.errors import KeraError, NotAllowed
from kera.core.rpc import api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.frames import FrameKind, encode_frame
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.limits import BULK_BYTES_MAX
from kera.core.rpc.method import Channel, Introduction, Method, call
from kera.core.security import Tls, TlsFiles
from kera.core.security.issuing import Authority
from kera.v1 import access_pb2, broker_pb2, coordinator_pb2
from tests.fuzz.http2 import PREFACE, SETTINGS, frame
from tests.grpc_pushing import Pusher

TIMEOUT_S = 10.0
WORKERS = 8
"""Workers that do the same at once."""
OPENED_AT_ONCE = 64
"""Connections that are opened at once."""
LORIS = 200
"""Connections that send byte by byte."""
BYTE_S = 0.1
"""Time between two bytes."""
PUSHERS, CALLS = 100, 100
MESSAGE_BYTES = 16 << 20
STALLED = 100
"""Connections that take no answers."""
READS = 60
"""Requests of each of these connections."""
RENEWED = (b"KEYUPDATE", b"RENEGOTIATING")
"""Lines that ``openssl`` prints after asking for new keys."""
ARRIVED = ("connected", "guessed")
LET_IN = "let in"
FAILED = (OSError, KeraError, EOFError, ssl.SSLError, asyncio.TimeoutError)
Way = Literal["frames", "grpc", "metrics"]


@dataclass
class Target:
    """A cluster, as an attacker in its network sees it."""

    ports: Mapping[Way, int]
    """Ports of the broker."""
    coordinator_ports: Mapping[Way, int]
    tls: Tls | None
    introduction: Introduction
    """Credentials of a user with the right to read, for attacks by known users."""
    read: broker_pb2.MultiReadChunksRequest
    """A request for all data."""
    connections: int = 5000
    did: Counter[str] = field(default_factory=Counter)

    @property
    def context(self) -> ssl.SSLContext | None:
        """The TLS context for connections of the attacker."""
        return None if self.tls is None else self.tls.client_context()


HOST = "127.0.0.1"
Attack = Callable[[Target], Awaitable[None]]


def _frame(method: Method[Any, Any], request_id: int, message: Any) -> bytes:
    return b"".join(encode_frame(FrameKind.REQUEST, method, request_id, message, [], BULK_BYTES_MAX))


async def _for_ever(target: Target, once: Callable[[], Awaitable[object]]) -> None:
    """Repeat `once`, in several tasks at once."""

    async def worker() -> None:
        while True:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await once()
            except FAILED as error:
                target.did[type(error).__name__] += 1
            await asyncio.sleep(0)

    await asyncio.gather(*(worker() for _ in range(WORKERS)))


# -- idle connections ------------------------------------------------------------------------------------------


async def _idle(target: Target, ports: Mapping[Way, int], way: Way) -> None:
    writers: list[asyncio.StreamWriter] = []
    room = asyncio.Semaphore(OPENED_AT_ONCE)

    async def one() -> None:
        async with room:
            try:
                reader, writer = await asyncio.open_connection(HOST, ports[way])
            except OSError:
                target.did["refused"] += 1
                return
        writers.append(writer)
        target.did["connected"] += 1
        with contextlib.suppress(OSError):
            await reader.read()
        target.did["closed by the daemon"] += 1
        writer.close()

    try:
        await asyncio.gather(*(one() for _ in range(target.connections)))
        await asyncio.Event().wait()
    finally:
        for writer in writers:
            writer.transport.abort()


def idle(way: Way, *, coordinator: bool = False) -> Attack:
    """Open thousands of connections and send nothing."""
    return lambda target: _idle(target, target.coordinator_ports if coordinator else target.ports, way)


# -- slow requests ---------------------------------------------------------------------------------------------


async def _trickle(target: Target, port: int, data: bytes, context: ssl.SSLContext | None) -> None:
    async def one() -> None:
        while True:
            with contextlib.suppress(*FAILED):
                _, writer = await asyncio.open_connection(
                    HOST, port, ssl=context, server_hostname=HOST if context is not None else None
                )
                target.did["connected"] += 1
                try:
                    for at in range(len(data)):
                        writer.write(data[at : at + 1])
                        await writer.drain()
                        await asyncio.sleep(BYTE_S)  # sleep: the attacker is slow
                finally:
                    writer.transport.abort()
            target.did["closed by the daemon"] += 1
            await asyncio.sleep(BYTE_S)

    await asyncio.gather(*(one() for _ in range(LORIS)))


def _client_hello(tls: Tls) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.client_context().wrap_bio(incoming, outgoing, server_hostname=HOST).do_handshake()
    return outgoing.read()


async def slow_handshake(target: Target) -> None:
    """Send a TLS handshake, byte by byte."""
    assert target.tls is not None
    await _trickle(target, target.ports["frames"], _client_hello(target.tls), None)


async def slow_authentication(target: Target) -> None:
    """Send a request to authenticate over frames, byte by byte."""
    request = access_pb2.AuthenticateRequest(scram=Login("alice", "correct horse battery").first())
    await _trickle(target, target.ports["frames"], _frame(api.AUTHENTICATE, 1, request), target.context)


async def slow_grpc(target: Target) -> None:
    """Send the first bytes of HTTP/2, byte by byte."""
    context = target.context
    if context is not None:
        context.set_alpn_protocols(["h2"])
    await _trickle(target, target.ports["grpc"], PREFACE + frame(SETTINGS, 0, 0), context)


async def slow_http(target: Target) -> None:
    """Send the headers of a request for metrics, byte by byte."""
    data = b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + b"X-Header: y\r\n" * 500
    await _trickle(target, target.ports["metrics"], data, target.context)


# -- unread answers ---------------------------------------------------------------------------------------------


async def stalled_readers(target: Target) -> None:
    """As a user with the right to read, request a lot over many connections, and take no answers."""
    channels: list[FrameChannel] = []

    async def one() -> None:
        while True:
            try:
                channel = await FrameChannel.connect_tcp(
                    f"{HOST}:{target.ports['frames']}",
                    timeout_s=TIMEOUT_S,
                    tls=target.tls,
                    introduction=target.introduction,
                )
            except KeraError as error:
                target.did[type(error).__name__] += 1
                await asyncio.sleep(1)  # sleep: an attacker that was refused comes again
                continue
            channels.append(channel)
            target.did["connected"] += 1
            channel.hold_frames()
            futures = [channel.submit(api.MULTI_READ_CHUNKS, target.read, timeout_s=3600.0) for _ in range(READS)]
            await asyncio.gather(*futures, return_exceptions=True)
            target.did["closed by the daemon"] += 1

    try:
        await asyncio.gather(*(one() for _ in range(STALLED)))
    finally:
        for channel in channels:
            await channel.close()


async def stalled_strangers(target: Target) -> None:
    """As a stranger, send one request after the other, and take no answers."""
    one_request = _frame(api.GET_STREAM_ID, 1, coordinator_pb2.GetStreamIdRequest(name="x" * 1000))

    async def once() -> None:
        _, writer = await asyncio.open_connection(
            HOST, target.ports["frames"], ssl=target.context, server_hostname=HOST if target.tls else None
        )
        target.did["connected"] += 1
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        try:
            for _ in range(100):
                writer.write(one_request)
                async with asyncio.timeout(1):
                    await writer.drain()
                await asyncio.sleep(0.001)  # sleep: until the client notices that the daemon has closed the connection
                if writer.is_closing():
                    break
        finally:
            writer.transport.abort()

    await _for_ever(target, once)


async def pushing(target: Target) -> None:
    """As a stranger, send as many large messages over gRPC as the daemon accepts."""
    loop = asyncio.get_running_loop()
    context = target.context
    if context is not None:
        context.set_alpn_protocols(["h2"])

    async def one() -> None:
        while True:
            with contextlib.suppress(*FAILED):
                transport, pusher = await loop.create_connection(
                    lambda: Pusher("bulk", MESSAGE_BYTES, CALLS),
                    HOST,
                    target.ports["grpc"],
                    ssl=context,
                    server_hostname=HOST if context is not None else None,
                )
                target.did["connected"] += 1
                try:
                    async with asyncio.timeout(TIMEOUT_S):
                        while pusher.ended < CALLS and not transport.is_closing():
                            await asyncio.sleep(0.02)
                finally:
                    target.did["MiB sent"] += pusher.sent >> 20
                    pusher.close()
            await asyncio.sleep(0)

    await asyncio.gather(*(one() for _ in range(PUSHERS)))


# -- floods ------------------------------------------------------------------------------------------------------


def failed_handshakes(way: Way) -> Attack:
    """Connect and send random bytes, which are not a handshake of TLS or another protocol."""

    async def once_of(target: Target) -> None:
        async def once() -> None:
            reader, writer = await asyncio.open_connection(HOST, target.ports[way])
            target.did["connected"] += 1
            try:
                writer.write(os.urandom(300))
                await reader.read()
                target.did["closed by the daemon"] += 1
            finally:
                writer.transport.abort()

        await _for_ever(target, once)

    return once_of


async def refused_certificates(target: Target) -> None:
    """Show a certificate of another authority."""
    assert target.tls is not None
    with tempfile.TemporaryDirectory() as directory:
        authority, _ = Authority.open_or_make(Path(directory))
        own = authority.issue("mallory")
        files = target.tls.files
        tls = Tls(TlsFiles(own.cert, own.key, files.ca))

        async def once() -> None:
            channel = await FrameChannel.connect_tcp(f"{HOST}:{target.ports['frames']}", timeout_s=TIMEOUT_S, tls=tls)
            target.did["connected"] += 1
            try:
                with contextlib.suppress(NotAllowed):  # the answer to a known user
                    await call(channel, api.LIST_STREAMS, coordinator_pb2.ListStreamsRequest(), timeout_s=TIMEOUT_S)
                target.did[LET_IN] += 1
            finally:
                await channel.close()

        await _for_ever(target, once)


def wrong_passwords(way: Way) -> Attack:
    """Guess passwords as fast as the daemon allows, each time with a new name."""

    async def attack(target: Target) -> None:
        count = 0

        async def guess(channel: Channel) -> None:
            nonlocal count
            count += 1
            first = access_pb2.AuthenticateRequest(scram=b"n,,n=guess%d,r=%016x" % (count, count))
            answer = await call(channel, api.AUTHENTICATE, first, timeout_s=TIMEOUT_S)
            target.did["guessed"] += 1
            nonce = answer.scram.partition(b"r=")[2].partition(b",")[0]
            final = b"c=biws,r=" + nonce + b",p=" + b"A" * 43 + b"="
            second = access_pb2.AuthenticateRequest(exchange_id=answer.exchange_id, scram=final)
            await call(channel, api.AUTHENTICATE, second, timeout_s=TIMEOUT_S)

        async def worker() -> None:
            channel: Channel | None = None
            while True:
                try:
                    if channel is None or channel.closed:
                        address = f"{HOST}:{target.ports[way]}"
                        channel = (
                            GrpcChannel(address, tls=target.tls)
                            if way == "grpc"
                            else await FrameChannel.connect_tcp(address, timeout_s=TIMEOUT_S, tls=target.tls)
                        )
                    await guess(channel)
                    target.did[LET_IN] += 1
                except KeraError as error:
                    target.did[type(error).__name__] += 1
                await asyncio.sleep(0)

        await asyncio.gather(*(worker() for _ in range(4 * WORKERS)))

    return attack


def renewals(way: Way, command: bytes) -> Attack:
    """Request new keys all the time: ``K`` of TLS 1.3, ``R`` of TLS 1.2."""

    async def attack(target: Target) -> None:
        version = "-tls1_3" if command == b"K" else "-tls1_2"
        line = ("openssl", "s_client", "-brief", "-connect", f"{HOST}:{target.ports[way]}", version, "-alpn", "h2")

        async def once() -> None:
            process = await asyncio.create_subprocess_exec(
                *line, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            try:
                assert process.stdin is not None
                assert process.stderr is not None
                async for said in process.stderr:
                    if said.startswith((b"CONNECTION ESTABLISHED", *RENEWED)):
                        target.did["asked" if said.startswith(RENEWED) else "connected"] += 1
                        process.stdin.write(command + b"\n")  # one at a time: requests that arrive together count once
                        await process.stdin.drain()
            finally:
                if process.returncode is None:
                    process.kill()
                await process.wait()

        await _for_ever(target, once)

    return attack


ATTACKS: dict[str, Attack] = {
    "idle, frames": idle("frames"),
    "idle, gRPC": idle("grpc"),
    "idle, gRPC of the coordinator": idle("grpc", coordinator=True),
    "idle, metrics": idle("metrics"),
    "slow handshakes of TLS": slow_handshake,
    "slow authentication": slow_authentication,
    "slow HTTP/2": slow_grpc,
    "slow HTTP": slow_http,
    "known, take no answers": stalled_readers,
    "unknown, take no answers": stalled_strangers,
    "unknown, send much over gRPC": pushing,
    "failed handshakes, frames": failed_handshakes("frames"),
    "failed handshakes, gRPC": failed_handshakes("grpc"),
    "failed handshakes, metrics": failed_handshakes("metrics"),
    "certificates of others": refused_certificates,
    "wrong passwords, frames": wrong_passwords("frames"),
    "wrong passwords, gRPC": wrong_passwords("grpc"),
    "other keys, frames": renewals("frames", b"K"),
    "other keys, gRPC": renewals("grpc", b"K"),
    "renegotiation, frames": renewals("frames", b"R"),
}
OF_TLS = frozenset(
    name for name in ATTACKS if name.startswith(("slow handshakes", "certificates", "other keys", "reneg"))
)
"""Attacks that need TLS."""
