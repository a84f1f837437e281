"""When the next micro-batch begins, and how much it takes, so that records are no later than a target. Pure: no
connection, and the clock is handed in.

A micro-batch costs a fixed time, whatever is in it, and some time per byte. Both are told from those that have been:
``duration = fixed + per_byte * bytes``. From that follow two rules, as for every buffer on a record's way:

* it waits for more while the oldest record can still wait: until its creation + target - what the micro-batch will take
  - a margin;
* it takes no more than can be done in the target. So after a backlog Spark comes back often enough to see what is new;
  and no more than it takes to make the fixed time a small part of it, so that it may well take longer than expected.

Nothing is remembered over a restart: some micro-batches later it is known again.
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
"""Micro-batches that count."""
LATEST = 16
"""The latest of these, which show by how much the law is missed at present."""
APART = 1.5
"""Two micro-batches that are close to each other say what a byte costs if one is so many times larger."""
CLOSE = 3
"""Counting one by one. With the next one alone it would be told too little: it is small just where one was slow."""
PAIRS = 32
"""Maximum of such pairs."""
ALIKE = 8
"""So many that are alike; then one is half as large, as else nothing more would be told of what a start costs."""
ALIKE_LATE = 2
"""The same where they take longer than the target: that is to be known well."""
ENOUGH = 5
"""So many have to be known before a target is called too short."""
SLACK_MAX = 3.0
SLACK_OF_FEW = 0.2
"""At least, while there are few, which may all have been quick by chance; with many, less and less."""
FEW = 4
WORTH = 7
"""A full micro-batch takes so many times the fixed time: more saves little, and others that come to use the same
processors make it late."""
WORTH_OF_TARGET = 0.4
"""But at least so much of the target without its margin."""
STARTS_MAX = 64
"""Times the size of a micro-batch; more is all the same."""
FIRST_BYTES = 4 << 20
"""Size of a micro-batch while nothing is known."""
HOLD_S = 0.1
"""For so long a question of Spark's stays without an answer, or twice that: stopping the query, and other sources of
it, wait meanwhile."""
MOMENT_S = 0.001
"""Nothing waits for less."""
BEHIND = 4
"""Full micro-batches in a row, at each of which more waits than at the one before: more comes than they take."""
HURRY_MAX = 10
"""Micro-batches become no larger than by so many powers of two."""


class MicroBatch(NamedTuple):
    """One that has been."""

    bytes: int
    seconds: float


class Starts:
    """How many bytes cost as much as a micro-batch costs that has none.

    All that uses the same processors makes micro-batches slower, for seconds or for hours; but a byte as much as a
    start. So what they have to each other is told from such as follow one another, when that was mostly the same, and
    is remembered for long; and how slow all is, from the latest ones. (A line through all of them would go wrong where
    they become smaller because they are slow: then large and small ones take the same, as if it were the start that
    costs.)
    """

    def __init__(self) -> None:
        self._last: deque[MicroBatch] = deque(maxlen=CLOSE)
        self._pairs: deque[tuple[float, float]] = deque(maxlen=PAIRS)
        """The estimates of pairs, and their weights."""
        self.alike = 0
        """So many were like those before them, up to now."""

    def done(self, one: MicroBatch) -> None:
        """The next one has been."""
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
        """The weighted median of the estimates, in which large pairs count most; None: there was none."""
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
    """Size of the largest one that was seen. The cost of a larger one is not guessed by the line but, as a bound that
    holds for every line, in proportion to this one."""
    slack: float
    """They take longer than by the law, by this share at most; leaving out the worst of the latest ones, unless it is
    the last one: who makes it slow may still be there."""
    told_apart: bool
    """Their sizes differ enough; else all is `fixed_s`, which then is an upper bound."""

    @staticmethod
    def of(seen: Sequence[MicroBatch], start_bytes: float | None) -> Fit:
        """The fit of `seen`, which has at least one, if starting costs as much as `start_bytes`."""
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
        """Maximum time of a micro-batch of so many bytes."""
        known = self.fixed_s + self.per_byte_s * min(of_bytes, self.bytes_most)
        return known * max(1.0, of_bytes / self.bytes_most) * (1 + self.slack)

    def bytes_within(self, seconds: float) -> int:
        """How many bytes can be done in so many seconds; 0 if not even one can.

        While it is not told apart what a byte costs, the largest one is taken to cost nothing but its bytes: too little
        is planned then, or a smaller one is tried.
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
    """It can wait so much longer; 0: a micro-batch begins now."""
    bytes_max: int
    """Maximum size of the micro-batch."""
    predicted_s: float | None
    """Predicted time of a micro-batch of the data that wait now, or of so many bytes; None: unknown."""


