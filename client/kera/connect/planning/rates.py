"""The speed of a copy, and its remaining time, from what was copied when."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

WINDOW_S = 10.0
"""The length of the window, up to now, over which rates are averaged."""


class Standing(NamedTuple):
    """The state of a copy."""

    records: int
    """Records that this run has copied."""
    bytes: int
    """Size of these records, as Arrow."""
    records_per_s: float
    bytes_per_s: float
    left: int | None
    """Records that are left to copy; None: unknown."""
    eta_s: float | None
    """Expected time until these are copied; None: unknown."""


class Rates:
    """Counts the copied records and bytes."""

    def __init__(self, now_s: float, left: int | None) -> None:
        """`left`: the number of records to copy; None: unknown."""
        self._begun_s = now_s
        self._left = left
        self._expected_at = 0
        """The number of copied records when `_left` was determined."""
        self._records = self._bytes = 0
        self._steps: deque[tuple[float, int, int]] = deque([(now_s, 0, 0)])
        """Times with the number of records and bytes that were copied by then."""

    def expect(self, left: int | None) -> None:
        """Set the number of records that are left to copy from now on; None: unknown."""
        self._left, self._expected_at = left, self._records

    def add(self, records: int, size: int, now_s: float) -> None:
        """Count copied records, and their size in bytes."""
        self._records += records
        self._bytes += size
        self._steps.append((now_s, self._records, self._bytes))
        while len(self._steps) > 2 and self._steps[1][0] <= now_s - WINDOW_S:
            self._steps.popleft()

    def standing(self, now_s: float) -> Standing:
        """Return the state at `now_s`, with the rates of the last `WINDOW_S`."""
        while len(self._steps) > 1 and self._steps[1][0] <= now_s - WINDOW_S:
            self._steps.popleft()
        since_s, records, size = self._steps[0]
        span_s = max(now_s - since_s, 1e-6)
        pace, flow = (self._records - records) / span_s, (self._bytes - size) / span_s
        left = None if self._left is None else max(0, self._left - self._records + self._expected_at)
        return Standing(self._records, self._bytes, pace, flow, left, None if left is None or not pace else left / pace)

    def average(self, now_s: float) -> Standing:
        """Return the state at `now_s`, with the average rates of the whole run."""
        span_s = max(now_s - self._begun_s, 1e-6)
        return self.standing(now_s)._replace(records_per_s=self._records / span_s, bytes_per_s=self._bytes / span_s)
