"""Running figures: what a hop took over the last so many seconds."""

from __future__ import annotations

from collections import deque

from kera.core.latency.sample import Sample

PARTS = 10
"""A window moves on by a tenth of itself."""


class Running:
    """Samples over a window that ends now. The time is the caller's, on a clock that does not go back.

    The window is cut into parts: what is older than a window is forgotten part by part, so what counts is of the last
    window and up to a tenth of one more. What it has is kept merged, so asking costs nothing while nothing has changed.
    """

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._part_s = window_s / PARTS
        self._parts: deque[tuple[int, Sample]] = deque()
        """Those with something in them, by number; the newest is last."""
        self._merged: Sample | None = None

    def add(self, now_s: float, us: int, count: int = 1) -> None:
        """`count` chunks took so long."""
        self._part(now_s).add(us, count)
        if self._merged is not None:
            self._merged.add(us, count)

    def merge(self, now_s: float, sample: Sample) -> None:
        """So long took what a sample has."""
        self._part(now_s).merge(sample)
        if self._merged is not None:
            self._merged.merge(sample)

    def sample(self, now_s: float) -> Sample:
        """All of the window; not to be changed."""
        self._forget(int(now_s / self._part_s))
        if self._merged is None:
            self._merged = Sample()
            for _, part in self._parts:
                self._merged.merge(part)
        return self._merged

    def _part(self, now_s: float) -> Sample:
        number = int(now_s / self._part_s)
        if not self._parts or self._parts[-1][0] < number:
            self._parts.append((number, Sample()))
            self._forget(number)
        return self._parts[-1][1]

    def _forget(self, number: int) -> None:
        while self._parts and self._parts[0][0] < number - PARTS:
            self._parts.popleft()
            self._merged = None


class RunningMean:
    """The mean of what came over a window that ends now; see `Running`."""

    def __init__(self, window_s: float) -> None:
        self._part_s = window_s / PARTS
        self._parts: deque[list[int]] = deque()
        """Number of the part, sum, and count."""

    def add(self, now_s: float, total: int, count: int) -> None:
        """`count` values came, which are `total` together."""
        number = int(now_s / self._part_s)
        if not self._parts or self._parts[-1][0] < number:
            self._parts.append([number, 0, 0])
            self._forget(number)
        part = self._parts[-1]
        part[1] += total
        part[2] += count

    def mean(self, now_s: float) -> float | None:
        """Their mean; None: nothing came."""
        self._forget(int(now_s / self._part_s))
        count = sum(part[2] for part in self._parts)
        return sum(part[1] for part in self._parts) / count if count else None

    def _forget(self, number: int) -> None:
        while self._parts and self._parts[0][0] < number - PARTS:
            self._parts.popleft()


class RunningMost:
    """The largest of what came over a window that ends now; see `Running`. Nothing is below 0."""

    def __init__(self, window_s: float) -> None:
        self._part_s = window_s / PARTS
        self._parts: deque[tuple[int, int]] = deque()
        """Number of the part, and its largest value."""

    def add(self, now_s: float, value: int) -> None:
        """A value came."""
        number = int(now_s / self._part_s)
        if self._parts and self._parts[-1][0] >= number:
            number, known = self._parts.pop()
            value = max(known, value)
        self._parts.append((number, value))
        self._forget(number)

    def most(self, now_s: float) -> int:
        """The largest; 0: nothing came."""
        self._forget(int(now_s / self._part_s))
        return max((value for _, value in self._parts), default=0)

    def _forget(self, number: int) -> None:
        while self._parts and self._parts[0][0] < number - PARTS:
            self._parts.popleft()
