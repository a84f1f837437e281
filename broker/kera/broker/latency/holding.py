"""Decides until when a broker holds data back, so that more goes together. Pure; times in seconds are monotonic.

If the stream's budget leaves time for that, references to chunks wait for others before a request to backups, and the
broker announces chunks to readers in rounds. The first item of a buffer decides, by the earlier of two times:

* its arrival plus the buffer's own part of the budget;
* the time at which its oldest record was accepted, plus the parts of this buffer and of all buffers before it. So data
  that is already late, as from a producer that waited for answers, does not wait here as well. Data that has waited
  less than its parts before does not wait longer here.

Nothing is held longer than `HELD_US_MAX`, or than any writer of the stream has recently reported that its settings
allow. Data of a stream without a budget is not held. The data of a writer whose clock is further behind than others'
counts as late, and is not held; that of a writer whose clock is ahead waits for the buffer's own part at most.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from kera.core.latency.limits import HELD_US_MAX

LIMIT_S = 5.0
"""How long a limit that a writer reports counts; writers report it once a second."""
HELD_BYTES_MAX = 256 << 10
"""Data of this size goes at once, because the cost of a request hardly matters for it."""
SLACK = 1 / 8
"""When another item is due, an item may go this fraction of its wait early."""
TIMER_S = 0.001
"""The precision of an event loop's timers."""

ItemT = TypeVar("ItemT", bound=Hashable)


class Hold(NamedTuple):
    """The time for which the buffer of a stream may wait."""

    wait_us: int
    way_us: int
    """The waits of all buffers up to this one together."""
    ahead_us: int = 0
    """How far the clocks of writers are ahead, on average."""

    def wait_s(self, created_us: int, now_us: int) -> float:
        """Return how long data waits that arrives now, and whose oldest record was accepted at `created_us`."""
        age_us = max(0, now_us - (created_us - self.ahead_us))
        return max(0, min(self.wait_us, self.way_us - age_us, HELD_US_MAX)) / 1e6


class _Limit(NamedTuple):
    held_s: float
    until_s: float
    """Until when the limit counts."""


class Holds:
    """The holds of one kind of buffer, by stream."""

    def __init__(self, now_s: Callable[[], float], now_us: Callable[[], int]) -> None:
        """`now_us`: the time of day."""
        self.of: dict[int, Hold] = {}
        """The hold of each stream whose data may wait; looked up for each request."""
        self._limits: dict[int, _Limit] = {}
        """The limits that writers have reported, also for streams whose data does not wait now."""
        self.now_s = now_s
        self._now_us = now_us

    def set(self, stream_id: int, hold: Hold) -> None:
        """Set the time for which the buffer of a stream may wait from now on."""
        if hold.wait_us:
            self.of[stream_id] = hold
        else:
            self.of.pop(stream_id, None)

    def forget(self, stream_id: int) -> None:
        """Forget a stream, which has no constraint any more."""
        self.of.pop(stream_id, None)
        self._limits.pop(stream_id, None)

    def limit(self, stream_id: int, held_us: int) -> None:
        """Note how long a writer of a stream allows its chunks to be held; the least limit counts for `LIMIT_S`."""
        now_s, known = self.now_s(), self._limits.get(stream_id)
        if known is None or known.until_s <= now_s or held_us / 1e6 <= known.held_s:
            self._limits[stream_id] = _Limit(held_us / 1e6, now_s + LIMIT_S)

    def reckon(self, stream_id: int, ahead_us: int) -> None:
        """Set how far the clocks of a stream's writers are ahead."""
        hold = self.of.get(stream_id)
        if hold is not None:
            self.of[stream_id] = hold._replace(ahead_us=ahead_us)

    def until_s(self, stream_id: int, created_us: int) -> float:
        """Return until when data that arrives now waits; 0: it goes at once."""
        hold = self.of.get(stream_id)
        wait_s = 0.0 if hold is None else hold.wait_s(created_us, self._now_us())
        now_s, limit = self.now_s(), self._limits.get(stream_id) if self._limits else None
        if limit is not None and now_s < limit.until_s:
            wait_s = min(wait_s, limit.held_s)
        return now_s + wait_s if wait_s > TIMER_S else 0.0


class Held(Generic[ItemT]):
    """Items that are held back, each until its time."""

    def __init__(self) -> None:
        self._until: dict[ItemT, float] = {}
        self._heap: list[tuple[float, float, int, ItemT]] = []
        """Items by their time, each with the time from which it may go with others; outdated ones are skipped."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, item: object) -> bool:
        return item in self._until

    def hold(self, item: ItemT, until_s: float, now_s: float) -> None:
        """Hold an item until a time; if it is held already, until the earlier one."""
        if self._until.get(item, math.inf) > until_s:
            self._until[item] = until_s
            early_s = until_s - SLACK * (until_s - now_s)
            heapq.heappush(self._heap, (until_s, early_s, next(self._numbers), item))

    def discard(self, item: ItemT) -> None:
        """Stop holding an item."""
        self._until.pop(item, None)
        if not self._until:
            self._heap.clear()

    @property
    def next_s(self) -> float:
        """The time when the first item is due; infinite if nothing is held."""
        while self._heap and self._until.get(self._heap[0][3]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def take(self, now_s: float) -> list[ItemT]:
        """Return the items that are due, and those that almost are, and stop holding them."""
        found: list[ItemT] = []
        if self.next_s > now_s + TIMER_S:
            return found
        while self.next_s < math.inf and (self._heap[0][1] <= now_s or self._heap[0][0] <= now_s + TIMER_S):
            item = heapq.heappop(self._heap)[3]
            del self._until[item]
            found.append(item)
        return found
