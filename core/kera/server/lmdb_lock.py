"""Creates the lock file of an LMDB database with its disk space: LMDB itself maps it without reserving space."""

from __future__ import annotations

import os
from pathlib import Path


def reserve_lock(path: Path, length_bytes: int) -> None:
    """Reserve disk space for the lock file at `path`: on a full disk its first access would kill the process.

    Raises ``OSError`` if there is no space.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, length_bytes)
    finally:
        os.close(fd)
