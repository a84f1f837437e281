"""Running figures of a hop over a recent window of time."""

from __future__ import annotations

from collections import deque

from kera.core.latency.sample import Sample

PARTS = 10
"""A window moves on in steps of a tenth of its length."""


class Running:
    """Samples over a window that ends now. Callers pass the time, on a clock that does not go back.

    The window is divided into parts, and old samples are forgotten part by part. So the samples of the last window
    count, and of up to a tenth of a window more. The merged sample is cached, so reading it costs nothing while no part
    is forgotten.
    """

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._part_s = window_s / PARTS
        self._parts: deque[tuple[int, Sample]] = deque()
        """The parts that are not empty, each with its number; the newest is last."""
        self._merged: Sample | None = None

    def add(self, now_s: float, us: int, count: int = 1) -> None:
        """Add a time of `us` for `count` chunks."""
        self._part(now_s).add(us, count)
        if self._merged is not None:
            self._merged.add(us, count)

    def merge(self, now_s: float, sample: Sample) -> None:
        """Add all times of a sample."""
        self._part(now_s).merge(sample)
        if self._merged is not None:
            self._merged.merge(sample)

    def sample(self, now_s: float) -> Sample:
        """Return all times of the window; the caller must not change the result."""
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
    """The mean of the values in a window that ends now; see `Running`."""

    def __init__(self, window_s: float) -> None:
        self._part_s = window_s / PARTS
        self._parts: deque[list[int]] = deque()
        """For each part its number, sum, and count."""

    def add(self, now_s: float, total: int, count: int) -> None:
        """Add `count` values whose sum is `total`."""
        number = int(now_s / self._part_s)
        if not self._parts or self._parts[-1][0] < number:
            self._parts.append([number, 0, 0])
            self._forget(number)
        part = self._parts[-1]
        part[1] += total
        part[2] += count

    def mean(self, now_s: float) -> float | None:
        """Return the mean; None: there are no values."""
        self._forget(int(now_s / self._part_s))
        count = sum(part[2] for part in self._parts)
        return sum(part[1] for part in self._parts) / count if count else None

    def _forget(self, number: int) -> None:
        while self._parts and self._parts[0][0] < number - PARTS:
            self._parts.popleft()


class RunningMost:
    """The largest value in a window that ends now; see `Running`. Values are not negative."""

    def __init__(self, window_s: float) -> None:
        self._part_s = window_s / PARTS
        self._parts: deque[tuple[int, int]] = deque()
        """For each part its number, and its largest value."""

    def add(self, now_s: float, value: int) -> None:
        """Add a value."""
        number = int(now_s / self._part_s)
        if self._parts and self._parts[-1][0] >= number:
            number, known = self._parts.pop()
            value = max(known, value)
        self._parts.append((number, value))
        self._forget(number)

    def most(self, now_s: float) -> int:
        """Return the largest value; 0: there are none."""
        self._forget(int(now_s / self._part_s))
        return max((value for _, value in self._parts), default=0)

    def _forget(self, number: int) -> None:
        while self._parts and self._parts[0][0] < number - PARTS:
            self._parts.popleft()
