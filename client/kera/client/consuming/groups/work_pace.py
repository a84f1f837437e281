"""How fast a caller processes what it gets, and how much of a group of segments a consumer keeps by that.

Each part of a group costs requests, so a part must take long enough to process; and it must not take so long that the
other consumers wait. Only the time in the caller's code counts, not the time in which it waits for records: sharing
helps where processing is what takes long.
"""

from __future__ import annotations

from kera.core.base.settings import MIB

PART_MIN_S = 0.1
"""A part takes at least this long, up to `LARGEST` times the size that the coordinator has asked for."""
PART_MAX_S = 1.0
"""A part of the size that the coordinator has asked for takes at most this long; a slower caller keeps less."""
LARGEST = 8
RECENT_S = 1.0
RECENT_BYTES = 64 * MIB
"""Work that is older than this time, or than this number of bytes, counts less and less."""


class WorkPace:
    """The pace of one caller."""

    def __init__(self) -> None:
        self._processed_bytes = 0
        """In all."""
        self._worked_s = 0.0
        """Likewise."""
        self._recent_bytes = 0.0
        self._recent_s = 0.0

    def processed(self, total_bytes: int, worked_s: float) -> None:
        """The caller has processed so many bytes in all, and has worked for so many seconds in all."""
        more_bytes, more_s = total_bytes - self._processed_bytes, worked_s - self._worked_s
        self._processed_bytes, self._worked_s = total_bytes, worked_s
        if more_bytes <= 0:  # it did something else
            return
        self._recent_bytes += more_bytes
        self._recent_s += more_s
        while self._recent_s > RECENT_S or self._recent_bytes > RECENT_BYTES:
            self._recent_bytes /= 2
            self._recent_s /= 2

    def part_bytes(self, asked_bytes: int) -> int:
        """How much to keep of a group when the coordinator asks to keep `asked_bytes`; 0 stays 0."""
        if not asked_bytes or not self._recent_bytes:
            return asked_bytes
        bytes_per_s = self._recent_bytes / max(self._recent_s, 1e-6)
        slow = min(asked_bytes, int(bytes_per_s * PART_MAX_S))
        fast = min(asked_bytes * LARGEST, int(bytes_per_s * PART_MIN_S))
        return max(1, slow, fast)
