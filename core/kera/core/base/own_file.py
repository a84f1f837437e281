"""Files found by name in a directory that other users may write to, such as ``/dev/shm`` and ``/tmp``.

Anybody can put a file, a link or a pipe there under a name that we look for. `open_own` opens a regular file that only
this user could have made and that no other user can open. It never follows a link and never waits for the other end of
a pipe. The caller decides what to do about a file that it refuses.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFREG: "a file",
}


def why_not_own(status: os.stat_result, kind: int = stat.S_IFREG, user: int | None = None) -> str:
    """Return why a file cannot be trusted to be this user's own; empty if it can.

    `kind`: the type that it must have, such as ``S_IFREG``. `user`: another user, who must own it instead.
    """
    found = stat.S_IFMT(status.st_mode)
    if found != kind:
        return f"it is {_KINDS.get(found, 'a device')}, not {_KINDS[kind]}"
    if status.st_uid != (os.geteuid() if user is None else user):
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & _OTHERS:
        return f"other users have access to it (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def open_own(path: Path, flags: int = os.O_RDONLY, *, user: int | None = None) -> int:
    """Open a regular file that is this user's own, or another `user`'s own, and return its descriptor.

    Raises `OSError`: `PermissionError`, with the reason in words, if it is anything else.
    """
    _refuse(path, path.lstat(), user=user)  # before opening it, as opening a device or a pipe has side effects
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse(path, os.fstat(fd), user=user)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_own_directory(path: Path) -> int:
    """Open a directory that is this user's own and that no other user can enter. Raises `OSError`, as `open_own`."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _refuse(path, os.fstat(fd), stat.S_IFDIR)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refuse(path: Path, status: os.stat_result, kind: int = stat.S_IFREG, user: int | None = None) -> None:
    reason = why_not_own(status, kind, user)
    if reason:
        raise PermissionError(errno.EPERM, reason, str(path))
