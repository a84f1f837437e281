"""The disk, as the log needs it: files that are written in place and are durable when a call returns.

`LocalDisk` writes around the page cache (O_DIRECT) if the file system supports it: that is fast, takes little CPU time,
and does not evict other data from memory. O_DIRECT needs addresses, offsets and lengths that are multiples of
`BLOCK_BYTES`; slots of the arena are aligned like this anyway.

Everything here blocks, and is called on separate threads. Errors are those of the operating system (``OSError``); the
caller decides what they mean.
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
        """Create an empty file with reserved room, durably; create its directory if necessary."""
        ...

    def write(self, path: Path, offset: int, data: memoryview) -> None:
        """Write `data`, whole blocks, at `offset`; durable when this returns."""
        ...

    def overwrite(self, path: Path, data: memoryview) -> None:
        """Create or replace a file with `data`, whole blocks; durable when this returns, except for the file's name."""
        ...

    def move(self, path: Path, to: Path) -> None:
        """Rename a file durably, to a name that no file has; create its directory if necessary."""
        ...

    def read(self, path: Path, offset: int, into: memoryview) -> int:
        """Read into `into`, whole blocks, from `offset` on; return how many bytes were read."""
        ...

    def truncate(self, path: Path, length: int) -> None:
        """Cut a file to `length`."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file, if it exists. A loss of power may bring it back."""
        ...

    def sync_removals(self, paths: Iterable[Path]) -> None:
        """Make durable that these files were removed."""
        ...

    def names(self, path: Path) -> list[str]:
        """Return the names in a directory; none if it does not exist."""
        ...

    def length(self, path: Path) -> int:
        """Return the length of a file, in bytes."""
        ...

    def modified_us(self, path: Path) -> int:
        """Return when a file was last written to, in microseconds since the Unix epoch."""
        ...


class LocalDisk:
    """The disk of a real file system."""

    def __init__(self, root: Path, calls: FileCalls = FILE_CALLS) -> None:
        """Find out whether the file system of `root`, which must exist, supports O_DIRECT."""
        self.direct = direct_flag(root, calls)
        self._calls = calls

    def create(self, path: Path, reserve_bytes: int) -> None:
        """See `Disk`."""
        self._make_directory(path.parent)
        fd = self._calls.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            if reserve_bytes:
                self._calls.reserve(fd, 0, reserve_bytes)  # so a full disk shows here, not in the middle of a write
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
