"""The lock file of an LMDB database, made before LMDB makes it: that maps it without room for it."""

from __future__ import annotations

import os
from pathlib import Path


def reserve_lock(path: Path, length_bytes: int) -> None:
    """Have room for the lock file at `path`: on a full disk the first access to it would kill the process.

    Raises ``OSError`` if there is none.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, length_bytes)
    finally:
        os.close(fd)
