"""What happened, line by line: for people when a run has failed, and for comparing two runs of one seed."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections import deque
from collections.abc import Callable

LINES_KEPT = 20_000
_MARK = struct.Struct("<dQQH")


class Trace:
    """Lines with their times. All count for the digest; the last ones are kept."""

    def __init__(self, now_s: Callable[[], float], lines_kept: int = LINES_KEPT) -> None:
        self._now_s = now_s
        self._digest = hashlib.blake2b(digest_size=16)
        self.lines: deque[str] = deque(maxlen=lines_kept)
        self.count = 0

    def note(self, who: str, what: str) -> None:
        """Somebody has done something that a reader of the trace wants to know."""
        line = f"{self._now_s():12.6f}  {who:<14} {what}"
        self.lines.append(line)
        self.count += 1
        self._digest.update(line.encode())

    def mark(self, serial: int, data: bytes) -> None:
        """An end of a connection got this. It only counts for the digest: there is too much of it to read."""
        # Maps in messages are in any order, so the order of bytes does not count: the lower half is their sum.
        self._digest.update(_MARK.pack(self._now_s(), serial, len(data), zlib.adler32(data) & 0xFFFF))

    @property
    def digest(self) -> str:
        """Of everything, from the beginning on."""
        return self._digest.hexdigest()
