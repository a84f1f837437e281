"""Measures how fast a caller processes records, and decides how much of a group of segments a consumer keeps.

Each part of a group costs requests, so a part must take long enough to process; and it must not take so long that the
other consumers wait. Only the time in the caller's code counts, not its waiting time for records: sharing
helps when processing takes longest.
"""

from __future__ import annotations

from kera.core.base.settings import MIB

PART_MIN_S = 0.1
"""Minimum processing time of a part, unless it would exceed `LARGEST` times the size that the coordinator asks for."""
PART_MAX_S = 1.0
"""Maximum processing time of a part of the size that the coordinator asks for; a slower caller keeps less."""
LARGEST = 8
RECENT_S = 1.0
RECENT_BYTES = 64 * MIB
"""Work counts less and less once it is older than this time, or this number of bytes."""


class WorkPace:
    """The pace of one caller."""

    def __init__(self) -> None:
        self._processed_bytes = 0
        """Total, at the last call of `processed`."""
        self._worked_s = 0.0
        """Total, at the last call of `processed`."""
        self._recent_bytes = 0.0
        self._recent_s = 0.0

    def processed(self, total_bytes: int, worked_s: float) -> None:
        """Note how many bytes the caller has processed in total, and how long it has worked in total."""
        more_bytes, more_s = total_bytes - self._processed_bytes, worked_s - self._worked_s
        self._processed_bytes, self._worked_s = total_bytes, worked_s
        if more_bytes <= 0:  # it did not process records
            return
        self._recent_bytes += more_bytes
        self._recent_s += more_s
        while self._recent_s > RECENT_S or self._recent_bytes > RECENT_BYTES:
            self._recent_bytes /= 2
            self._recent_s /= 2

    def part_bytes(self, asked_bytes: int) -> int:
        """Return how much of a group to keep when the coordinator asks to keep `asked_bytes`; 0 stays 0."""
        if not asked_bytes or not self._recent_bytes:
            return asked_bytes
        bytes_per_s = self._recent_bytes / max(self._recent_s, 1e-6)
        slow = min(asked_bytes, int(bytes_per_s * PART_MAX_S))
        fast = min(asked_bytes * LARGEST, int(bytes_per_s * PART_MIN_S))
        return max(1, slow, fast)
