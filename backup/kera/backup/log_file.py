"""The file of a backup on one disk, in blocks: written and read around the page cache, and durable after `sync`.

All offsets, lengths and addresses of memory are multiples of a block. All calls block, so they are made on threads;
errors are those of the operating system (``OSError``).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from kera.core.base.blocks import BLOCK_BYTES, FILE_CALLS, FileCalls, direct_flag, identity_of, sync_directory
from kera.core.errors import StartError

NAME = "replicas.log"
_PUNCH_HOLE, _KEEP_SIZE = 2, 1
_NO_PUNCHING = {errno.EOPNOTSUPP, errno.ENOSYS}
_libc_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_libc_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def _punch_hole(fd: int, offset: int, length: int) -> None:
    if _libc_fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class BlockDisk(Protocol):
    """The disk operations of the backup. Simulations implement them with errors, torn writes and loss of power."""

    name: str
    """For people: the path of the file."""

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        """Write `pieces` one behind the other; they are durable after a `sync` that begins later."""
        ...

    def sync(self) -> None:
        """Make all writes and punches durable."""
        ...

    def read(self, offset: int, into: memoryview) -> int:
        """Read into `into`; return how many bytes were read."""
        ...

    def punch(self, offset: int, length: int) -> None:
        """Release space, if the file system supports that; it then reads as zeros."""
        ...

    def next_data(self, offset: int) -> int | None:
        """Return the first offset from `offset` on that may have data; None: there are no more data."""
        ...

    def free_bytes(self) -> int:
        """Return the free space of the file system."""
        ...

    def total_bytes(self) -> int:
        """Return the size of the file system."""
        ...


class LogFile:
    """The real file."""

    def __init__(
        self,
        directory: Path,
        *,
        direct: bool = True,
        calls: FileCalls = FILE_CALLS,
        punch_hole: Callable[[int, int, int], None] = _punch_hole,
    ) -> None:
        """Open the file in `directory`, for this process alone; create both if need be.

        `direct`: bypass the page cache, if the file system supports that.

        Raises ``OSError``, and `StartError` if another backup has the file open.
        """
        missing = [each for each in (directory, *directory.parents) if not each.is_dir()]
        directory.mkdir(parents=True, exist_ok=True)
        for each in missing:
            sync_directory(each.parent, calls)
        path = directory / NAME
        self.name = str(path)
        self._calls, self._punch_hole = calls, punch_hole
        self._direct = direct_flag(directory, calls) if direct else 0
        self._fd = calls.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | self._direct, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            calls.close(self._fd)
            raise StartError(f"another backup uses {path}; choose another --log-dirs", path=str(path)) from error
        sync_directory(directory, calls)
        self._path, self._identity = path, identity_of(path)

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        """See `BlockDisk`."""
        left = list(pieces)
        while left:
            count = self._calls.write(self._fd, left, offset)
            if count % BLOCK_BYTES and self._direct:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.name)
            offset += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def sync(self) -> None:
        """See `BlockDisk`."""
        if identity_of(self._path) != self._identity:  # a file without a name is lost when the process ends
            problem = "removed or replaced while the backup runs; put it back, or restart the backup"
            raise OSError(errno.ESTALE, problem, self.name)
        self._calls.sync(self._fd)

    def read(self, offset: int, into: memoryview) -> int:
        """See `BlockDisk`."""
        done = 0
        while done < len(into):
            count = self._calls.read(self._fd, [into[done:]], offset + done)
            done += count
            if count == 0 or count % BLOCK_BYTES:
                break
        return done

    def punch(self, offset: int, length: int) -> None:
        """See `BlockDisk`."""
        try:
            self._punch_hole(self._fd, offset, length)
        except OSError as error:
            if error.errno not in _NO_PUNCHING:
                raise OSError(error.errno, error.strerror, self.name) from error

    def next_data(self, offset: int) -> int | None:
        """See `BlockDisk`."""
        try:
            return os.lseek(self._fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            raise

    def free_bytes(self) -> int:
        """See `BlockDisk`."""
        state = os.fstatvfs(self._fd)
        return state.f_bavail * state.f_frsize

    def total_bytes(self) -> int:
        """See `BlockDisk`."""
        state = os.fstatvfs(self._fd)
        return state.f_blocks * state.f_frsize

    def close(self) -> None:
        """Close the file."""
        self._calls.close(self._fd)


def aligned(length: int) -> memoryview:
    """Return zeroed memory that is aligned to blocks."""
    return memoryview(mmap.mmap(-1, length))
