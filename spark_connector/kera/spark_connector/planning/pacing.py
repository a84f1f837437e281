"""When the next micro-batch begins, and how much it takes, so that records are no later than a target. Pure: no
connection, and callers pass the time.

A micro-batch costs a fixed time, whatever its size, and some time per byte: ``duration = fixed + per_byte * bytes``.
Earlier micro-batches show both. Two rules follow, as for every buffer on a record's way:

* a micro-batch waits for more while the oldest record can still wait: until that record's creation + target - the
  expected duration of the micro-batch - a margin;
* a micro-batch takes no more than it can process within the target. So after a backlog Spark returns often enough to
  see new records. It also takes no more than is needed to make the fixed time a small part of it, so that there is room
  if it takes longer than expected.

The measurements are not kept over a restart; some micro-batches later they are known again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from kera.spark_connector.planning.offsets import EntryName, EntryOffset

MARGIN = 0.1
"""Share of the target that stays free."""
RECENT = 32
"""Number of micro-batches that count."""
LATEST = 16
"""Number of the latest of them, which show by how much durations currently exceed the formula."""
APART = 1.5
"""Size ratio from which two nearby micro-batches form a pair that shows the cost per byte."""
CLOSE = 3
"""Number of previous micro-batches that a new one is compared with. Comparing with one alone would show too little:
micro-batches become small just when one was slow."""
PAIRS = 32
"""Maximum number of pairs to keep."""
ALIKE = 8
"""After this number of micro-batches of similar size one is half as large, to learn more about the cost of a start."""
ALIKE_LATE = 2
"""The same number if micro-batches take longer than the target, when that cost has to be known well."""
ENOUGH = 5
"""Number of micro-batches to measure before a target is called too short."""
SLACK_MAX = 3.0
SLACK_OF_FEW = 0.2
"""Minimum slack while there are few measurements, which may all be quick by chance; it shrinks as they become many."""
FEW = 4
WORTH = 7
"""Duration of a full micro-batch, in multiples of the fixed time. More would save little, and a micro-batch would be
late when other work uses the same processors."""
WORTH_OF_TARGET = 0.4
"""Minimum duration of a full micro-batch, as a share of the target without its margin."""
STARTS_MAX = 64
"""Upper bound of the estimated cost of a start, in multiples of a micro-batch's size; more makes no difference."""
FIRST_BYTES = 4 << 20
"""Size of a micro-batch before the first measurement."""
HOLD_S = 0.1
"""Time for which an answer to Spark is delayed, at most twice that: stopping the query, and the query's other sources,
wait meanwhile."""
MOMENT_S = 0.001
"""The shortest wait."""
BEHIND = 4
"""Number of successive full micro-batches with growing waiting data that shows that more arrives than they take."""
HURRY_MAX = 10
"""Maximum number of times that the size of micro-batches is doubled."""


class MicroBatch(NamedTuple):
    """A finished micro-batch."""

    bytes: int
    seconds: float


class Starts:
    """Estimates the cost of starting a micro-batch, as the number of bytes that cost the same time.

    Other work on the same processors slows micro-batches down, for seconds or for hours, but it slows bytes as much as
    starts. So the ratio of both is estimated from micro-batches that follow one another, under mostly equal load, and
    is remembered for long; the present speed comes from the latest micro-batches. (A line through all of them would go
    wrong when micro-batches become smaller because they are slow: then large and small ones take the same time, as if
    only the start had a cost.)
    """

    def __init__(self) -> None:
        self._last: deque[MicroBatch] = deque(maxlen=CLOSE)
        self._pairs: deque[tuple[float, float]] = deque(maxlen=PAIRS)
        """The estimates of pairs, and their weights."""
        self.alike = 0
        """Number of successive micro-batches, up to the last one, whose sizes were similar to those before."""

    def done(self, one: MicroBatch) -> None:
        """Add the next finished micro-batch."""
        pairs = [sorted((before, one)) for before in self._last]
        apart = [(small, large) for small, large in pairs if large.bytes >= APART * small.bytes]
        for small, large in apart:
            self._compare(small, large)
        self.alike = 0 if apart or not pairs else self.alike + 1
        self._last.append(one)

    def _compare(self, small: MicroBatch, large: MicroBatch) -> None:
        more_s, more_bytes = large.seconds - small.seconds, large.bytes - small.bytes
        most = STARTS_MAX * large.bytes
        said = most if more_s <= 0 else small.seconds / more_s * more_bytes - small.bytes
        self._pairs.append((min(max(said, 0.0), most), more_bytes))

    @property
    def bytes(self) -> float | None:
        """The weighted median of the estimates, in which large pairs count most; None: there is no estimate."""
        left = sum(weight for _, weight in self._pairs) / 2
        for said, weight in sorted(self._pairs):
            left -= weight
            if left <= 0:
                return said
        return None


