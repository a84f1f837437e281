"""The coordinator's data directory, and the lock that makes it one coordinator's."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from kera.core.data_dir import refuse_others
from kera.core.errors import PathNotWritable, StartError
from kera.core.home import expanded
from kera.core.settings import setting


class DataDirInUse(StartError):
    """Another coordinator, which is running, has the data directory."""

    code = "data_dir_in_use"


class DataDir:
    """A directory that exists, can be written, and is locked until `close` or the end of the process.

    Raises `InvalidSettings`, `PathNotWritable`, `DataDirInUse`, or `StartError` when it is a broker's or a backup's.
    """

    def __init__(self, path: Path) -> None:
        with setting("data_dir"):
            self.path = expanded(path).absolute()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise PathNotWritable(
                f"cannot write data directory {self.path}: {error.strerror}; choose another --data-dir",
                path=str(self.path),
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            role, _, holder = os.pread(self._lock, 40, 0).decode(errors="replace").strip().rpartition(" ")
            os.close(self._lock)
            raise DataDirInUse(
                f"{f'a {role}' if role else 'another coordinator'} (process {holder or 'unknown'}) uses data directory"
                f" {self.path}; stop it, or choose another --data-dir",
                path=str(self.path),
            ) from error
        try:
            refuse_others(self.path, "coordinator")
        except StartError:
            os.close(self._lock)
            raise
        with contextlib.suppress(OSError):  # for the message above; a full disk is told where it matters
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)
