"""What a hop of a stream takes over a window: of all streamlets together, and of each its mean."""

from __future__ import annotations

from kera.core.latency.sample import Sample
from kera.core.latency.window import Running, RunningMean

STREAMLETS_MAX = 1024
"""So many have a mean of their own; the others are in what all take."""


class RunningHop:
    """See the head of this module."""

    def __init__(self, window_s: float) -> None:
        self._all = Running(window_s)
        self._window_s = window_s
        self._streamlets: dict[int, RunningMean] = {}

    def merge(self, now_s: float, streamlet_id: int | None, sample: Sample) -> None:
        """So long took chunks of a streamlet; None: of any."""
        self._all.merge(now_s, sample)
        if streamlet_id is None:
            return
        mean = self._streamlets.get(streamlet_id)
        if mean is None:
            if len(self._streamlets) >= STREAMLETS_MAX:
                return
            mean = self._streamlets[streamlet_id] = RunningMean(self._window_s)
        mean.add(now_s, sample.sum_us, sample.count)

    def sample(self, now_s: float) -> Sample:
        """Of all streamlets."""
        return self._all.sample(now_s)

    def worst(self, now_s: float) -> tuple[int, int]:
        """The highest mean of a streamlet in microseconds, and which one it is of; 0, 0: nothing came."""
        means = [(mean.mean(now_s), streamlet_id) for streamlet_id, mean in self._streamlets.items()]
        us, streamlet_id = max(((us, each) for us, each in means if us is not None), default=(0.0, 0))
        return round(us), streamlet_id
