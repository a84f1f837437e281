"""The events of a run, line by line: for people after a failure, and for comparing two runs of a seed."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections import deque
from collections.abc import Callable

LINES_KEPT = 20_000
_MARK = struct.Struct("<dQQH")


class Trace:
    """Lines with their times. The digest covers all of them; only the last ones are kept."""

    def __init__(self, now_s: Callable[[], float], lines_kept: int = LINES_KEPT) -> None:
        self._now_s = now_s
        self._digest = hashlib.blake2b(digest_size=16)
        self.lines: deque[str] = deque(maxlen=lines_kept)
        self.count = 0

    def note(self, who: str, what: str) -> None:
        """Add an event that is interesting for a reader of the trace."""
        line = f"{self._now_s():12.6f}  {who:<14} {what}"
        self.lines.append(line)
        self.count += 1
        self._digest.update(line.encode())

    def mark(self, serial: int, data: bytes) -> None:
        """An end of a connection got `data`. It is only in the digest, because it is too much to read."""
        # Maps in messages have any order, so the digest ignores the order of bytes: the lower half is their sum.
        self._digest.update(_MARK.pack(self._now_s(), serial, len(data), zlib.adler32(data) & 0xFFFF))

    @property
    def digest(self) -> str:
        """The digest of all events since the beginning."""
        return self._digest.hexdigest()
