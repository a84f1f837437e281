"""Long requests in slices: the loop serves everybody else between two of them.

A request that takes long is written as a generator which yields wherever it may be interrupted, and `Turns.run` drives
it. Promises:

* Of all requests that are run here, one slice of about `SLICE_S` is done in a round of the loop, however many there
  are; so what others wait for is one slice, and not one of each.
* Requesters (connections) take turns. Who sends many requests gets no more slices than who sends a single one.
* Whose turn has taken much longer than a slice, as a step that cannot be interrupted may, gets the next one only after
  as long a rest: what others ask for takes several rounds of the loop, and would wait for such a step in each of them.

What was looked up before a ``yield`` may not hold after it: a generator looks things up again. How long one step takes
is its own business; a step that cannot be interrupted may exceed the slice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Hashable
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")

SLICE_S = 0.00025
"""After which a request lets others go on. What these ask for takes several rounds of the loop, each with a slice."""
LONG_SLICES = 2
"""A turn that takes longer than so many is followed by a rest."""
REST_S_MAX = 0.1


def at_once(steps: Generator[None, None, T]) -> T:
    """Run all steps in one go, and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


class Turns:
    """Belongs to one event loop."""

    def __init__(self, slice_s: float = SLICE_S, *, now: Callable[[], float] | None = None) -> None:
        """`now`: a clock of seconds; by default the loop's."""
        self._slice_s = slice_s
        self._now = now
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """By requester; the first one is next."""
        self._handle: asyncio.Handle | None = None
        """The handle of the next turn."""
        self._paused = False
        """All who wait rest."""
        self._last: tuple[Hashable, float] | None = None
        """The requester that had the last turn, and when."""
        self._resting: dict[Hashable, float] = {}
        """Until when they rest."""
        self.slices = 0
        """That were given since the start."""

    async def run(self, steps: Generator[None, None, T], requester: Hashable) -> T:
        """When it is the requester's turn, drive `steps` to their end, and return what they return."""
        try:
            await self.turn(requester)
            return await self.pace(requester).run(steps)
        finally:
            steps.close()

    def pace(self, requester: Hashable) -> TimeSlices:
        """For work that awaits something now and then, and may not do so for long."""
        return TimeSlices(self, requester, self._slice_s)

    def turn(self, requester: Hashable) -> asyncio.Future[None]:
        """Done when it is the requester's turn."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.setdefault(requester, deque()).append(turn)
        if self._handle is None or self._paused:
            self._schedule(loop, 0.0)
        return turn

    def _schedule(self, loop: asyncio.AbstractEventLoop, delay_s: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._paused = delay_s > 0
        self._handle = loop.call_later(delay_s, self._give, loop) if self._paused else loop.call_soon(self._give, loop)

    def _give(self, loop: asyncio.AbstractEventLoop) -> None:
        """One turn, and the next one in the loop's next round."""
        self._handle = None
        now_s = self._now() if self._now is not None else loop.time()
        self._note_rests(now_s)
        while (requester := self._next()) is not None:
            queue = self._waiting.pop(requester)
            turn = queue.popleft()
            if queue:
                self._waiting[requester] = queue  # behind all the others
            if not turn.done():  # it is, if its connection is gone
                self.slices += 1
                self._last = requester, now_s
                turn.set_result(None)
                break
        if self._last is not None:
            self._schedule(loop, 0.0)  # also if nobody waits: how long the turn takes is seen then
        elif self._waiting:
            self._schedule(loop, min(self._resting[each] for each in self._waiting) - now_s)

    def _note_rests(self, now_s: float) -> None:
        last, self._last = self._last, None
        if self._resting:
            self._resting = {each: until_s for each, until_s in self._resting.items() if until_s > now_s}
        if last is not None and now_s - last[1] > LONG_SLICES * self._slice_s:
            self._resting[last[0]] = now_s + min(now_s - last[1], REST_S_MAX)

    def _next(self) -> Hashable | None:
        """The requester whose turn it is."""
        return next((each for each in self._waiting if each not in self._resting), None)


class Share:
    """A slice of work that is done at once for a requester; after it, the rest waits for the requester's turn."""

    def __init__(
        self,
        turns: Turns,
        requester: Hashable,
        slice_s: float,
        rested: Callable[[], None],
        *,
        now_s: Callable[[], float] = perf_counter,
    ) -> None:
        """`rested` is called when it is the requester's turn again."""
        self.resting = False
        """It waits for its turn."""
        self.begin = now_s
        """Something is about to be done; to be given to `end`."""
        self._turns = turns
        self._requester = requester
        self._slice_s = slice_s
        self._rested = rested
        self._spent_s = 0.0
        """Since the requester's last turn, or since others have had as long."""
        self._ended_s = 0.0

    def end(self, begun_s: float) -> bool:
        """It is done; whether the requester has to wait now."""
        if begun_s - self._ended_s >= self._spent_s:
            self._spent_s = 0.0  # others have had as long
        self._ended_s = self.begin()
        self._spent_s += self._ended_s - begun_s
        if self._spent_s > self._slice_s:
            self._spent_s = 0.0
            if not self.resting:
                self.resting = True
                self._turns.turn(self._requester).add_done_callback(self._turn_has_come)
        return self.resting

    def _turn_has_come(self, _turn: asyncio.Future[None]) -> None:
        self.resting = False
        self._rested()


class TimeSlices:
    """Gives way to others when a slice is used up: call `step` before each part of the work."""

    def __init__(self, turns: Turns, requester: Hashable, slice_s: float) -> None:
        self._turns = turns
        self._requester = requester
        self._slice_s = slice_s
        self._now_s = asyncio.get_running_loop().time
        self._until_s = self._now_s() + slice_s

    async def run(self, steps: Generator[None, None, T]) -> T:
        """Drive `steps` to their end from now on, and return what they return."""
        try:
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    result: T = end.value
                    return result
                if self._now_s() >= self._until_s:
                    await self.step()
        finally:
            steps.close()

    async def step(self) -> None:
        """Go on at once, or when it is the requester's turn again."""
        if self._now_s() >= self._until_s:
            await self._turns.turn(self._requester)
            self._until_s = self._now_s() + self._slice_s
