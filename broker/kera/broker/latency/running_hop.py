"""The latency of a hop of a stream over a window: of all streamlets together, and the mean of each."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from operator import add
from typing import NamedTuple

from kera.core.latency.sample import Sample
from kera.core.latency.window import Running

STREAMLETS_MAX = 1024
"""Maximum number of streamlets with a separate mean; others only count in the figure of all."""
PARTS = 5
"""The window of streamlets' means moves on in steps of one fifth."""


class RunningHop:
    """The latency of one hop of a stream over a window: one figure for the stream, and a mean for each streamlet."""

    def __init__(self, window_s: float) -> None:
        self._all = Running(window_s)
        self._means = StreamletMeans(window_s)

    @property
    def streamlets(self) -> int:
        """The number of streamlets with a separate mean."""
        return len(self._means)

    def merge(
        self, now_s: float, sample: Sample, of_streamlets: Mapping[int, Sums] | None = None, *, room: int = 0
    ) -> None:
        """Add samples; `of_streamlets`: the sums by streamlet, if known; `room`: for how many more streamlets."""
        self._all.merge(now_s, sample)
        if of_streamlets:
            self._means.add(now_s, of_streamlets, min(STREAMLETS_MAX, len(self._means) + max(0, room)))

    def sample(self, now_s: float) -> Sample:
        """Return the sample of all streamlets."""
        return self._all.sample(now_s)

    def worst(self, now_s: float) -> tuple[int, int]:
        """Return the highest mean of a streamlet in microseconds, and the streamlet; 0, 0 without samples."""
        us, streamlet_id = max(self._means.all(now_s), default=(0.0, 0))
        return round(us), streamlet_id

    def forget_streamlets(self) -> None:
        """Forget the means of all streamlets."""
        self._means.clear()


class Sums(NamedTuple):
    """The sums over the chunks of a streamlet."""

    us: int
    chunks: int


class _Part:
    """The sums in one part of a window, by a streamlet's place. Streamlets that came later have no place in it."""

    __slots__ = ("counts", "number", "us")

    def __init__(self, number: int) -> None:
        self.number = number
        self.us = array("d")
        self.counts = array("d")

    def add(self, place: int, sums: Sums) -> None:
        self._grow(place + 1)
        self.us[place] += sums.us
        self.counts[place] += sums.chunks

    def merge(self, other: _Part) -> None:
        self._grow(len(other.us))
        known = len(other.us)
        self.us[:known] = array("d", map(add, self.us, other.us))
        self.counts[:known] = array("d", map(add, self.counts, other.counts))

    def _grow(self, places: int) -> None:
        missing = places - len(self.us)
        if missing > 0:
            self.us.extend([0.0] * missing)
            self.counts.extend([0.0] * missing)


class StreamletMeans:
    """Means of many streamlets over a window that ends now, with 16 bytes per streamlet and part; see `Running`."""

    def __init__(self, window_s: float) -> None:
        self._part_s = window_s / PARTS
        self._places: dict[int, int] = {}
        self._parts: deque[_Part] = deque()
        self._merged: _Part | None = None

    def __len__(self) -> int:
        return len(self._places)

    def clear(self) -> None:
        """Forget all means."""
        self._places.clear()
        self._parts.clear()
        self._merged = None

    def add(self, now_s: float, of_streamlets: Mapping[int, Sums], most: int) -> None:
        """Add the sums of streamlets; new streamlets only while there are fewer than `most`."""
        number = int(now_s / self._part_s)
        self._forget(number)
        if not self._parts or self._parts[-1].number < number:
            self._parts.append(_Part(number))
        for streamlet_id, sums in of_streamlets.items():
            place = self._places.get(streamlet_id)
            if place is None:
                if len(self._places) >= most:
                    continue
                place = self._places[streamlet_id] = len(self._places)
            self._parts[-1].add(place, sums)
        self._merged = None

    def all(self, now_s: float) -> Iterable[tuple[float, int]]:
        """Yield each mean, with its streamlet."""
        self._forget(int(now_s / self._part_s))
        merged = self._sums()
        for streamlet_id, us, count in zip(self._places, merged.us, merged.counts, strict=False):
            if count:
                yield us / count, streamlet_id

    def _sums(self) -> _Part:
        if self._merged is None:
            self._merged = _Part(0)
            for part in self._parts:
                self._merged.merge(part)
        return self._merged

    def _forget(self, number: int) -> None:
        """Forget parts before the window, and then the places of streamlets without samples in it."""
        if not self._parts or self._parts[0].number >= number - PARTS:
            return
        while self._parts and self._parts[0].number < number - PARTS:
            self._parts.popleft()
        self._merged = None
        counts = self._sums().counts
        kept = [place for place, count in enumerate(counts) if count]
        if len(kept) < len(self._places):
            ids = list(self._places)
            self._places = {ids[place]: new for new, place in enumerate(kept)}
            for part in self._parts:
                places = [place for place in kept if place < len(part.us)]
                part.us = array("d", [part.us[place] for place in places])
                part.counts = array("d", [part.counts[place] for place in places])
            self._merged = None
