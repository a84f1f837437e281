"""Virtual time: what happens next, of everything in a simulation.

Time passes only from one event to the next. What is to happen at the same time happens in an order that is drawn from
the seed; what one process does among itself keeps its order, which is its loop's business.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any


class Event:
    """Something that is going to happen, unless it is cancelled."""

    __slots__ = ("action", "arguments", "cancelled")

    def __init__(self, action: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self.action = action
        self.arguments = arguments
        self.cancelled = False

    def cancel(self) -> None:
        """It does not happen."""
        self.cancelled = True


class Scheduler:
    """See the head of this module."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_s = 0.0
        self.events = 0
        """That have happened."""
        self._numbers = count()
        self._serials = count(1)
        self._due: list[tuple[float, float, int, Event]] = []
        """A heap: by time, then by lot."""
        self._limit_s = 0.0

    def serial(self) -> int:
        """A number that no other object of this simulation has: what sets of objects are ordered by."""
        return next(self._serials)

    def at(self, at_s: float, action: Callable[..., object], *arguments: Any) -> Event:
        """Have something happen at a time, or now if that is over."""
        event = Event(action, arguments)
        heapq.heappush(self._due, (max(at_s, self.now_s), self.random.random(), next(self._numbers), event))
        return event

    def after(self, seconds: float, action: Callable[..., object], *arguments: Any) -> Event:
        """Have something happen later."""
        return self.at(self.now_s + seconds, action, *arguments)

    def run_until(self, reached: Callable[[], bool], limit_s: float) -> bool:
        """Let time pass until something is so, which is returned, or until `limit_s`."""
        due = self._due
        self._limit_s = limit_s
        while not reached():
            if not due or due[0][0] > limit_s:
                self.now_s = max(self.now_s, limit_s)
                return reached()
            at_s, _, _, event = heapq.heappop(due)
            if not event.cancelled:
                self.now_s = at_s
                self.events += 1
                event.action(*event.arguments)
        return True

    def pass_until(self, at_s: float) -> bool:
        """For who has something to do at a time: let it come, if nothing else is to happen by then."""
        due = self._due
        if at_s > self._limit_s or (due and due[0][0] <= at_s):
            return False
        self.now_s = at_s
        self.events += 1
        return True