class Pacer:
    """The pace of one query."""

    def __init__(self, target_s: float) -> None:
        self.target_s = target_s
        self._first: MicroBatch | None = None
        """Spark is slow at first; so this one counts only until another one is known."""
        self._seen: deque[MicroBatch] = deque(maxlen=RECENT)
        self._fit: Fit | None = None
        self._starts = Starts()
        self._hurry = 0
        """So many times more came than full micro-batches took. Until one takes all, they are as large as can end in
        time; and if that was too little, twice as large each time, as what counts then is to get through.
        """
        self._full_bytes: deque[int] = deque(maxlen=BEHIND + 1)
        """Waiting bytes at the beginnings of successive full micro-batches."""

    @property
    def usable_s(self) -> float:
        """The target without its margin."""
        return self.target_s * (1 - MARGIN)

    @property
    def fit(self) -> Fit | None:
        """The fit of micro-batches; None: nothing is known yet."""
        if self._fit is None and (seen := self._seen or ([self._first] if self._first else [])):
            self._fit = Fit.of(list(seen), self._starts.bytes)
        return self._fit

    @property
    def bytes_max(self) -> int:
        """The most that a micro-batch may take.

        What ends within the target, as long as that can be kept where one micro-batch follows another: if the fixed
        part is no more than half of it. Beyond that it is missed after each full one anyway, and what counts is that
        the query gets through what waits: more may be taken, up to where four fifths of the time go into bytes.

        And less, if less will do: what it is expected to take stays far from the target, as long as hardly more
        micro-batches are started for that than need be.
        """
        fit = self.fit
        if fit is None:
            return FIRST_BYTES
        room = fit.bytes_within(self.usable_s)
        if not fit.told_apart:
            # That is told by one that is smaller; and where there is none, as chunks are large, by a larger one.
            return max(room // 2 if self._starts.alike == 1 else room, 2 * fit.bytes_most * (self._starts.alike > 1), 1)
        fixed_s = min(fit.fixed_s, self._quickest_s)  # which has begun, too
        if 2 * fixed_s > self.usable_s:
            longest_s = min(5 * fixed_s, 8 * fixed_s - 3 * self.usable_s)
            room = max(room, fit.bytes_within(longest_s * (1 + fit.slack)))
        elif self._hurry == 0:
            worth_s = max(WORTH * fit.fixed_s, WORTH_OF_TARGET * self.usable_s)
            room = min(room, fit.bytes_within(worth_s * (1 + fit.slack)))
        if (last := self._seen[-1]).seconds > self.usable_s >= 2 * fixed_s:
            room = min(room, int(last.bytes * self.usable_s / last.seconds))  # whatever the law says
        # However slow the latest ones were, half of the time goes into bytes.
        room = max(room, min(last.bytes, int(self._starts.bytes or 0)))
        room <<= max(self._hurry - 1, 0)
        alike = ALIKE if last.seconds <= self.usable_s else ALIKE_LATE
        return max(room if self._starts.alike < alike else room // 2, 1)

    def done(self, of_bytes: int, seconds: float) -> None:
        """A micro-batch of so many bytes has taken so long."""
        if of_bytes <= 0 or not 0 <= seconds < math.inf:
            return
        if self._first is None:
            self._first = MicroBatch(of_bytes, seconds)
        else:
            self._seen.append(MicroBatch(of_bytes, seconds))
            self._starts.done(self._seen[-1])
        self._fit = None

    def decide(self, waiting_bytes: int, oldest_s: float) -> BatchDecision:
        """Decide how long so many bytes can still wait whose oldest record is so old, and how many of them to take."""
        fit, bytes_max = self.fit, self.bytes_max
        if fit is None:
            return BatchDecision(0.0, bytes_max, None)
        # Where small ones have told no more than noise, little may seem to cost nothing; but all took some time.
        predicted_s = max(fit.seconds(min(waiting_bytes, bytes_max)), self._quickest_s)
        wait_s = self.usable_s - oldest_s - predicted_s
        begins = waiting_bytes >= bytes_max or wait_s < MOMENT_S
        return BatchDecision(0.0 if begins else wait_s, bytes_max, predicted_s)

    def began(self, waiting_bytes: int, taken_bytes: int) -> None:
        """A micro-batch has begun, with so much of what waited."""
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
        """More comes than micro-batches take that end in time."""
        return self._hurry > 1

    def least_s(self, on_the_way_s: float) -> float | None:
        """The shortest target that any record can keep, if it takes `on_the_way_s` until it is there; None: nobody
        knows yet.
        """
        if len(self._seen) < ENOUGH or (fit := self.fit) is None:
            return None
        fixed_s = fit.fixed_s if fit.told_apart else 0.0
        return (max(fixed_s, self._quickest_s) + on_the_way_s) / (1 - MARGIN)

    @property
    def _quickest_s(self) -> float:
        return min((one.seconds for one in self._seen), default=0.0)


class Pause(NamedTuple):
    """How a question of Spark's is answered while what waits can wait."""

    sleep_s: float
    again: bool
    """Look again after that, and answer then; else the answer is that nothing is new."""


def pause(wait_s: float, recall_s: float, look_s: float = 0.0) -> Pause | None:
    """How to wait for `wait_s` if Spark asks again `recall_s` after it was told that nothing is new, and a look at the
    cluster takes `look_s`; None: it would be too late then, so begin now.

    Spark asks again at once, or when its trigger says. In the first case the answer is held back for a while, so that
    it does not ask a hundred times a second; in the second one nothing is won by that.
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
    """When it was not there yet; None: nobody has looked before."""
    seen_s: float


@dataclass
class _Entry:
    marks: deque[_Mark] = field(default_factory=deque)
    """How far the entry went, in order."""
    created: tuple[EntryOffset, float] | None = None
    """When the record at this place was made, on the clock that is handed in."""


MARKS_MAX = 64
"""Per entry; beyond that, two become one."""
BETWEEN_S = 0.5
"""Looks that are no further apart say when a record has come."""


class Arrivals:
    """Since when the records wait that no micro-batch has taken.

    Who asks for bounds of entries sees records come, but not when they were made; who reads a chunk knows. So the
    second is asked of a few, and what records need until they are there is concluded for the others.
    """

    def __init__(self) -> None:
        self._entries: dict[EntryName, _Entry] = {}
        self._looked_s: float | None = None
        self._early_s: deque[float] = deque(maxlen=16)
        """How long records were made before the last look at which they were not there."""
        self._on_the_way_s: deque[float] = deque(maxlen=16)
        """How old records were when they were first seen."""

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
        """The entries with the records that wait longest, if it is not known when any of the oldest was made."""
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
        """When the first record that waits was made, of some entries.

        One that was made more than `believed_s` before it can have come is taken to have been made when it can have
        come: the clock of who has made it is behind, or it is too late whatever is done. The longest such time is
        given back; 0: all is believed.
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
        """How old the oldest record that waits may be; infinite where nobody knows."""
        early_s = max(self._early_s, default=0.0)
        return max(
            (self._age_s(entry, starts[name], early_s, at_s) for name, entry in self._entries.items()), default=0.0
        )

    @property
    def on_the_way_s(self) -> float:
        """The least time that records need until they are there, as far as that was seen."""
        return min(self._on_the_way_s, default=0.0)

    @staticmethod
    def _created_of(entry: _Entry, start: EntryOffset) -> float | None:
        return entry.created[1] if entry.created is not None and entry.created[0] == start else None

    def _age_s(self, entry: _Entry, start: EntryOffset, early_s: float, at_s: float) -> float:
        mark = entry.marks[0]
        made_s = self._created_of(entry, start)
        if made_s is not None:  # clocks may differ: what is seen is there
            return at_s - min(made_s, mark.seen_s)
        return math.inf if mark.before_s is None else at_s - mark.before_s + early_s
