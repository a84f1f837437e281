"""Until when a broker holds something back, so that more goes together. Pure; times in seconds are monotonic.

References to chunks wait for others before a request to backups, and readers are told of chunks in rounds, where the
stream's budget leaves time for that. What came first decides, by the earlier of two times:

* the buffer's own part, from when it came;
* from when its oldest record was accepted, the parts of this buffer and of all before it. So what was late before, as
  of a producer that waited for answers, does not wait here as well; what has waited for less before, gains nothing.

And never for longer than `HELD_US_MAX`, or than any writer of the stream has said lately that its settings allow. Of a
stream without a budget nothing is held. A writer whose clock is behind by more than others' is taken to be late, and is
not held; one that is ahead waits for the buffer's own part at most.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from kera.core.latency.limits import HELD_US_MAX

LIMIT_S = 5.0
"""For so long counts what a writer says of its settings; it says so once a second."""
HELD_BYTES_MAX = 256 << 10
"""As much goes at once: a request that is so large costs little for what it carries."""
SLACK = 1 / 8
"""This part of its time early goes what is held, if something else is due."""
TIMER_S = 0.001
"""To which an event loop's timers are exact."""

ItemT = TypeVar("ItemT", bound=Hashable)


class Hold(NamedTuple):
    """The time for which the buffer of a stream may wait."""

    wait_us: int
    way_us: int
    """All buffers up to this one together."""
    ahead_us: int = 0
    """Clocks of writers, on average."""

    def wait_s(self, created_us: int, now_us: int) -> float:
        """How long something waits that comes now, of which the oldest record was accepted then."""
        age_us = max(0, now_us - (created_us - self.ahead_us))
        return max(0, min(self.wait_us, self.way_us - age_us, HELD_US_MAX)) / 1e6


class _Limit(NamedTuple):
    held_s: float
    until_s: float
    """For so long that counts."""


class Holds:
    """Those of one kind of buffer, by stream."""

    def __init__(self, now_s: Callable[[], float], now_us: Callable[[], int]) -> None:
        """`now_us`: the time of day."""
        self.of: dict[int, Hold] = {}
        """Looked at for each request; streams that need not wait are not in it."""
        self._limits: dict[int, _Limit] = {}
        """As writers have said, also of streams of which nothing waits just now."""
        self.now_s = now_s
        self._now_us = now_us

    def set(self, stream_id: int, hold: Hold) -> None:
        """Set the time for which the buffer of a stream may wait from now on."""
        if hold.wait_us:
            self.of[stream_id] = hold
        else:
            self.of.pop(stream_id, None)

    def forget(self, stream_id: int) -> None:
        """A stream has no constraint any more."""
        self.of.pop(stream_id, None)
        self._limits.pop(stream_id, None)

    def limit(self, stream_id: int, held_us: int) -> None:
        """A writer of a stream with a constraint says how long it may be held back; the least counts, for a while."""
        now_s, known = self.now_s(), self._limits.get(stream_id)
        if known is None or known.until_s <= now_s or held_us / 1e6 <= known.held_s:
            self._limits[stream_id] = _Limit(held_us / 1e6, now_s + LIMIT_S)

    def reckon(self, stream_id: int, ahead_us: int) -> None:
        """How far clocks of writers are ahead."""
        hold = self.of.get(stream_id)
        if hold is not None:
            self.of[stream_id] = hold._replace(ahead_us=ahead_us)

    def until_s(self, stream_id: int, created_us: int) -> float:
        """Until when something waits that comes now; 0: it goes at once."""
        hold = self.of.get(stream_id)
        wait_s = 0.0 if hold is None else hold.wait_s(created_us, self._now_us())
        now_s, limit = self.now_s(), self._limits.get(stream_id) if self._limits else None
        if limit is not None and now_s < limit.until_s:
            wait_s = min(wait_s, limit.held_s)
        return now_s + wait_s if wait_s > TIMER_S else 0.0


class Held(Generic[ItemT]):
    """Items that are held back."""

    def __init__(self) -> None:
        self._until: dict[ItemT, float] = {}
        self._heap: list[tuple[float, float, int, ItemT]] = []
        """Until when, from when on with others, and what; what is not in `_until` any more is passed over."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, item: object) -> bool:
        return item in self._until

    def hold(self, item: ItemT, until_s: float, now_s: float) -> None:
        """Hold it until then; if it is held already, until the earlier time."""
        if self._until.get(item, math.inf) > until_s:
            self._until[item] = until_s
            early_s = until_s - SLACK * (until_s - now_s)
            heapq.heappush(self._heap, (until_s, early_s, next(self._numbers), item))

    def discard(self, item: ItemT) -> None:
        """It is held no more."""
        self._until.pop(item, None)
        if not self._until:
            self._heap.clear()

    @property
    def next_s(self) -> float:
        """When the first is due; infinity: nothing is held."""
        while self._heap and self._until.get(self._heap[0][3]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def take(self, now_s: float) -> list[ItemT]:
        """Take the items that are due, and those that almost are; they are held back no more."""
        found: list[ItemT] = []
        if self.next_s > now_s + TIMER_S:
            return found
        while self.next_s < math.inf and (self._heap[0][1] <= now_s or self._heap[0][0] <= now_s + TIMER_S):
            item = heapq.heappop(self._heap)[3]
            del self._until[item]
            found.append(item)
        return found
