"""Options of every socket: the size of the kernel's buffer, and when a silent peer is given up.

Neither end notices a network that drops packets. By default TCP retransmits unacknowledged data at growing intervals,
up to two minutes, so that a connection which was cut for a minute stands still for almost another one; and a connection
on which nothing is being sent is kept for ever. So each end probes the other, and gives it up if there is no reply. The
kernels send and answer the probes, so a daemon that is busy or stopped still counts as alive.

The two ends need different patience. A caller waits for an answer, and wants to find another way within seconds. A
server only wants to get rid of clients that are gone, and should not lose a client because of a short pause.

Unacknowledged data count as silence, and so does a peer that reads nothing: a client that does not read its answers for
`SERVER.silent_ms` is disconnected, and a caller gives up a daemon that reads nothing of a request for
`CALLER.silent_ms`. Both connect again, and requests that are sent again are carried out once.
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
"""The prefix of an IPv4 address on an IPv6 socket."""

UNIX_SEND_BUFFER_BYTES = 2 << 20


class Patience(NamedTuple):
    """How long a TCP connection may last without a sign of its peer."""

    idle_s: int
    """Time without traffic until the kernel probes the peer."""
    interval_s: int
    """Time between two probes."""
    silent_ms: int
    """Time without an answer to probes, or an acknowledgement of sent data, after which the connection is closed."""


CALLER = Patience(idle_s=1, interval_s=1, silent_ms=3_000)
"""The patience of a client, or of a daemon that calls another one."""
SERVER = Patience(idle_s=15, interval_s=5, silent_ms=30_000)
"""The patience of a daemon that is called. A client that has vanished is forgotten within `silent_ms` and an
interval."""


def tune(sock: socket.socket, patience: Patience) -> None:
    """Set the options of a connection, over TCP or a unix socket.

    Most frames should fit into the kernel's buffer. That of a unix socket has 208 KiB by default, and does not grow as
    in TCP: most of a request of 1 MiB would wait for the reader, piece by piece. The kernel may grant less than asked
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
    """End this process's connection with a peer, whatever library serves it; False if it is not found.

    This is for connections to which a library gives no access. To the library, the peer seems to have ended it. It
    looks at all descriptors, which takes a while when there are thousands.
    """
    for sock in copies_of_sockets():
        with contextlib.suppress(OSError, ValueError):
            peer_host, peer_port, *_ = sock.getpeername()
            if (peer_host.removeprefix(_MAPPED), peer_port) == (host, port):
                sock.shutdown(socket.SHUT_RDWR)
                return True
    return False


def open_descriptors() -> int:
    """Return the number of open descriptors of this process, of all kinds."""
    return sum(1 for _ in _DESCRIPTORS.iterdir()) if _DESCRIPTORS.exists() else 0


def copies_of_sockets() -> Iterator[socket.socket]:
    """Yield copies of all sockets of this process, each open until the next iteration.

    They have separate descriptors, since a library may close its own at any time, and another file may get the number.
    """
    for link in _DESCRIPTORS.iterdir() if _DESCRIPTORS.exists() else ():
        with contextlib.suppress(OSError, ValueError):
            sock = _copy_of(int(link.name))
            try:
                yield sock
            finally:
                sock.close()


def _copy_of(descriptor: int) -> socket.socket:
    """Return a copy of a socket. Raises ``OSError`` if the descriptor is not a socket."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
