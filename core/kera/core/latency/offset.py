"""How far another's time of day is from one's own clock, as its answers tell it (Cristian's algorithm).

An answer with the other's time was made at some moment between question and answer: half of that round trip is how far
the estimate can be off. So of the last answers the one with the least round trip counts.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

ANSWERS = 10
"""So many of the last ones are compared: clocks drift apart, by up to 0.1 ms a second."""


class Offset(NamedTuple):
    """The relation of two clocks, as one answer shows it."""

    ahead_us: int
    """By how much the other's clock is ahead."""
    error_us: int
    """It is up to so much more or less."""


class PeerClockOffset:
    """Estimates the offset of a peer's clock from the recent answer with the shortest round trip.

    Times in microseconds; one's own are of any clock, but of the same one.
    """

    def __init__(self) -> None:
        self._answers: deque[Offset] = deque(maxlen=ANSWERS)
        self._best: Offset | None = None

    def answered(self, asked_us: int, answered_us: int, other_us: int) -> None:
        """The other has told its time between these two."""
        round_trip_us = max(0, answered_us - asked_us)
        told = Offset(other_us - asked_us - round_trip_us // 2, round_trip_us - round_trip_us // 2)
        best = self._best
        if best is not None and abs(told.ahead_us - best.ahead_us) > told.error_us + best.error_us + ANSWERS * 1000:
            self._answers.clear()  # one of the clocks was set
        self._answers.append(told)
        self._best = min(self._answers, key=lambda each: each.error_us)

    @property
    def best(self) -> Offset | None:
        """The best offset so far; None: there is none yet."""
        return self._best
