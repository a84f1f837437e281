"""The disk, as the log needs it: files that are written in place and are durable when a call returns.

`LocalDisk` writes around the page cache (O_DIRECT) where the file system can: fast, with next to no CPU time, and
without pushing other data out of memory. All addresses, offsets and lengths are multiples of `BLOCK_BYTES`, as that
asks for; slots of the arena are so by themselves.

Everything here blocks, and is called from threads of its own. Errors are those of the operating system (``OSError``):
what they mean is decided by the caller.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from kera.core.base.blocks import (
    BLOCK_BYTES,
    FILE_CALLS,
    FileCalls,
    block_ceiling,
    block_floor,
    direct_flag,
    sync_directory,
)

__all__ = ["BLOCK_BYTES", "Disk", "LocalDisk", "block_ceiling", "block_floor"]


class Disk(Protocol):
    """The file operations of the log. Simulations implement them with errors, torn writes and crashes."""

    def create(self, path: Path, reserve_bytes: int) -> None:
        """Make an empty file, in a directory made if need be, with room reserved; durable."""
        ...

    def write(self, path: Path, offset: int, data: memoryview) -> None:
        """Write `data`, whole blocks, at `offset`; durable when this returns."""
        ...

    def overwrite(self, path: Path, data: memoryview) -> None:
        """Make a file of `data`, whole blocks, or one consist of it; durable but for its name when this returns."""
        ...

    def move(self, path: Path, to: Path) -> None:
        """Give a file another name, which no other has, in a directory made if need be; durable."""
        ...

    def read(self, path: Path, offset: int, into: memoryview) -> int:
        """Read into `into`, whole blocks, from `offset` on; returns how many bytes there were."""
        ...

    def truncate(self, path: Path, length: int) -> None:
        """Give back what is behind `length`."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file; one that is not there is removed already. A loss of power may bring it back."""
        ...

    def sync_removals(self, paths: Iterable[Path]) -> None:
        """Make durable that these files were removed."""
        ...

    def names(self, path: Path) -> list[str]:
        """The names in a directory; none in one that does not exist."""
        ...

    def length(self, path: Path) -> int:
        """The length of a file, in bytes."""
        ...

    def modified_us(self, path: Path) -> int:
        """When a file was written to last, in microseconds since the Unix epoch."""
        ...


class LocalDisk:
    """The real one."""

    def __init__(self, root: Path, calls: FileCalls = FILE_CALLS) -> None:
        """Find out whether the file system of `root`, which exists, writes around the page cache."""
        self.direct = direct_flag(root, calls)
        self._calls = calls

    def create(self, path: Path, reserve_bytes: int) -> None:
        """See `Disk`."""
        self._make_directory(path.parent)
        fd = self._calls.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            if reserve_bytes:
                self._calls.reserve(fd, 0, reserve_bytes)  # a full disk shows here, and not in the middle of a write
        except OSError:
            self.remove(path)
            raise
        finally:
            self._calls.close(fd)
        sync_directory(path.parent, self._calls)

    def write(self, path: Path, offset: int, data: memoryview) -> None:
        """See `Disk`."""
        fd = self._calls.open(path, os.O_RDWR | os.O_CLOEXEC | self.direct)
        try:
            written = 0
            while written < len(data):
                count = self._calls.write(fd, [data[written:]], offset + written, os.RWF_DSYNC)
                if count % BLOCK_BYTES and self.direct:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                written += count
        finally:
            self._calls.close(fd)

    def overwrite(self, path: Path, data: memoryview) -> None:
        """See `Disk`."""
        self._make_directory(path.parent)
        fd = self._calls.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            length = os.fstat(fd).st_size
            if length < len(data):
                self._calls.reserve(fd, 0, len(data))
            elif length > len(data):
                self._calls.truncate(fd, len(data))
                self._calls.sync(fd)
        finally:
            self._calls.close(fd)
        self.write(path, 0, data)

    def move(self, path: Path, to: Path) -> None:
        """See `Disk`."""
        self._make_directory(to.parent)
        self._calls.rename(path, to)
        sync_directory(to.parent, self._calls)
        sync_directory(path.parent, self._calls)

    def read(self, path: Path, offset: int, into: memoryview) -> int:
        """See `Disk`."""
        fd = self._calls.open(path, os.O_RDONLY | os.O_CLOEXEC | self.direct)
        try:
            done = 0
            while done < len(into):
                count = self._calls.read(fd, [into[done:]], offset + done)
                done += count
                if count == 0 or count % BLOCK_BYTES:
                    break
            return done
        finally:
            self._calls.close(fd)

    def truncate(self, path: Path, length: int) -> None:
        """See `Disk`."""
        self._calls.truncate(path, length)

    def remove(self, path: Path) -> None:
        """See `Disk`."""
        with contextlib.suppress(FileNotFoundError):
            self._calls.remove(path)

    def sync_removals(self, paths: Iterable[Path]) -> None:
        """See `Disk`."""
        for directory in sorted({path.parent for path in paths}):
            with contextlib.suppress(FileNotFoundError):
                sync_directory(directory, self._calls)

    def names(self, path: Path) -> list[str]:
        """See `Disk`."""
        try:
            return sorted(os.listdir(path))  # noqa: PTH208 - names are all that is wanted
        except FileNotFoundError:
            return []

    def modified_us(self, path: Path) -> int:
        """See `Disk`."""
        return path.stat().st_mtime_ns // 1000

    def length(self, path: Path) -> int:
        """See `Disk`."""
        return path.stat().st_size

    def _make_directory(self, path: Path) -> None:
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            sync_directory(path.parent, self._calls)
