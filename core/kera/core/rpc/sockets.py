"""Options of every socket: how much of a frame fits into the kernel's buffer, and when a silent peer is given up.

A network that drops packets tells nobody. By itself TCP sends again what was not acknowledged at growing intervals, up
to two minutes, so that a connection which was cut for a minute stands still for almost another; and one on which
nothing is being sent is kept for ever. So each end asks the other for a sign of life, and gives it up when there is
none. It is the kernels that ask and answer: a daemon that is busy, or stopped, is still there.

The two ends differ in how much depends on it. Who has called waits for an answer, and finds another way within
seconds. Who serves only wants to get rid of clients that are gone, and would not lose one over a short pause.

What is not acknowledged counts as silence, and so does a peer that takes nothing: a client that does not read its
answers for `SERVER.silent_ms` is disconnected, and a caller gives up a daemon that takes nothing of a request for
`CALLER.silent_ms`; both connect again, and requests that are sent again are carried out once.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_DESCRIPTORS = Path("/proc/self/fd")
_MAPPED = "::ffff:"
"""With which an IPv4 address begins on a socket of IPv6."""

UNIX_SEND_BUFFER_BYTES = 2 << 20


class Patience(NamedTuple):
    """How long a connection over TCP may be without a sign of its peer."""

    idle_s: int
    """Without traffic, until the kernel asks the peer whether it is there."""
    interval_s: int
    """Until it asks again."""
    silent_ms: int
    """Without an answer, or without an acknowledgement of what was sent; then the connection is closed."""


CALLER = Patience(idle_s=1, interval_s=1, silent_ms=3_000)
"""The patience of a client, or of a daemon that calls another one."""
SERVER = Patience(idle_s=15, interval_s=5, silent_ms=30_000)
"""The patience of a daemon that is called. A client that has vanished is forgotten within `silent_ms` and an
interval."""


def tune(sock: socket.socket, patience: Patience) -> None:
    """Set a connection up, over TCP or a unix socket.

    A frame should mostly fit into the kernel's buffer. A unix socket has 208 KiB by default, and does not grow as TCP
    does: of a request of 1 MiB most would wait for the reader, piece by piece. The kernel grants what it allows
    (``net.core.wmem_max``).
    """
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_SEND_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, patience.idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, patience.interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, patience.silent_ms // (1000 * patience.interval_s))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience.silent_ms)


def shut_down(host: str, port: int) -> bool:
    """End this process's connection with a peer, whoever serves it; False if it is not found.

    For connections that a library keeps to itself. It learns of the end as if the peer had ended it. Looks at all
    descriptors, which takes a while when there are thousands.
    """
    for sock in copies_of_sockets():
        with contextlib.suppress(OSError, ValueError):
            peer_host, peer_port, *_ = sock.getpeername()
            if (peer_host.removeprefix(_MAPPED), peer_port) == (host, port):
                sock.shutdown(socket.SHUT_RDWR)
                return True
    return False


def open_descriptors() -> int:
    """The number of open descriptors of this process, of all kinds."""
    return sum(1 for _ in _DESCRIPTORS.iterdir()) if _DESCRIPTORS.exists() else 0


def copies_of_sockets() -> Iterator[socket.socket]:
    """Copies of all sockets of this process, each open until the next one is asked for.

    With descriptors of our own: a library may close its own at any time, and another one get its number.
    """
    for link in _DESCRIPTORS.iterdir() if _DESCRIPTORS.exists() else ():
        with contextlib.suppress(OSError, ValueError):
            sock = _copy_of(int(link.name))
            try:
                yield sock
            finally:
                sock.close()


def _copy_of(descriptor: int) -> socket.socket:
    """Raises ``OSError`` if it is none of a socket."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
