"""Virtual time: what happens next, of everything in a simulation.

Time passes only from one event to the next. What is to happen at the same time happens in an order that is drawn from
the seed; what one process does among itself keeps its order, which is its loop's business. Whoever waits for something
looks every `LOOK_S`.
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
        """That have happened."""
        self._numbers = count()
        self._serials = count(1)
        self._lot = self.random.random
        self._due: list[tuple[float, float, int, Callable[..., object], tuple[Any, ...]]] = []
        """A heap: by time, then by lot."""
        self._next: deque[Callable[[], object]] = deque()
        self._limit_s = 0.0

    def serial(self) -> int:
        """A number that no other object of this simulation has: what sets of objects are ordered by."""
        return next(self._serials)

    def at(self, at_s: float, action: Callable[..., object], *arguments: Any) -> None:
        """Have something happen at a time, or now if that is over."""
        now_s = self.now_s
        due_s = max(now_s, at_s)
        heapq.heappush(self._due, (due_s, self._lot(), next(self._numbers), action, arguments))

    def after(self, seconds: float, action: Callable[..., object], *arguments: Any) -> None:
        """Have something happen later."""
        self.at(self.now_s + seconds, action, *arguments)

    def next(self, action: Callable[[], object]) -> None:
        """Have something happen with what is happening: as soon as that is over."""
        self._next.append(action)

    def run_until(self, reached: Callable[[], bool], limit_s: float) -> bool:
        """Let time pass until something is so, which is returned, or until `limit_s`."""
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
        """For who has something to do at a time: let it come, if nothing else is to happen by then."""
        due = self._due
        if at_s > self._limit_s or self._next or (due and due[0][0] <= at_s):
            return False
        self.now_s = at_s
        self.events += 1
        return True
