"""Connects to a broker's push socket: authenticates, asks for a memory domain, and maps the broker's memory."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
from pathlib import Path

from kera.client.cluster.push import PushChannel
from kera.client.cluster.push_returns import RETURN_DELAY_S
from kera.core.base.address import reason_of
from kera.core.base.own_file import open_own
from kera.core.errors import InvalidArgument, ProtocolError, Unavailable
from kera.core.push import DEFAULT_DOMAIN, VERSION, Decoder, PushKind, encode
from kera.core.rpc.method import Introduction, introduce
from kera.core.rpc.unix_socket import peer_user
from kera.core.rpc.wire import error_from_message, parse
from kera.v1 import access_pb2, common_pb2, push_pb2

_HELLO_BYTES_MAX = 1 << 16
_WAY_OUT = (
    "run as the broker's user, have the broker serve others (unix_socket_users any), or set shared_memory to never"
)


async def connect(
    path: str,
    *,
    timeout_s: float,
    domain: str = DEFAULT_DOMAIN,
    introduction: Introduction | None = None,
    return_delay_s: float = RETURN_DELAY_S,
) -> PushChannel:
    """Connect to the socket at `path` and map the broker's memory of a domain.

    `introduction`: authenticates this client to a broker of another user. Raises `Unavailable`, and `InvalidArgument`,
    `NotAllowed`, `AuthenticationFailed` or `ProtocolError` when an immediate retry is of no use.
    """
    try:
        async with asyncio.timeout(timeout_s):
            sock, hello, fd, decoder = await _greeting(path, domain, introduction)
    except TimeoutError as error:
        raise Unavailable(f"no greeting from {path} within {timeout_s:g} s", address=path) from error
    except PermissionError as error:
        raise InvalidArgument(f"cannot connect to {path}: {reason_of(error)}; {_WAY_OUT}", address=path) from error
    except OSError as error:
        raise Unavailable(f"cannot connect to {path}: {reason_of(error)}", address=path) from error
    try:
        memory = _map(hello, fd, sock)
        _, channel = await asyncio.get_running_loop().create_unix_connection(
            lambda: PushChannel(hello, memory, decoder, path, return_delay_s), sock=sock
        )
    except BaseException:
        sock.close()
        raise
    return channel


async def _greeting(
    path: str, domain: str, introduction: Introduction | None
) -> tuple[socket.socket, push_pb2.PushHello, int | None, Decoder]:
    """Connect, and return the broker's greeting that comes with memory. Raises `OSError` and `KeraError`."""
    talk = _Talk(path)
    try:
        await asyncio.get_running_loop().sock_connect(talk.sock, path)
        hello = await talk.hello()
        if hello.arena_bytes == 0:
            await introduce(introduction, talk.authenticate, each_call=False)
        if hello.arena_bytes == 0 or domain != (hello.memory_domain or DEFAULT_DOMAIN):
            talk.close_fd()
            await talk.ask(PushKind.OPEN, push_pb2.PushOpen(memory_domain=domain).SerializeToString())
            hello = await talk.hello()
            if hello.memory_domain != domain:
                raise ProtocolError(f"{path} gives memory of domain {hello.memory_domain!r}, not {domain!r}")
    except BaseException:
        talk.close_fd()
        talk.sock.close()
        raise
    return talk.sock, hello, talk.fd, talk.decoder


class _Talk:
    """The exchange of messages before pushing begins: one message at a time."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self.decoder = Decoder()
        self.fd: int | None = None
        """The descriptor that has come with the last greeting."""

    def close_fd(self) -> None:
        """Close the descriptor, if there is one."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    async def hello(self) -> push_pb2.PushHello:
        """Return the next message, which must be a greeting. Raises the broker's error if it refuses."""
        kind, body = await self._next()
        hello = parse(push_pb2.PushHello, body)
        if kind is not PushKind.HELLO or hello.version != VERSION:
            raise ProtocolError(f"{self._path} is not a push channel of version {VERSION}", version=hello.version)
        return hello

    async def authenticate(self, request: access_pb2.AuthenticateRequest) -> access_pb2.AuthenticateResponse:
        """Make one step of authentication. Raises `AuthenticationFailed`."""
        await self.ask(PushKind.AUTHENTICATE, request.SerializeToString())
        kind, body = await self._next()
        if kind is not PushKind.AUTHENTICATED:
            raise ProtocolError(f"{self._path} answers a step of authenticating with {kind.name}")
        return parse(access_pb2.AuthenticateResponse, body)

    async def ask(self, kind: PushKind, body: bytes) -> None:
        """Send a message."""
        await asyncio.get_running_loop().sock_sendall(self.sock, encode(kind, body))

    async def _next(self) -> tuple[PushKind, bytes]:
        """Return the next message. Raises the broker's refusal, or `Unavailable` if it closes the connection."""
        while True:
            await _readable(self.sock)
            try:
                data, fds, _, _ = socket.recv_fds(self.sock, _HELLO_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                continue
            for fd in fds:
                self.close_fd()
                self.fd = fd
            if not data:
                raise Unavailable(f"the broker closes {self._path} at once; {_WAY_OUT}", address=self._path)
            for kind, body in self.decoder.feed(data):
                if kind is PushKind.ALIVE:
                    continue
                if kind is PushKind.REFUSED:
                    raise error_from_message(parse(common_pb2.Error, body))
                return kind, body


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(sock, _resolve, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _map(hello: push_pb2.PushHello, fd: int | None, sock: socket.socket) -> memoryview:
    """Map the memory of the broker at the other end of `sock`.

    Closes the descriptor; without one, opens the file, which the broker's user must own.

    Raises `InvalidArgument` and `ProtocolError`.
    """
    path = hello.arena_path
    try:
        if fd is None:
            fd = open_own(Path(path), user=peer_user(sock))
        try:
            memory = memoryview(mmap.mmap(fd, hello.arena_bytes, prot=mmap.PROT_READ))
        finally:
            os.close(fd)
    except (OSError, ValueError, OverflowError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InvalidArgument(f"cannot map the broker's memory {path}: {reason}; {_WAY_OUT}", path=path) from error
    rows_end = hello.rows_at + hello.slots * hello.row_bytes
    slots_end = hello.slots_at + hello.slots * hello.slot_bytes
    aligned = hello.row_bytes >= 8 and hello.row_bytes % 8 == 0 and hello.rows_at % 8 == 0
    if not (aligned and hello.slots and hello.slot_bytes and max(rows_end, slots_end) <= hello.arena_bytes):
        raise ProtocolError(f"the broker's memory {path} is not as it says", path=path)
    return memory
