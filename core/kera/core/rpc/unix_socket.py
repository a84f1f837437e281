"""Unix sockets that daemons listen on, and who is at the other end.

They are for the daemon's own user alone, unless it says otherwise, and take the place of those that nobody serves.
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
"""In a data directory whose path is too long: the file that names the directory of its sockets."""
_SHORT_PARENT = Path("/tmp")  # noqa: S108 - where the directory for temporary files is deep as well
_NAMES_BYTES_MAX = 40
"""Length of the directory's own name and of a socket in it."""
OWN_USER, ANY_USER = 0o600, 0o666
"""Modes: who may connect."""
_CREDENTIALS = struct.Struct("3i")
"""The kernel's credentials: process, user, group."""


def unix_socket_path(data_dir: Path, name: str) -> Path:
    """Where the daemon `name` with this data directory, which it has locked, has its unix socket.

    A path that is too long for a socket is replaced by one in a directory among the temporary files, in which only this
    user can make files. Its name cannot be guessed; the data directory keeps it. Raises `PathNotWritable`.
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
    """The directory that the file `note` names; a new one if that is gone, or not our own. Raises ``OSError``."""
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
