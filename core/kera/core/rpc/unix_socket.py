"""Unix sockets on which daemons listen, and the users at the other end.

Only the daemon's own user may connect, unless the daemon says otherwise. A socket that no process serves any more is
replaced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
import tempfile
from pathlib import Path

from kera.core.base.address import UNIX_PATH_BYTES_MAX, reason_of
from kera.core.base.telemetry import get_logger
from kera.core.errors import PathNotWritable, PortTaken

log = get_logger("kera.rpc")

SHORT_DIRECTORY_NAME = "sockets"
"""The file, in a data directory whose path is too long, that names the directory of its sockets."""
_SHORT_PARENT = Path("/tmp")  # noqa: S108 - used if the directory for temporary files is too deep as well
_NAMES_BYTES_MAX = 40
"""Maximum length of the directory's own name and of a socket in it."""
OWN_USER, ANY_USER = 0o600, 0o666
"""Modes of a socket, which say who may connect."""
_CREDENTIALS = struct.Struct("3i")
"""The kernel's credentials: process, user, group."""


def unix_socket_path(data_dir: Path, name: str) -> Path:
    """Return the path of the unix socket of the daemon `name` with this data directory, which it has locked.

    A path that is too long for a socket is replaced by one in a temporary directory in which only this user can create
    files. The name of this directory cannot be guessed; the data directory records it. Raises `PathNotWritable`.
    """
    path = data_dir / f"{name}.sock"
    if len(bytes(path)) <= UNIX_PATH_BYTES_MAX:
        return path
    try:
        return _short_directory(data_dir / SHORT_DIRECTORY_NAME) / path.name
    except OSError as error:
        raise PathNotWritable(
            f"{path} is too long for a unix socket, and no directory can be made for a shorter one:"
            f" {reason_of(error)}; choose a shorter --data-dir",
            path=str(path),
        ) from error


def _short_directory(note: Path) -> Path:
    """Return the directory that the file `note` names; a new one if it is gone or not our own. Raises ``OSError``."""
    with contextlib.suppress(OSError, ValueError):
        directory = Path(note.read_text())
        status = directory.lstat()
        if (
            stat.S_ISDIR(status.st_mode)
            and status.st_uid == os.geteuid()
            and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        ):
            return directory
    is_deep = len(os.fsencode(tempfile.gettempdir())) > UNIX_PATH_BYTES_MAX - _NAMES_BYTES_MAX
    directory = Path(tempfile.mkdtemp(prefix="kera-", dir=_SHORT_PARENT if is_deep else None))
    directory.chmod(0o711)  # the mode of a socket says who may connect
    note.write_text(str(directory))
    return directory


def peer_user(sock: socket.socket) -> int:
    """Return the user id of the process that has connected."""
    return int(_CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1])


def bind_unix(path: Path, mode: int = OWN_USER) -> socket.socket:
    """Return a socket at `path` that does not listen yet.

    A socket that no process serves any more is replaced. Raises `PortTaken` if a process does, and `PathNotWritable`.
    """
    try:
        _remove_dead_socket(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if mode == ANY_USER:
                _warn_if_closed(path)
            sock.bind(str(path))
            path.chmod(mode)  # no one could connect before, as it does not listen yet
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise PathNotWritable(f"cannot listen on unix socket {path}: {reason_of(error)}", path=str(path)) from error
    return sock


def _warn_if_closed(path: Path) -> None:
    """Log a warning if other users cannot reach a socket that is for them."""
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
