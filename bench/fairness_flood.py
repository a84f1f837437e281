"""One client that sends the same request again and again, many at once, in a process of its own.

It sends prepared bytes and does not inspect answers, so that it takes little processor time from its competitors.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio

from kera.core.base.address import split_address
from kera.core.rpc.frames import HEADER_BYTES, FrameKind

FRAMES, GRPC, PUSH = "frames", "grpc", "push"
_LENGTHS = struct.Struct("<3xB12xII")
"""Fields of a frame's header: its kind, and the lengths of head and bulk."""
_START_S = 30.0
_RECEIVE_BYTES = 1 << 20
NICE = 19


@dataclass(frozen=True)
class Flood:
    """The content of a flood, and its target."""

    transport: str
    address: str
    """host:port, or the path of a push socket."""
    request: bytes
    """A frame, a message of gRPC, or messages of the push channel."""
    path: str = ""
    """Path of the method, for gRPC."""
    pipelined: int = 40
    in_turn: tuple[tuple[tuple[str, bytes], ...], ...] = ()
    """For gRPC, in place of `request` and `path`: the paths and messages that each pipelined request sends in turn."""


@dataclass(frozen=True)
class Progress:
    """The progress of a flood that is under way."""

    answered: Any
    refused: Any


@contextmanager
def flooding(flood: Flood) -> Iterator[Progress]:
    """Flood as long as the context lasts; the flood is under way when the block begins."""
    context = multiprocessing.get_context("spawn")
    progress = Progress(context.Value("Q", 0), context.Value("Q", 0))
    started = context.Event()
    process = context.Process(target=_run, args=(flood, started, progress.answered, progress.refused), daemon=True)
    process.start()
    try:
        if not started.wait(_START_S):
            raise RuntimeError(f"the flood of {flood.path or flood.transport} did not start")
        yield progress
    finally:
        process.kill()
        process.join()


def _run(flood: Flood, started: Any, answered: Any, refused: Any) -> None:
    os.nice(NICE)  # in practice it is another machine, and takes no processor time from the daemon and the others
    if flood.transport == GRPC:
        asyncio.run(_grpc(flood, started, answered, refused))
    elif flood.transport == FRAMES:
        _frames(flood, started, answered, refused)
    else:
        _push(flood, started, answered)


def _frames(flood: Flood, started: Any, answered: Any, refused: Any) -> None:
    sock = socket.create_connection(split_address(flood.address))
    room = threading.Semaphore(flood.pipelined)

    def send() -> None:
        while True:
            room.acquire()
            sock.sendall(flood.request)

    threading.Thread(target=send, daemon=True).start()
    started.set()
    scratch = memoryview(bytearray(_RECEIVE_BYTES))
    while True:
        _receive(sock, scratch, HEADER_BYTES)
        kind, head_bytes, bulk_bytes = _LENGTHS.unpack_from(scratch, 0)
        _receive(sock, scratch, head_bytes + bulk_bytes)
        refused.value += kind == FrameKind.ERROR
        answered.value += 1
        room.release()


def _receive(sock: socket.socket, into: memoryview, length: int) -> None:
    """Only the last of these bytes remain."""
    at = 0
    while length:
        at = at if at < len(into) else 0
        count = sock.recv_into(into[at : at + length])
        if not count:
            raise ConnectionError("the daemon has closed the connection")
        at += count
        length -= count


def _push(flood: Flood, started: Any, answered: Any) -> None:
    """Send without end, and discard the input; reconnect when a connection is closed."""
    started.set()
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(flood.address)
            threading.Thread(target=_forget, args=(sock,), daemon=True).start()
            try:
                while True:
                    sock.sendall(flood.request)
                    answered.value += 1
            except OSError:
                continue


def _forget(sock: socket.socket) -> None:
    try:
        while sock.recv(_RECEIVE_BYTES):
            pass
    except OSError:
        pass


async def _grpc(flood: Flood, started: Any, answered: Any, refused: Any) -> None:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(flood.address, options=options) as channel:
        await channel.channel_ready()
        started.set()

        async def ask(in_turn: tuple[tuple[str, bytes], ...]) -> None:
            while True:
                for path, request in in_turn:
                    method: Any = channel.unary_unary(path)
                    try:
                        await method(request)
                    except grpc.aio.AioRpcError:
                        refused.value += 1
                    answered.value += 1

        same = (((flood.path, flood.request),),) * flood.pipelined
        await asyncio.gather(*map(ask, flood.in_turn or same))
