"""How fast a copy is and how long it will take: from what was copied when."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

WINDOW_S = 10.0
"""Rates are of so long, up to now."""


class Standing(NamedTuple):
    """How a copy is doing."""

    records: int
    """Copied by this run."""
    bytes: int
    """Size of these rows, as Arrow."""
    records_per_s: float
    bytes_per_s: float
    left: int | None
    """Records that are yet to come; None: nobody knows."""
    eta_s: float | None
    """Until these are copied, too."""


class Rates:
    """Counts what is copied."""

    def __init__(self, now_s: float, left: int | None) -> None:
        """`left`: so many records are to come, if that is known."""
        self._begun_s = now_s
        self._left = left
        self._expected_at = 0
        """When there were so many records, `_left` was known."""
        self._records = self._bytes = 0
        self._steps: deque[tuple[float, int, int]] = deque([(now_s, 0, 0)])
        """When there were how many."""

    def expect(self, left: int | None) -> None:
        """From now on, so many are to come, if that is known."""
        self._left, self._expected_at = left, self._records

    def add(self, records: int, size: int, now_s: float) -> None:
        """So much was copied."""
        self._records += records
        self._bytes += size
        self._steps.append((now_s, self._records, self._bytes))
        while len(self._steps) > 2 and self._steps[1][0] <= now_s - WINDOW_S:
            self._steps.popleft()

    def standing(self, now_s: float) -> Standing:
        """As of now."""
        while len(self._steps) > 1 and self._steps[1][0] <= now_s - WINDOW_S:
            self._steps.popleft()
        since_s, records, size = self._steps[0]
        span_s = max(now_s - since_s, 1e-6)
        pace, flow = (self._records - records) / span_s, (self._bytes - size) / span_s
        left = None if self._left is None else max(0, self._left - self._records + self._expected_at)
        return Standing(self._records, self._bytes, pace, flow, left, None if left is None or not pace else left / pace)

    def average(self, now_s: float) -> Standing:
        """As of now, with the rates of all of it."""
        span_s = max(now_s - self._begun_s, 1e-6)
        return self.standing(now_s)._replace(records_per_s=self._records / span_s, bytes_per_s=self._bytes / span_s)