@dataclass(frozen=True)
class Fit:
    """The known cost of micro-batches."""

    fixed_s: float
    per_byte_s: float
    bytes_most: int
    """Size of the largest micro-batch so far. For a larger one the formula is not extrapolated: its cost is taken in
    proportion to this one, which is an upper bound for every line."""
    slack: float
    """Share by which micro-batches exceed the formula at most. The worst of the latest ones does not count, unless it
    is the last one, because its cause may persist."""
    told_apart: bool
    """Whether the sizes differ enough to separate both costs; if not, `fixed_s` is the whole cost, an upper bound."""

    @staticmethod
    def of(seen: Sequence[MicroBatch], start_bytes: float | None) -> Fit:
        """Return the fit of `seen`, which is not empty, if a start costs as much as `start_bytes` bytes."""
        bytes_most = max(one.bytes for one in seen)
        a_byte_s = [one.seconds / (one.bytes + (start_bytes or 0.0)) for one in seen]
        per_byte_s = median(a_byte_s)
        missed = [each / max(per_byte_s, 1e-15) for each in a_byte_s[-LATEST:]]
        worst = max(sorted(missed)[-2], missed[-1]) if len(missed) > 1 else 1.0
        slack = min(max(worst - 1, SLACK_OF_FEW * min(1.0, FEW / len(seen))), SLACK_MAX)
        if start_bytes is None:
            return Fit(per_byte_s * bytes_most, 0.0, bytes_most, slack, told_apart=False)
        return Fit(per_byte_s * start_bytes, per_byte_s, bytes_most, slack, told_apart=True)

    def seconds(self, of_bytes: float) -> float:
        """Return the maximum time of a micro-batch of `of_bytes` bytes."""
        known = self.fixed_s + self.per_byte_s * min(of_bytes, self.bytes_most)
        return known * max(1.0, of_bytes / self.bytes_most) * (1 + self.slack)

    def bytes_within(self, seconds: float) -> int:
        """Return how many bytes can be processed within `seconds`; 0 if not even one byte can.

        Unless both costs are `told_apart`, the largest micro-batch counts as if all of its time were for bytes. Then
        the result is too small, or a smaller micro-batch is tried.
        """
        known = seconds / (1 + self.slack)
        of_largest = self.fixed_s + self.per_byte_s * self.bytes_most
        if known >= of_largest or not self.told_apart:
            return int(min(self.bytes_most * known / max(of_largest, 1e-6), 1 << 60))
        if known <= self.fixed_s or self.per_byte_s == 0:
            return 0
        return int(min((known - self.fixed_s) / self.per_byte_s, self.bytes_most))


@dataclass(frozen=True)
class BatchDecision:
    """The decision about the waiting data."""

    wait_s: float
    """How much longer the data can wait; 0: a micro-batch begins now."""
    bytes_max: int
    """Maximum size of the micro-batch."""
    predicted_s: float | None
    """Predicted time of a micro-batch of the data that wait now, at most of `bytes_max`; None: unknown."""


