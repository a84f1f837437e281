"""Long requests in time slices: the event loop serves everything else between two slices.

A long request is written as a generator that yields wherever it may be interrupted, and `Turns.run` drives it.
Promises:

* In each round of the loop, one slice of about `SLICE_S` is run for all these requests together, however many there
  are. So other work waits for one slice, and not for one slice of each request.
* Requesters (connections) take turns. A requester that sends many requests gets no more slices than one that sends a
  single request.
* A requester whose turn took much longer than a slice, because a step could not be interrupted, has to rest for as long
  before its next turn. Otherwise other requests, which take several rounds of the loop, would wait for such a step in
  each round.

State that a generator looked up before a ``yield`` may have changed after it, so the generator looks it up again. A
single step is not limited: a step that cannot be interrupted may exceed the slice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Hashable
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")

SLICE_S = 0.00025
"""How long a request runs before it lets others go on. These take several rounds of the loop, each with a slice."""
LONG_SLICES = 2
"""A turn that takes longer than this many slices is followed by a rest."""
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
    """The turns of all requesters; belongs to one event loop."""

    def __init__(self, slice_s: float = SLICE_S, *, now: Callable[[], float] | None = None) -> None:
        """`now`: a clock of seconds; by default the loop's."""
        self._slice_s = slice_s
        self._now = now
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """Waiting requests by requester; the first requester is next."""
        self._handle: asyncio.Handle | None = None
        """The handle of the next turn."""
        self._paused = False
        """Whether all waiting requesters are resting."""
        self._last: tuple[Hashable, float] | None = None
        """The requester that had the last turn, and when."""
        self._resting: dict[Hashable, float] = {}
        """Requesters that are resting, each with the end of its rest."""
        self.slices = 0
        """The number of slices given since the start."""

    async def run(self, steps: Generator[None, None, T], requester: Hashable) -> T:
        """When it is the requester's turn, drive `steps` to their end, and return what they return."""
        try:
            await self.turn(requester)
            return await self.pace(requester).run(steps)
        finally:
            steps.close()

    def pace(self, requester: Hashable) -> TimeSlices:
        """Return time slices for work that awaits something now and then, but not for long."""
        return TimeSlices(self, requester, self._slice_s)

    def turn(self, requester: Hashable) -> asyncio.Future[None]:
        """Return a future that is done when it is the requester's turn."""
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
        """Give one turn now, and schedule the next one for the loop's next round."""
        self._handle = None
        now_s = self._now() if self._now is not None else loop.time()
        self._note_rests(now_s)
        while (requester := self._next()) is not None:
            queue = self._waiting.pop(requester)
            turn = queue.popleft()
            if queue:
                self._waiting[requester] = queue  # behind all the others
            if not turn.done():  # it is done if its connection is gone
                self.slices += 1
                self._last = requester, now_s
                turn.set_result(None)
                break
        if self._last is not None:
            self._schedule(loop, 0.0)  # also if no requester waits: the next round sees how long the turn took
        elif self._waiting:
            self._schedule(loop, min(self._resting[each] for each in self._waiting) - now_s)

    def _note_rests(self, now_s: float) -> None:
        last, self._last = self._last, None
        if self._resting:
            self._resting = {each: until_s for each, until_s in self._resting.items() if until_s > now_s}
        if last is not None and now_s - last[1] > LONG_SLICES * self._slice_s:
            self._resting[last[0]] = now_s + min(now_s - last[1], REST_S_MAX)

    def _next(self) -> Hashable | None:
        """Return the requester whose turn it is."""
        return next((each for each in self._waiting if each not in self._resting), None)


class Share:
    """A slice of work that is done for a requester at once; further work waits for the requester's turn."""

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
        """Whether the requester waits for its turn."""
        self.begin = now_s
        """Called when work begins; its result is passed to `end`."""
        self._turns = turns
        self._requester = requester
        self._slice_s = slice_s
        self._rested = rested
        self._spent_s = 0.0
        """Time spent since the requester's last turn, or since others have had as much time."""
        self._ended_s = 0.0

    def end(self, begun_s: float) -> bool:
        """Note that the work that began at `begun_s` is done; return whether the requester has to wait now."""
        if begun_s - self._ended_s >= self._spent_s:
            self._spent_s = 0.0  # others have had as much time
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
    """Lets other requesters go first when a slice is used up: call `step` before each part of the work."""

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
        """Return at once while the slice lasts; after it, wait for the requester's next turn."""
        if self._now_s() >= self._until_s:
            await self._turns.turn(self._requester)
            self._until_s = self._now_s() + self._slice_s
