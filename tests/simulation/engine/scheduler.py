"""Virtual time: the order of all events in a simulation.

Time passes only from one event to the next. The seed decides the order of events at the same time; the events within a
process keep their order, which is up to its loop. A condition is checked every `LOOK_S`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any

LOOK_S = 0.005


class Scheduler:
    """See the head of this module."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_s = 0.0
        self.events = 0
        """The number of events so far."""
        self._numbers = count()
        self._serials = count(1)
        self._lot = self.random.random
        self._due: list[tuple[float, float, int, Callable[..., object], tuple[Any, ...]]] = []
        """A heap: by time, then by lot."""
        self._next: deque[Callable[[], object]] = deque()
        self._limit_s = 0.0

    def serial(self) -> int:
        """A number that is unique in this simulation, for the order in sets of objects."""
        return next(self._serials)

    def at(self, at_s: float, action: Callable[..., object], *arguments: Any) -> None:
        """Schedule an action for a time, or for now if that has passed."""
        now_s = self.now_s
        due_s = max(now_s, at_s)
        heapq.heappush(self._due, (due_s, self._lot(), next(self._numbers), action, arguments))

    def after(self, seconds: float, action: Callable[..., object], *arguments: Any) -> None:
        """Schedule an action after a time."""
        self.at(self.now_s + seconds, action, *arguments)

    def next(self, action: Callable[[], object]) -> None:
        """Schedule an action directly after the present event."""
        self._next.append(action)

    def run_until(self, reached: Callable[[], bool], limit_s: float) -> bool:
        """Let time pass until a condition holds or until `limit_s`; return whether it holds."""
        due, following, pop = self._due, self._next, heapq.heappop
        self._limit_s = limit_s
        look_s = self.now_s
        while True:
            while following:
                self.events += 1
                following.popleft()()
            if self.now_s >= look_s:
                if reached():
                    return True
                look_s = self.now_s + LOOK_S
            if not due or due[0][0] > limit_s:
                self.now_s = max(self.now_s, limit_s)
                return reached()
            self.now_s, _, _, action, arguments = pop(due)
            self.events += 1
            action(*arguments)

    def pass_until(self, at_s: float) -> bool:
        """Let time pass to `at_s` for a busy process, if no other event is due by then; return whether it did."""
        due = self._due
        if at_s > self._limit_s or self._next or (due and due[0][0] <= at_s):
            return False
        self.now_s = at_s
        self.events += 1
        return True
