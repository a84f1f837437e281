"""Ranges of entries that a reader follows: events of their entries wake them, and they queue for the disk.

    append, load, move ──wake()──► the entry's followers, marked ──► their readers look for new data

Push (``kera.broker.serving.push``) and read sessions (``kera.broker.serving.read_sessions``) share this module. An
append wakes the entry's followers: a few at once, many in slices. A reader looks only at marked followers. A marked
follower is not woken again before its reader has looked at it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from kera.broker.log.entry import Entry, EntryListener
from kera.broker.records import Key
from kera.broker.serving.cursors import position_of
from kera.broker.serving.fetch import place_of
from kera.broker.serving.limits import PushLimits, ServingLimits
from kera.broker.slices import Loop, Slices, Timer
from kera.broker.storage.persistence import PersistenceManager
from kera.core.base.done import Done
from kera.core.base.ids import Position
from kera.core.errors import KeraError
from kera.v1 import common_pb2


class Follower:
    """A range of an entry, and how far its reader has received it."""

    __slots__ = (
        "address",
        "end",
        "error",
        "loading",
        "mark",
        "marked",
        "missing",
        "place",
        "position",
        "timer",
        "watched",
    )

    def __init__(self, start: common_pb2.Cursor, end: common_pb2.Cursor | None, mark: Callable[[Any], object]) -> None:
        """`mark`: called with the follower when it may have new data, or an error."""
        self.address = (start.stream_id, start.streamlet_id, start.entry)
        self.position = position_of(start)
        """Position of the next data."""
        self.end = None if end is None else position_of(end)
        self.mark = mark
        self.watched: _Watched | None = None
        """The entry that wakes it; None before the first look."""
        self.place: Key | None = None
        """The segment that it reads next."""
        self.marked = False
        """Whether its reader has to look at it."""
        self.missing: Key | None = None
        """The segment that it waits for, either while it is loaded, or in line for a load."""
        self.timer: Timer | None = None
        """Ends the wait for a load."""
        self.loading: tuple[Entry, Key, Done] | None = None
        """The load that it waits for, and what that calls."""
        self.error: KeraError | None = None
        """Why the segment cannot be loaded."""

    @property
    def entry(self) -> Entry | None:
        """The entry that wakes it; None before the first look."""
        return None if self.watched is None else self.watched.entry

    def wake(self) -> None:
        """Mark it, unless it is marked already or waits for a load."""
        if not self.marked and self.missing is None:
            self.mark(self)

    def listen(self) -> None:
        """Let the next event wake it, although its reader has not looked at it."""
        if self.watched is not None:
            self.watched.sleep(self)

    def unwatch(self) -> None:
        """Stop following the entry."""
        if self.watched is not None:
            self.watched.remove(self)

    def reads_at(self, entry: Entry, position: Position) -> None:
        """Record the position at which it reads the watched entry, so that memory keeps the next data if possible."""
        if self.watched is not None:
            self.watched.move(self, place_of(entry, position))

    def cursor(self, at: Position) -> common_pb2.Cursor:
        """Return the wire form of a position in the entry."""
        stream_id, streamlet_id, entry = self.address
        return common_pb2.Cursor(
            stream_id=stream_id,
            streamlet_id=streamlet_id,
            entry=entry,
            group_id=at.group_id,
            segment_id=at.segment_id,
            position=at.offset,
        )


class _Watched(EntryListener):
    """An entry with the followers of all readers: an append wakes this one object, however many followers it has."""

    __slots__ = ("__weakref__", "_asleep", "_followers", "_places", "_slices", "_waking", "_woken_at_once", "entry")

    def __init__(self, entry: Entry, slices: Slices, woken_at_once: int) -> None:
        self.entry = entry
        self._slices = slices
        self._woken_at_once = woken_at_once
        self._followers = 0
        self._asleep: dict[Follower, None] = {}
        """The followers that the next event wakes."""
        self._waking: deque[Follower] = deque()
        """The followers that are being woken."""
        self._places: dict[Key, list[int]] = {}
        """How many followers read each segment next. The entry itself knows the places, but not the numbers."""

    def add(self, follower: Follower) -> None:
        """Let a follower follow the entry from now on."""
        self._followers += 1
        self.entry.waiters.add(self)
        follower.watched = self
        self._asleep[follower] = None

    def sleep(self, follower: Follower) -> None:
        """Let the next event wake a follower, whose reader looks at it now."""
        self._asleep[follower] = None

    def remove(self, follower: Follower) -> None:
        """Stop waking a follower."""
        self._asleep.pop(follower, None)
        self.move(follower, None)
        follower.watched = None
        self._followers -= 1
        if not self._followers:
            self.entry.waiters.discard(self)

    def move(self, follower: Follower, place: Key | None) -> None:
        """Note that a follower reads another segment next; None: none."""
        before, follower.place = follower.place, place
        if before == place:
            return
        if place is not None:
            count = self._places.setdefault(place, [0])
            count[0] += 1
            self.entry.readers[id(count)] = place
        if before is not None:
            count = self._places[before]
            count[0] -= 1
            if not count[0]:
                del self._places[before]
                del self.entry.readers[id(count)]

    def wake(self) -> None:
        """See `EntryListener`. Wakes a few followers at once, the others in the loop's next rounds."""
        if self._asleep:
            self._waking.extend(self._asleep)
            self._asleep = {}
            if self._wake_some():
                self._slices.add(self._wake_some)

    def _wake_some(self) -> bool:
        waking = self._waking
        for _ in range(min(len(waking), self._woken_at_once)):
            follower = waking.popleft()
            if follower.watched is self:  # otherwise it has ended, or follows another entry
                follower.wake()
        return bool(waking)


class Watches:
    """The entries that have followers. Belongs to one event loop."""

    def __init__(self, slices: Slices, woken_at_once: int = ServingLimits().woken_at_once) -> None:
        self._slices = slices
        self._woken_at_once = woken_at_once
        self._watched: WeakValueDictionary[Entry, _Watched] = WeakValueDictionary()

    def watch(self, follower: Follower, entry: Entry) -> None:
        """Let an entry wake a follower: call this before each look."""
        watched = follower.watched
        if watched is not None and watched.entry is entry:
            watched.sleep(follower)
            return
        follower.unwatch()
        watched = self._watched.get(entry)
        if watched is None:
            watched = self._watched[entry] = _Watched(entry, self._slices, self._woken_at_once)
        watched.add(follower)


class Loading:
    """The followers of one reader that need the disk: a few load at once, the others wait in line."""

    def __init__(
        self,
        memory: PersistenceManager,
        loop: Loop,
        load_wait_ms: int = ServingLimits().load_wait_ms,
        at_once_max: int = PushLimits().loads_at_once,
    ) -> None:
        self._memory = memory
        self._loop = loop
        self._load_wait_s = load_wait_ms / 1000
        self._at_once_max = at_once_max
        self._loading = 0
        self._in_line: OrderedDict[Follower, None] = OrderedDict()

    @property
    def waiting(self) -> bool:
        """Whether a load is under way."""
        return self._loading > 0

    def load(self, follower: Follower, entry: Entry, key: Key) -> None:
        """Load a segment, and mark `follower` when it is in memory, or when loading fails: `error` then says why."""
        follower.missing = key
        if self._loading >= self._at_once_max:
            self._in_line[follower] = None
            return
        self._loading += 1
        follower.timer = self._loop.call_later(
            self._load_wait_s, lambda: self._loaded(follower, key, self._memory.loads.not_loaded(entry, key))
        )
        follower.loading = entry, key, lambda error: self._loaded(follower, key, error)
        self._memory.loads.load(*follower.loading)

    def stop(self, follower: Follower) -> None:
        """End the wait of a follower, if it waits, and let the next one in line have its turn."""
        follower.missing = None
        self._in_line.pop(follower, None)
        if follower.timer is not None:
            follower.timer.cancel()
            follower.timer = None
            loading, follower.loading = follower.loading, None
            if loading is not None:
                self._memory.loads.forget(*loading)
            self._loading -= 1
            self.next()

    def next(self) -> None:
        """Mark the first followers in line, as many as may load now; one that finds no room for a load queues again."""
        for _ in range(min(len(self._in_line), self._at_once_max - self._loading)):
            follower, _ = self._in_line.popitem(last=False)
            follower.missing = None
            follower.mark(follower)

    def _loaded(self, follower: Follower, key: Key, error: KeraError | None) -> None:
        if follower.missing == key:  # otherwise it has ended, or no longer waits
            self.stop(follower)
            follower.error = error
            follower.mark(follower)
