"""Does work that no request waits for in slices: removing readers, waking many of them, pushing to them.

``kera.core.base.turns`` drives long requests. This module takes work from calls that must be short, such as an append
or the end of a connection. The next rounds of the event loop do it in order, for about `SLICE_S` in each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from kera.core.base.turns import SLICE_S

Step = Callable[[], bool]
"""Does a part of the work; returns whether there is more to do."""


class Timer(Protocol):
    """The return value of `Loop.call_later`."""

    def cancel(self) -> None:
        """Cancel the call."""
        ...


class Loop(Protocol):
    """The part of an event loop that is used here."""

    def time(self) -> float:
        """Return the time of the loop's clock, in seconds."""
        ...

    def call_soon(self, callback: Callable[[], object], /) -> object:
        """Call `callback` in the next round."""
        ...

    def call_later(self, delay: float, callback: Callable[[], object], /) -> Timer:
        """Call `callback` after `delay` seconds."""
        ...


class Slices:
    """Runs steps in the rounds of an event loop. Belongs to one event loop."""

    def __init__(self, loop: Loop, slice_s: float = SLICE_S) -> None:
        self._loop = loop
        self._slice_s = slice_s
        self._steps: OrderedDict[Step, None] = OrderedDict()
        """The steps whose turn it is, in this order."""
        self._scheduled = False

    def add(self, step: Step) -> None:
        """Call `step` until it has no more to do, from the next round on; may be repeated."""
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
            for _ in range(len(self._steps)):  # each once: steps that they add have their turn in the next round
                step, _ = self._steps.popitem(last=False)
                if step():
                    self._steps[step] = None  # behind the others
                if self._loop.time() >= until_s:
                    break
        finally:
            self._schedule()
