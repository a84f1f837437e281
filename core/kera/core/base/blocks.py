"""Blocks: the units in which files are written around the page cache (O_DIRECT).

All addresses, offsets and lengths of such a transfer are multiples of `BLOCK_BYTES`; the memory of an `mmap` is always
aligned so. The daemons decide what is written, and when it has to be durable.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

BLOCK_BYTES = 4096


class FileCalls(NamedTuple):
    """The calls of the operating system that change files, and decide what survives a loss of power.

    A simulation replaces them with those of a disk that fails, is full, or forgets data that was not synced.
    """

    open: Callable[..., int] = os.open
    close: Callable[[int], None] = os.close
    reserve: Callable[[int, int, int], None] = os.posix_fallocate
    read: Callable[..., int] = os.preadv
    write: Callable[..., int] = os.pwritev
    truncate: Callable[[int | Path, int], None] = os.truncate
    sync: Callable[[int], None] = os.fdatasync
    """Makes the content of a file durable, or the names in a directory."""
    rename: Callable[[Path, Path], None] = os.replace
    remove: Callable[[Path], None] = os.unlink
    lock: Callable[[int, int], None] = fcntl.flock


FILE_CALLS = FileCalls()


def block_floor(offset: int) -> int:
    """`offset` rounded down to a block."""
    return offset & -BLOCK_BYTES


def block_ceiling(offset: int) -> int:
    """`offset` rounded up to a block."""
    return (offset + BLOCK_BYTES - 1) & -BLOCK_BYTES


def direct_flag(directory: Path, calls: FileCalls = FILE_CALLS) -> int:
    """Return the flag with which to open files in an existing `directory` so that they bypass the page cache.

    The flag is 0 if the file system does not support that (tmpfs of an older kernel, some overlays): files then go
    through the page cache. Raises ``OSError`` if no file can be created there.
    """
    probe = directory / ".direct"
    try:
        calls.close(calls.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0
    finally:
        with contextlib.suppress(FileNotFoundError):
            calls.remove(probe)
    return os.O_DIRECT


def identity_of(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of the file at `path`; None: it does not exist, or cannot be examined."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def sync_directory(path: Path, calls: FileCalls = FILE_CALLS) -> None:
    """Make the names in a directory durable: its created, renamed and removed files. Raises ``OSError``."""
    fd = calls.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        calls.sync(fd)
    finally:
        calls.close(fd)
