"""Whether the disk can be written to. After an error, writers are refused until a retry succeeds."""

from __future__ import annotations

import errno
from pathlib import Path

from kera.broker.storage.jobs import RETRY_MS
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger
from kera.core.errors import DiskFull

log = get_logger("kera.persistence")


class DiskHealth:
    """Refuses writers after an error of the disk or when it is full, and allows the next attempt after some time."""

    def __init__(self, directory: Path) -> None:
        """`directory`: the directory of the log."""
        self._directory = directory
        self._retry_ms = 0
        self._failing = Repeated(log)
        self.error: OSError | None = None
        """Why nothing can be written; None: writes succeed."""

    def may_write(self, now_ms: int) -> bool:
        """Whether a write may be tried."""
        return self.error is None or now_ms >= self._retry_ms

    def works(self) -> None:
        """Note that a write has succeeded."""
        self._failing.over("the disk takes data again")
        self.error = None

    def fails(self, error: OSError, now_ms: int) -> None:
        """Note that a write has failed."""
        self._failing.goes_on("cannot write the log; retrying", level="error", error=str(error), retry_ms=RETRY_MS)
        self.error = error
        self._retry_ms = now_ms + RETRY_MS

    def forget_error(self, now_ms: int) -> None:
        """Forget the error, once a retry is due: no data waits for it, and the next write shows the disk's state."""
        if now_ms >= self._retry_ms:
            self.error = None

    def check(self) -> None:
        """Raise `DiskFull` if nothing can be written: chunks that have to be persisted are refused before an append."""
        if self.error is not None:
            raise self.full(self.error)

    def full(self, error: OSError) -> DiskFull:
        """Return the error for writers while the disk takes nothing."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = f"has no room; make room for {self._directory}, or delete or truncate streams, and writing resumes"
        elif error.errno == errno.EROFS:
            what = (
                f"is read-only ({error}); the kernel's log says why: stop the broker, repair the file system of"
                f" {self._directory}, mount it writable, and start the broker again"
            )
        else:
            what = f"fails ({error}); the kernel's log may say why: writing resumes when {self._directory} works"
        return DiskFull(
            f"the broker's disk {what}",
            path=str(error.filename or self._directory),
            errno=error.errno,
        )
