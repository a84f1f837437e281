"""Estimates the offset between a peer's wall clock and our own clock from the peer's answers (Cristian's algorithm).

The peer read its clock at some moment between our question and its answer, so the estimate can be off by half of this
round trip. So of the last answers, the one with the shortest round trip counts.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

ANSWERS = 10
"""Number of recent answers that are compared; not more, as clocks drift apart by up to 0.1 ms a second."""


class Offset(NamedTuple):
    """The offset of a peer's clock, as one answer shows it."""

    ahead_us: int
    """By how much the peer's clock is ahead."""
    error_us: int
    """Maximum error of that, in either direction."""


class PeerClockOffset:
    """Estimates the offset of a peer's clock from the recent answer with the shortest round trip.

    Times are in microseconds; our own may be from any clock, as long as it is always the same one.
    """

    def __init__(self) -> None:
        self._answers: deque[Offset] = deque(maxlen=ANSWERS)
        self._best: Offset | None = None

    def answered(self, asked_us: int, answered_us: int, other_us: int) -> None:
        """Note an answer: the peer's clock was `other_us` at a moment between `asked_us` and `answered_us`."""
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
