"""Work for which no request waits, in slices: taking readers away, waking many of them, pushing to them.

``kera.core.base.turns`` drives requests that take long. This module takes work from calls that may not take long, such
as an append or the end of a connection. The next rounds of the event loop do it in order, for about `SLICE_S` in each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from kera.core.base.turns import SLICE_S

Step = Callable[[], bool]
"""Does a little; returns whether there is more to do."""


class Timer(Protocol):
    """The return value of `Loop.call_later`."""

    def cancel(self) -> None:
        """Do not call."""
        ...


class Loop(Protocol):
    """The used part of an event loop."""

    def time(self) -> float:
        """Seconds on its clock."""
        ...

    def call_soon(self, callback: Callable[[], object], /) -> object:
        """Call in the next round."""
        ...

    def call_later(self, delay: float, callback: Callable[[], object], /) -> Timer:
        """Call after so many seconds."""
        ...


class Slices:
    """Belongs to one event loop."""

    def __init__(self, loop: Loop, slice_s: float = SLICE_S) -> None:
        self._loop = loop
        self._slice_s = slice_s
        self._steps: OrderedDict[Step, None] = OrderedDict()
        """The steps whose turn it is, in this order."""
        self._scheduled = False

    def add(self, step: Step) -> None:
        """Take steps until there is nothing more to do, from the next round on; may be repeated."""
        self._steps[step] = None
        self._schedule()

    def _schedule(self) -> None:
        if self._steps and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._round)

    def _round(self) -> None:
        self._scheduled = False
        until_s = self._loop.time() + self._slice_s
        try:
            for _ in range(len(self._steps)):  # each once: what they begin is for the next round
                step, _ = self._steps.popitem(last=False)
                if step():
                    self._steps[step] = None  # behind the others
                if self._loop.time() >= until_s:
                    break
        finally:
            self._schedule()
