"""The directory of one local cluster, which only one supervisor at a time may use.

A supervisor holds a lock on the file ``.lock`` in it for as long as it lives; the lock is a ``flock``, which ends with
the process, however that ends. A second cluster in the same directory is refused. A temporary directory whose lock is
free belonged to a killed supervisor, and is removed when the next temporary directory is made.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from kera.core.base.own_directory import others_in
from kera.core.base.own_file import open_own_directory
from kera.core.errors import PathNotWritable, StartError

_PREFIX = "kera-local-"
_LOCK = ".lock"


class DirectoryInUse(StartError):
    """Another local cluster runs in the directory; stop it or choose another."""

    code = "directory_in_use"


class ClusterDirectory:
    """A directory with our lock on it. `release` gives the lock back, and removes a temporary directory."""

    def __init__(self, path: Path, lock_fd: int, *, temporary: bool) -> None:
        self.path = path
        self.temporary = temporary
        self._lock_fd = lock_fd

    @classmethod
    def open(cls, path: Path) -> ClusterDirectory:
        """Lock `path`, and make it if it does not exist.

        Raises `DirectoryInUse`, `PathNotWritable`, and `StartError` when it is the data directory of one daemon: the
        daemons of a cluster have subdirectories.
        """
        path = path.absolute()
        if owner := others_in(path):
            raise StartError(
                f"{path} has the data of {owner}; choose the directory that holds the directories of all daemons",
                path=str(path),
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            fd = _locked(path / _LOCK)
        except BlockingIOError as error:
            message = f"another local cluster uses {path}; stop it or choose another directory"
            raise DirectoryInUse(message, path=str(path)) from error
        except OSError as error:
            raise PathNotWritable(
                f"cannot use {path}: {error.strerror}; choose another directory", path=str(path)
            ) from error
        return cls(path, fd, temporary=False)

    @classmethod
    def make_temporary(cls, parent: Path | None = None) -> ClusterDirectory:
        """Make a directory that `release` removes; also remove the directories of killed supervisors.

        Raises `PathNotWritable`.
        """
        try:
            remove_abandoned(parent)
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            # The lock file gets its name once it is locked, so that another process never takes it for abandoned.
            unnamed = path / (_LOCK + ".new")
            fd = _locked(unnamed)
            unnamed.rename(path / _LOCK)
        except OSError as error:
            raise PathNotWritable(
                f"cannot make a temporary directory: {error.strerror}; the variable TMPDIR can name another place"
            ) from error
        return cls(path, fd, temporary=True)

    def release(self) -> None:
        """Remove the directory if it is temporary, and release the lock. May be called again."""
        if self._lock_fd < 0:
            return
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)
        self._lock_fd = -1


def remove_abandoned(parent: Path | None = None) -> list[Path]:
    """Remove this user's temporary cluster directories whose supervisor is gone; return the removed paths."""
    removed = []
    for path in Path(parent or tempfile.gettempdir()).glob(_PREFIX + "*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            directory = open_own_directory(path)  # other users may have made a link to a directory of ours
            stack.callback(os.close, directory)
            fd = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error if its supervisor lives
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _locked(path: Path) -> int:
    """Open and lock a file; return its descriptor. Raises `OSError`: `BlockingIOError` if another process locks it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd
