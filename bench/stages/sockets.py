"""The kernel's part: bytes through a socket to another process, which is this module as a program."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence

from bench.stages.part import MEMORY_BYTES, Load, Samples, now_ns, since
from kera.core.base.process import DIE_WITH_PARENT_VARIABLE, die_with_parent
from kera.core.base.settings import MIB

_LENGTHS = struct.Struct("<QQ")


class Sockets:
    """A socket to another process, which replies when it has the bytes."""

    def __init__(self, kind: str, loads: Sequence[Load], ours: socket.socket) -> None:
        self.loads = [load for load in loads if load.chunks == 1]
        self._kind = kind
        self._ours = ours

    @classmethod
    @contextlib.contextmanager
    def connected(cls, kind: str, loads: Sequence[Load]) -> Iterator[Sockets]:
        """Connected to the other process; `kind`: unix or tcp."""
        ours, theirs = _socket_pair(kind)
        with ours:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", "bench.stages.sockets", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, DIE_WITH_PARENT_VARIABLE: "1"},
                )
            try:
                ours.recv(1)
                yield cls(kind, loads, ours)
            finally:
                ours.close()
                process.kill()
                process.wait()

    async def rounds(self, load: Load, samples: Samples) -> None:
        """See `Part`."""
        data = bytes(load.size_bytes)
        self._ours.sendall(_LENGTHS.pack(load.size_bytes, load.requests))
        for _ in range(load.requests):
            begun_ns = now_ns()
            self._ours.sendall(data)
            samples.requests[f"{self._kind} socket: send"][load].append(since(begun_ns))
            self._ours.recv(1)
        answer = memoryview(bytearray(8 * load.requests))
        _receive(self._ours, answer)
        samples.requests[f"{self._kind} socket: receive"][load] += answer.cast("Q").tolist()


def _socket_pair(kind: str) -> tuple[socket.socket, socket.socket]:
    if kind == "unix":
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for end in pair:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MIB)  # as for frames
        return pair
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    for end in (ours, theirs):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


def _receive(end: socket.socket, into: memoryview) -> bool:
    """Fill `into`; False at the end."""
    at = 0
    while at < len(into):
        found = end.recv_into(into[at:])
        if not found:
            return False
        at += found
    return True


def be_other_end(descriptor: int) -> None:
    """Be the other end of `Sockets`: receive, and send the processor time of each message after its last byte."""
    with socket.socket(fileno=descriptor) as end:
        end.sendall(b"\1")
        buffer, lengths = memoryview(bytearray(MEMORY_BYTES)), memoryview(bytearray(_LENGTHS.size))
        while _receive(end, lengths):
            size, count = _LENGTHS.unpack(lengths)
            spent_ns = []
            for _ in range(count):
                begun_ns = now_ns()
                if not _receive(end, buffer[:size]):
                    return
                spent_ns.append(max(0, since(begun_ns)))
                end.sendall(b"\1")
            end.sendall(struct.pack(f"{count}Q", *spent_ns))


if __name__ == "__main__":
    die_with_parent()
    be_other_end(int(sys.argv[1]))
