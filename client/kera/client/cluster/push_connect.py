"""Connecting to a broker's push socket: its greeting, and the mapping of its memory."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket

from kera.client.cluster.push import PushChannel
from kera.client.cluster.push_returns import RETURN_DELAY_S
from kera.core.errors import InvalidArgument, ProtocolError, Unavailable
from kera.core.push import VERSION, Decoder, Kind
from kera.core.rpc.address import reason_of
from kera.core.rpc.wire import parse
from kera.v1 import push_pb2

_HELLO_BYTES_MAX = 1 << 16
_WAY_OUT = "run as the broker's user, or set shared_memory to never"


async def connect(path: str, *, timeout_s: float, return_delay_s: float = RETURN_DELAY_S) -> PushChannel:
    """Connect to the socket at `path` and map the broker's memory.

    Raises `Unavailable`, and `InvalidArgument` or `ProtocolError` when it is of no use to try again.
    """
    try:
        async with asyncio.timeout(timeout_s):
            sock, hello, fd, decoder = await _greeting(path)
    except TimeoutError as error:
        raise Unavailable(f"no greeting from {path} within {timeout_s:g} s", address=path) from error
    except PermissionError as error:
        raise InvalidArgument(f"cannot connect to {path}: {reason_of(error)}; {_WAY_OUT}", address=path) from error
    except OSError as error:
        raise Unavailable(f"cannot connect to {path}: {reason_of(error)}", address=path) from error
    try:
        memory = _map(hello, fd)
        _, channel = await asyncio.get_running_loop().create_unix_connection(
            lambda: PushChannel(hello, memory, decoder, path, return_delay_s), sock=sock
        )
    except BaseException:
        sock.close()
        raise
    return channel


async def _greeting(path: str) -> tuple[socket.socket, push_pb2.PushHello, int | None, Decoder]:
    """Connect; what the broker says first, and the descriptor that comes with it. Raises `OSError` and `KeraError`."""
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    fds: list[int] = []
    decoder = Decoder()
    try:
        await loop.sock_connect(sock, path)
        while True:
            await _readable(sock)
            try:
                data, more, _, _ = socket.recv_fds(sock, _HELLO_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                continue
            fds += more
            if not data:
                raise Unavailable(f"the broker closes {path} at once; {_WAY_OUT}", address=path)
            for kind, body in decoder.feed(data):
                hello = parse(push_pb2.PushHello, body)
                if kind is not Kind.HELLO or hello.version != VERSION or len(fds) > 1:
                    raise ProtocolError(f"{path} is no push channel of version {VERSION}", version=hello.version)
                return sock, hello, fds[0] if fds else None, decoder
    except BaseException:
        for fd in fds:
            os.close(fd)
        sock.close()
        raise


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


def _map(hello: push_pb2.PushHello, fd: int | None) -> memoryview:
    """The broker's memory. Takes the descriptor; without one, opens the file. Raises `InvalidArgument`."""
    path = hello.arena_path
    try:
        if fd is None:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            memory = memoryview(mmap.mmap(fd, hello.arena_bytes, prot=mmap.PROT_READ))
        finally:
            os.close(fd)
    except (OSError, ValueError, OverflowError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else error
        raise InvalidArgument(f"cannot map the broker's memory {path}: {reason}; {_WAY_OUT}", path=path) from error
    rows_end = hello.rows_at + hello.slots * hello.row_bytes
    slots_end = hello.slots_at + hello.slots * hello.slot_bytes
    aligned = hello.row_bytes >= 8 and hello.row_bytes % 8 == 0 and hello.rows_at % 8 == 0
    if not (aligned and hello.slots and hello.slot_bytes and max(rows_end, slots_end) <= hello.arena_bytes):
        raise ProtocolError(f"the broker's memory {path} is not as it says", path=path)
    return memory
