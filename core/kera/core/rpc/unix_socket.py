"""Unix sockets that daemons listen on, and who is at the other end.

They are for the daemon's own user alone, unless it says otherwise, and take the place of those that nobody serves.
"""

from __future__ import annotations

import errno
import socket
import stat
import struct
from pathlib import Path

from kera.core.errors import PathNotWritable, PortTaken
from kera.core.rpc.address import reason_of
from kera.core.telemetry import get_logger

log = get_logger("kera.rpc")

OWN_USER, ANY_USER = 0o600, 0o666
"""Modes: who may connect."""
_CREDENTIALS = struct.Struct("3i")
"""Of the kernel: process, user, group."""


def peer_user(sock: socket.socket) -> int:
    """The user of the process that has connected."""
    return int(_CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1])


def bind_unix(path: Path, mode: int = OWN_USER) -> socket.socket:
    """A socket at `path`, that does not listen yet.

    One that nobody serves any more is replaced. Raises `PortTaken` if somebody does, and `PathNotWritable`.
    """
    try:
        _remove_dead_socket(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if mode == ANY_USER:
                _warn_if_closed(path)
            sock.bind(str(path))
            path.chmod(mode)  # nobody could connect before: it does not listen yet
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise PathNotWritable(f"cannot listen on unix socket {path}: {reason_of(error)}", path=str(path)) from error
    return sock


def _warn_if_closed(path: Path) -> None:
    """Say so if those for whom a socket is cannot get to it."""
    closed = [each for each in path.absolute().parents if not each.stat().st_mode & stat.S_IXOTH]
    if closed:
        log.warning(
            "other users cannot enter the directory of a socket that is for them: chmod o+x",
            path=str(path),
            directories=[str(each) for each in closed],
        )


def _remove_dead_socket(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise PathNotWritable(f"cannot listen on unix socket {path}: there is a file of another kind", path=str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        if probe.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT):
            raise PortTaken(f"another process listens on unix socket {path}", path=str(path))
    path.unlink(missing_ok=True)
