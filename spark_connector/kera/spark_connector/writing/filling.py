"""How long a chunk of a task may fill that writes with ``latencyTarget``. Pure: no connection, and no clock.

A row is to be stored at most so long after the task has it. So a chunk goes, full or not, when its first row has been
there for

    the target - what storing takes - a tenth of the target

What storing takes is the worst of the latest chunks. Where that leaves less than half of the target, half of it is
taken: what is stored too slowly is not stored faster in more chunks.

The same is in ``kera.spark.write.Filling`` in Java.
"""

from __future__ import annotations

from collections import deque

MARGIN = 0.1
LEFT = 0.5
"""Minimum share of the target."""
LATEST = 32
"""Chunks that count."""
SLACK = 1 / 8
"""So much earlier a chunk goes, if others do: each look and each request costs more than it saves."""


class Filling:
    """The chunks of one task. Times in seconds, on any clock."""

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._took_s: deque[float] = deque(maxlen=LATEST)

    def stored(self, took_s: float) -> None:
        """A chunk was acknowledged so long after it was closed."""
        self._took_s.append(took_s)

    @property
    def fills_s(self) -> float:
        """How long a chunk may fill."""
        left_s = self._target_s * (1 - MARGIN) - max(self._took_s, default=0.0)
        return max(left_s, self._target_s * LEFT)

    def is_due(self, since_s: float, now_s: float) -> bool:
        """Whether a chunk goes whose first row has been there `since_s`, when one is looked at `now_s`."""
        return now_s - since_s >= self.fills_s * (1 - SLACK)
