"""Ranges of entries that a reader follows: woken by what happens to their entries, and in line for the disk.

    append, load, move ──wake()──► follower, marked ──► its reader looks what there is for it

What pushes (``kera.broker.push``) and what keeps the ranges of those who pull (``kera.broker.read_sessions``) have this
in common. An append pays for a mark, whatever the number of ranges; who reads looks at what is marked, and at nothing
else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

from kera.broker.entry import Entry, Key, Waiter
from kera.broker.fetching import LOAD_WAIT_MS_MAX, place_of, position_of
from kera.broker.persistence import PersistenceManager
from kera.core.errors import KeraError
from kera.core.ids import Position
from kera.v1 import common_pb2

LOADING_MAX = 4
"""Of one reader, that wait for the disk at once. What is loaded for more of them would only push each other out."""


class Timer(Protocol):
    """What `Loop.call_later` returns."""

    def cancel(self) -> None:
        """Do not call."""
        ...


class Loop(Protocol):
    """What is needed of an event loop."""

    def call_soon(self, callback: Callable[[], object], /) -> object:
        """Call in the next round."""
        ...

    def call_later(self, delay: float, callback: Callable[[], object], /) -> Timer:
        """Call after so many seconds."""
        ...


class Follower(Waiter):
    """A range of an entry, as far as it has been given."""

    __slots__ = ("address", "end", "entry", "error", "mark", "marked", "missing", "position", "timer")

    def __init__(self, start: common_pb2.Cursor, end: common_pb2.Cursor | None, mark: Callable[[Any], object]) -> None:
        """`mark`: called with the follower when there may be something for it."""
        self.address = (start.stream_id, start.streamlet_id, start.entry)
        self.position = position_of(start)
        """What comes next."""
        self.end = None if end is None else position_of(end)
        self.mark = mark
        self.entry: Entry | None = None
        """That wakes it; None before the first look."""
        self.marked = False
        """There may be something for it."""
        self.missing: Key | None = None
        """It waits for this segment to be loaded, or for its turn to wait."""
        self.timer: Timer | None = None
        """Ends that wait."""
        self.error: KeraError | None = None
        """Why it cannot be loaded."""

    def wake(self) -> None:
        """See `Waiter`. This is all that an append pays."""
        if not self.marked and self.missing is None:
            self.mark(self)

    def watch(self, entry: Entry) -> None:
        """Be woken by an entry."""
        self.unwatch()
        self.entry = entry
        entry.waiters.add(self)

    def unwatch(self) -> None:
        """Be woken no more, and be no reader."""
        if self.entry is not None:
            self.entry.waiters.discard(self)
            self.entry.readers.pop(id(self), None)
            self.entry = None

    def reads_at(self, entry: Entry, position: Position) -> None:
        """Have what comes next kept in memory, if it can be."""
        entry.readers[id(self)] = place_of(entry, position)

    def cursor(self, at: Position) -> common_pb2.Cursor:
        """A position as it travels."""
        stream_id, streamlet_id, entry = self.address
        return common_pb2.Cursor(
            stream_id=stream_id,
            streamlet_id=streamlet_id,
            entry=entry,
            group_id=at.group_id,
            segment_id=at.segment_id,
            position=at.offset,
        )


class Loading:
    """The followers of one reader that wait for the disk: few at once, the others in line."""

    def __init__(self, memory: PersistenceManager, loop: Loop) -> None:
        self._memory = memory
        self._loop = loop
        self._loading = 0
        self._in_line: OrderedDict[Follower, None] = OrderedDict()

    @property
    def waiting(self) -> bool:
        """Whether anybody waits."""
        return self._loading > 0

    def load(self, follower: Follower, entry: Entry, key: Key) -> None:
        """Mark `follower` when the segment is in memory, or is known not to come: then its `error` says why."""
        follower.missing = key
        if self._loading >= LOADING_MAX:
            self._in_line[follower] = None
            return
        self._loading += 1
        follower.timer = self._loop.call_later(
            LOAD_WAIT_MS_MAX / 1000, lambda: self._loaded(follower, key, self._memory.not_loaded(entry, key))
        )
        self._memory.load(entry, key, lambda error: self._loaded(follower, key, error))

    def stop(self, follower: Follower) -> None:
        """It waits no more."""
        follower.missing = None
        self._in_line.pop(follower, None)
        if follower.timer is not None:
            follower.timer.cancel()
            follower.timer = None
            self._loading -= 1
            self.next()

    def next(self) -> None:
        """Let those whose turn it is look again what they need of the disk; who finds it taken gets in line again."""
        for _ in range(min(len(self._in_line), LOADING_MAX - self._loading)):
            follower, _ = self._in_line.popitem(last=False)
            follower.missing = None
            follower.mark(follower)

    def _loaded(self, follower: Follower, key: Key, error: KeraError | None) -> None:
        if follower.missing == key:  # if not, it has ended, or waits no more
            self.stop(follower)
            follower.error = error
            follower.mark(follower)