class Pacer:
    """The pace of one query."""

    def __init__(self, target_s: float) -> None:
        self.target_s = target_s
        self._first: MicroBatch | None = None
        """Spark is slow at first, so the first micro-batch counts only until there is another one."""
        self._seen: deque[MicroBatch] = deque(maxlen=RECENT)
        self._fit: Fit | None = None
        self._starts = Starts()
        self._hurry = 0
        """How many times more data arrived than full micro-batches took. From 1 on they are as large as can end in
        time, and with each further time twice as large, to catch up; 0 again once a micro-batch takes all.
        """
        self._full_bytes: deque[int] = deque(maxlen=BEHIND + 1)
        """Waiting bytes at the beginnings of successive full micro-batches."""

    @property
    def usable_s(self) -> float:
        """The target without its margin."""
        return self.target_s * (1 - MARGIN)

    @property
    def fit(self) -> Fit | None:
        """The fit of the micro-batches so far; None: there was none yet."""
        if self._fit is None and (seen := self._seen or ([self._first] if self._first else [])):
            self._fit = Fit.of(list(seen), self._starts.bytes)
        return self._fit

    @property
    def bytes_max(self) -> int:
        """The most bytes that a micro-batch may take.

        That is what ends within the target, if the target can be kept when one micro-batch follows another: if the
        fixed time is no more than half of the target. Otherwise the target is missed after each full micro-batch
        anyway, and the query has to get through its waiting data: then a micro-batch may take more, up to where four
        fifths of its time go into bytes.

        It takes less if less is enough: its expected duration stays far below the target, as long as that hardly
        increases the number of micro-batches.
        """
        fit = self.fit
        if fit is None:
            return FIRST_BYTES
        room = fit.bytes_within(self.usable_s)
        if not fit.told_apart:
            # A smaller micro-batch separates the costs; if chunks are too large for a smaller one, a larger one does.
            return max(room // 2 if self._starts.alike == 1 else room, 2 * fit.bytes_most * (self._starts.alike > 1), 1)
        fixed_s = min(fit.fixed_s, self._quickest_s)  # the quickest micro-batch includes a start, too
        if 2 * fixed_s > self.usable_s:
            longest_s = min(5 * fixed_s, 8 * fixed_s - 3 * self.usable_s)
            room = max(room, fit.bytes_within(longest_s * (1 + fit.slack)))
        elif self._hurry == 0:
            worth_s = max(WORTH * fit.fixed_s, WORTH_OF_TARGET * self.usable_s)
            room = min(room, fit.bytes_within(worth_s * (1 + fit.slack)))
        if (last := self._seen[-1]).seconds > self.usable_s >= 2 * fixed_s:
            room = min(room, int(last.bytes * self.usable_s / last.seconds))  # whatever the formula predicts
        # However slow the latest micro-batches were, at least half of the time goes into bytes.
        room = max(room, min(last.bytes, int(self._starts.bytes or 0)))
        room <<= max(self._hurry - 1, 0)
        alike = ALIKE if last.seconds <= self.usable_s else ALIKE_LATE
        return max(room if self._starts.alike < alike else room // 2, 1)

    def done(self, of_bytes: int, seconds: float) -> None:
        """Note that a micro-batch of `of_bytes` bytes took `seconds`."""
        if of_bytes <= 0 or not 0 <= seconds < math.inf:
            return
        if self._first is None:
            self._first = MicroBatch(of_bytes, seconds)
        else:
            self._seen.append(MicroBatch(of_bytes, seconds))
            self._starts.done(self._seen[-1])
        self._fit = None

    def decide(self, waiting_bytes: int, oldest_s: float) -> BatchDecision:
        """Decide how long the waiting bytes, whose oldest record has this age, can still wait, and how many to take."""
        fit, bytes_max = self.fit, self.bytes_max
        if fit is None:
            return BatchDecision(0.0, bytes_max, None)
        # If small micro-batches have shown only noise, a few bytes may seem to cost nothing. But none took less than
        # the quickest one.
        predicted_s = max(fit.seconds(min(waiting_bytes, bytes_max)), self._quickest_s)
        wait_s = self.usable_s - oldest_s - predicted_s
        begins = waiting_bytes >= bytes_max or wait_s < MOMENT_S
        return BatchDecision(0.0 if begins else wait_s, bytes_max, predicted_s)

    def began(self, waiting_bytes: int, taken_bytes: int) -> None:
        """Note that a micro-batch has begun, and how many of the waiting bytes it took."""
        if taken_bytes >= waiting_bytes:
            self._full_bytes.clear()
            self._hurry = 0
            return
        self._full_bytes.append(waiting_bytes)
        waited = list(self._full_bytes)
        if len(waited) > BEHIND and all(one < next_one for one, next_one in pairwise(waited)):
            self._full_bytes.clear()
            self._hurry = min(self._hurry + 1, HURRY_MAX)

    @property
    def falls_behind(self) -> bool:
        """Whether more data arrive than micro-batches can take that end in time."""
        return self._hurry > 1

    def least_s(self, on_the_way_s: float) -> float | None:
        """Return the shortest target that a record can keep that takes `on_the_way_s` to arrive; None: unknown yet."""
        if len(self._seen) < ENOUGH or (fit := self.fit) is None:
            return None
        fixed_s = fit.fixed_s if fit.told_apart else 0.0
        return (max(fixed_s, self._quickest_s) + on_the_way_s) / (1 - MARGIN)

    @property
    def _quickest_s(self) -> float:
        return min((one.seconds for one in self._seen), default=0.0)


class Pause(NamedTuple):
    """How to answer Spark while the waiting data can wait."""

    sleep_s: float
    again: bool
    """Whether to look again after the sleep, and answer then; otherwise the answer is that nothing is new."""


def pause(wait_s: float, recall_s: float, look_s: float = 0.0) -> Pause | None:
    """Return how to wait for `wait_s`; None: begin now, because after a wait it would be too late.

    `recall_s`: the time from the answer that nothing is new until Spark asks again. `look_s`: the time of a look at the
    cluster. Spark asks again at once, or when its trigger fires. In the first case the answer is delayed, so that Spark
    does not ask a hundred times a second; in the second case a delay has no use.
    """
    wait_s -= look_s
    if recall_s > HOLD_S:
        return Pause(0.0, again=False) if wait_s >= recall_s else None
    if wait_s <= HOLD_S + recall_s:
        return Pause(wait_s, again=True) if wait_s >= MOMENT_S else None
    return Pause(HOLD_S, again=False)


@dataclass
class _Mark:
    head: EntryOffset
    before_s: float | None
    """The last look before the head had come this far; None: there was no earlier look."""
    seen_s: float


@dataclass
class _Entry:
    marks: deque[_Mark] = field(default_factory=deque)
    """The entry's heads at earlier looks, in order."""
    created: tuple[EntryOffset, float] | None = None
    """A place, and when the record there was made, on the callers' clock."""


MARKS_MAX = 64
"""Maximum number of marks per entry; beyond it, the oldest two are merged."""
BETWEEN_S = 0.5
"""Maximum time between two looks that show when a record arrived."""


class Arrivals:
    """Tracks since when the records wait that no micro-batch has taken.

    The bounds of entries show that records have arrived, but not when they were made; only a chunk shows that. So a few
    chunks are read, and the delay of their records until arrival is assumed for the others.
    """

    def __init__(self) -> None:
        self._entries: dict[EntryName, _Entry] = {}
        self._looked_s: float | None = None
        self._early_s: deque[float] = deque(maxlen=16)
        """Times from a record's creation to the last look before it was seen."""
        self._on_the_way_s: deque[float] = deque(maxlen=16)
        """Ages of records when they were first seen."""

    def look(
        self, starts: Mapping[EntryName, EntryOffset], heads: Mapping[EntryName, EntryOffset], at_s: float
    ) -> None:
        """Note that the data between `starts` and `heads` wait at this moment, in all entries with any."""
        self._entries = {name: self._entries.get(name, _Entry()) for name in heads}
        for name, head in heads.items():
            entry = self._entries[name]
            while entry.marks and (entry.marks[0].head <= starts[name] or entry.marks[0].head > head):
                entry.marks.popleft()
            if not entry.marks or entry.marks[-1].head < head:
                entry.marks.append(_Mark(head, self._looked_s, at_s))
            if len(entry.marks) > MARKS_MAX:
                entry.marks[1].before_s, entry.marks[1].seen_s = entry.marks[0].before_s, entry.marks[0].seen_s
                entry.marks.popleft()
        self._looked_s = at_s

    def unknown(self, starts: Mapping[EntryName, EntryOffset], entries_max: int) -> list[EntryName]:
        """Return the entries whose records wait longest, at most `entries_max`.

        Empty if the creation time of the first waiting record is known for any entry.
        """
        if any(self._created_of(entry, starts[name]) is not None for name, entry in self._entries.items()):
            return []
        return sorted(self._entries, key=lambda name: (self._entries[name].marks[0].before_s or -math.inf, name))[
            :entries_max
        ]

    def created(
        self,
        made_s: Mapping[EntryName, float],
        starts: Mapping[EntryName, EntryOffset],
        believed_s: float = math.inf,
    ) -> float:
        """Note when the first waiting record of some entries was made.

        If a record seems to be made more than `believed_s` before its earliest possible arrival, it counts as made at
        that arrival: its producer's clock is behind, or it is too late in any case. Return the longest such time; 0:
        all times are believed.
        """
        odd_s = 0.0
        for name, at_s in made_s.items():
            entry = self._entries[name]
            mark = entry.marks[0]
            if mark.before_s is not None and mark.before_s - at_s > believed_s:
                odd_s = max(odd_s, mark.before_s - at_s)
                entry.created = starts[name], mark.before_s
                continue
            entry.created = starts[name], at_s
            if mark.before_s is not None and mark.seen_s - mark.before_s <= BETWEEN_S:
                self._early_s.append(max(mark.before_s - at_s, 0.0))
                self._on_the_way_s.append(max(mark.seen_s - at_s, 0.0))
        return odd_s

    def oldest_s(self, starts: Mapping[EntryName, EntryOffset], at_s: float) -> float:
        """Return the maximum age of the oldest waiting record; infinite if it is unknown."""
        early_s = max(self._early_s, default=0.0)
        return max(
            (self._age_s(entry, starts[name], early_s, at_s) for name, entry in self._entries.items()), default=0.0
        )

    @property
    def on_the_way_s(self) -> float:
        """The shortest time that records needed to arrive; 0 before the first measurement."""
        return min(self._on_the_way_s, default=0.0)

    @staticmethod
    def _created_of(entry: _Entry, start: EntryOffset) -> float | None:
        return entry.created[1] if entry.created is not None and entry.created[0] == start else None

    def _age_s(self, entry: _Entry, start: EntryOffset, early_s: float, at_s: float) -> float:
        mark = entry.marks[0]
        made_s = self._created_of(entry, start)
        if made_s is not None:  # clocks may differ: a record that was seen was made before
            return at_s - min(made_s, mark.seen_s)
        return math.inf if mark.before_s is None else at_s - mark.before_s + early_s
