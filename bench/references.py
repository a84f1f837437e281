"""The speed of this machine at this minute without KerA, for the regression gate's ratios.

Each takes a second or less. The other end of a socket is a process of its own, as a broker is:
``python -m bench.references {sink,echo} FD``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from kera.core.base.process import die_with_parent
from kera.core.base.settings import KIB, MIB

COPY_BYTES = 64 * MIB
WRITE_BYTES = 256 * KIB
PING_BYTES = 256
"""Approximately the size of a request with one record of 100 bytes."""


def copy_s_per_gb(seconds: float = 0.5) -> float:
    """Processor time for copying large blocks; other load counts as little as in our own measurements."""
    source, target = b"\1" * COPY_BYTES, memoryview(bytearray(COPY_BYTES))
    target[:] = source
    begun_s, copies = time.process_time(), 0
    while time.process_time() - begun_s < seconds:
        target[:] = source
        copies += 1
    return (time.process_time() - begun_s) / (copies * COPY_BYTES / 1e9)


def socket_mb_per_s(seconds: float = 1.0) -> float:
    """Send bytes through a unix socket to another process, which discards them."""
    block = b"\1" * WRITE_BYTES
    with _other_end("sink") as (ours, _):
        begun_s, sent = time.perf_counter(), 0
        while time.perf_counter() - begun_s < seconds:
            ours.sendall(block)
            sent += WRITE_BYTES
        ours.shutdown(socket.SHUT_WR)
        ours.recv(1)  # everything has arrived
        return sent / 1e6 / (time.perf_counter() - begun_s)


def ping_ms(rate: float = 1000.0, seconds: float = 1.0) -> float:
    """The median of a round trip to another process over a unix socket, at a rate at which both sleep in between.

    Each process has a core of its own, if there are two: on one core it takes a quarter, and the kernel varies its
    choice.
    """
    times_s = []
    with _other_end("echo") as (ours, pid), _apart_from(pid):
        next_s = time.perf_counter()
        end_s = next_s + seconds
        while (now_s := time.perf_counter()) < end_s:
            if now_s < next_s:
                time.sleep(next_s - now_s)
            begun_s = time.perf_counter()
            ours.sendall(b"\1" * PING_BYTES)
            _receive(ours, PING_BYTES)
            times_s.append(time.perf_counter() - begun_s)
            next_s += 1 / rate
    return statistics.median(times_s) * 1e3


def append_m_per_s(seconds: float = 0.5) -> float:
    """Million calls of a function that appends to a list, per second of processor time: the least cost of a call for
    each record.
    """
    kept: list[bytes] = []
    value = b"\1" * 100

    def send(value: bytes) -> None:
        kept.append(value)

    begun_s, calls = time.process_time(), 0
    while time.process_time() - begun_s < seconds:
        for _ in range(10_000):
            send(value)
        calls += 10_000
        kept.clear()
    return calls / 1e6 / (time.process_time() - begun_s)


@contextlib.contextmanager
def _apart_from(pid: int) -> Iterator[None]:
    """Bind this thread to one core, and that process to another."""
    allowed = os.sched_getaffinity(0)
    first, *_, last = sorted(allowed) * 2
    os.sched_setaffinity(pid, {last})
    os.sched_setaffinity(0, {first})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@contextlib.contextmanager
def _other_end(what: str) -> Iterator[tuple[socket.socket, int]]:
    """A socket whose other end belongs to a new process that has started; and the id of that process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours:
        with theirs:
            argv = [sys.executable, "-m", "bench.references", what, str(theirs.fileno())]
            process = subprocess.Popen(argv, pass_fds=[theirs.fileno()])
        try:
            ours.recv(1)
            yield ours, process.pid
        finally:
            ours.close()
            process.kill()
            process.wait()


def _receive(end: socket.socket, size: int) -> bool:
    """Receive `size` bytes; False at the end."""
    while size:
        found = len(end.recv(size))
        if not found:
            return False
        size -= found
    return True


def main() -> int:
    """Be the other end."""
    die_with_parent()
    what, descriptor = sys.argv[1:]
    buffer = bytearray(MIB)
    with socket.socket(fileno=int(descriptor)) as end:
        end.sendall(b"\1")
        if what == "sink":
            while end.recv_into(buffer):
                pass
            end.sendall(b"\1")
        else:
            while _receive(end, PING_BYTES):
                end.sendall(b"\1" * PING_BYTES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
