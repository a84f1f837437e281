"""How long a backup takes to answer: the mean of the last seconds, or the age of a request that waits longer. Pure."""

from __future__ import annotations

WINDOW_S = 5.0


class AnswerTimes:
    """The requests to one backup. All times are on one clock that does not go back."""

    def __init__(self) -> None:
        self._waiting: dict[int, float] = {}
        """Requests without an answer, the oldest first, with when they were sent."""
        self._number = 0
        self._began_s = 0.0
        """When the present window began."""
        self._sum_s = self._before_s = 0.0
        self._count = self._count_before = 0

    def sent(self, now_s: float) -> int:
        """A request was sent; returns what `answered` names it by."""
        self._number += 1
        self._waiting[self._number] = now_s
        return self._number

    def answered(self, number: int, now_s: float) -> None:
        """A request has its answer."""
        sent_s = self._waiting.pop(number, None)
        if sent_s is not None:
            self._turn(now_s)
            self._sum_s += now_s - sent_s
            self._count += 1

    def clear(self) -> None:
        """The connection is gone, and what was known of it does not count any more."""
        self._waiting.clear()
        self._sum_s = self._before_s = 0.0
        self._count = self._count_before = 0

    def _turn(self, now_s: float) -> None:
        """Windows that are over are forgotten, except the last one."""
        if now_s < self._began_s + WINDOW_S:
            return
        recent = now_s < self._began_s + 2 * WINDOW_S
        self._before_s, self._count_before = (self._sum_s, self._count) if recent else (0.0, 0)
        self._began_s, self._sum_s, self._count = now_s, 0.0, 0

    def seconds(self, now_s: float) -> float:
        """See the head of this module; 0: nothing was asked lately."""
        self._turn(now_s)
        count = self._count + self._count_before
        mean_s = (self._sum_s + self._before_s) / count if count else 0.0
        return max(mean_s, now_s - next(iter(self._waiting.values()), now_s))
