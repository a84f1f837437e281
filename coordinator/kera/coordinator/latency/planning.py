"""Evaluates each constraint once per window, and sets how long the buffers of its streams may wait from then on.

Brokers get all budgets at once, with the answer to a heartbeat, whenever they report a different version. A version
counts the budgets of one coordinator, above its epoch; 0 is the version of a cluster without constraints. Measurements
are in memory only. A new coordinator leaves brokers their budgets until it has received some heartbeats. Then it does
not know how long any buffer was allowed to wait, and takes all of the writers' time for permitted wait.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kera.coordinator.cluster.state import State
from kera.coordinator.cluster.work import Work
from kera.coordinator.ids import Launch
from kera.coordinator.latency.budgets import (
    Budget,
    Verdict,
    Wanted,
    budgets_of,
    judged,
    last_groups,
    next_streams,
    splits_of,
    steady,
)
from kera.coordinator.latency.figures import Figures, HopKey, MeasuredHops
from kera.coordinator.latency.filling import Filling
from kera.coordinator.latency.news import News
from kera.coordinator.latency.splitting import GATHER, UNLIMITED, Hop, Measured, Split
from kera.core.errors import UnknownStream
from kera.v1 import common_pb2, coordinator_pb2
from kera.v1 import latency_pb2 as messages

FIRST_BEATS = 3
"""Heartbeat intervals after which a new coordinator has heard from all brokers."""
REST = 4
"""After an evaluation the loop rests this many times as long for other work: a thousand long paths take a second."""
LAST_MAX = 100_000
"""Maximum of remembered hops, above which those without a constraint are forgotten."""
_COORDINATOR_SHIFT = 32
"""Shift of the coordinator's epoch in a version."""


class Shown(NamedTuple):
    """A constraint in the form for metrics, as of its last window."""

    limit_us: int
    by_p99: bool
    violations: int
    not_held: bool
    hops: tuple[tuple[Hop, Figures], ...]


class View(NamedTuple):
    """A constraint with its present evaluation."""

    wanted: Wanted
    verdict: Verdict
    split: Split | None
    current: Mapping[Hop, Figures]
    violations: int


class Planning:
    """Evaluates each constraint once per window, and sets the time that buffers of its streams may wait."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._measured = MeasuredHops(self._is_alive)
        self._wanted: dict[str, Wanted] = {}
        """All constraints, by name."""
        self._looked_s: dict[str, float] = {}
        """The time of each constraint's last evaluation; a constraint without one is due."""
        self._splits: dict[str, Split] = {}
        """The present splits of the constraints whose streams all exist."""
        self._before: dict[str, Split] = {}
        """The splits until the last evaluation: part of the present measurements is from their time."""
        self._last: dict[Hop, Measured] = {}
        """Last measured time of each hop."""
        self._filling = Filling()
        self._budgets: dict[str, Budget] | None = None
        """The brokers' budgets by stream; None: this coordinator does not know what brokers use."""
        self._told = coordinator_pb2.StreamBudgets()
        self._last_version = state.coordinator_epoch << _COORDINATOR_SHIFT
        self._told_ids: dict[str, int] = {}
        """The ids of the streams in the brokers' budgets, by name."""
        self._broken: set[str] = set()
        """Constraints with a stream that did not exist at the last evaluation."""
        self._news = News()
        self._rests_until_s = float("-inf")
        """Constraints that are due are not evaluated before this time."""
        self._changed = False
        """A constraint has changed and was not evaluated yet."""
        self.violations: Counter[str] = Counter()
        """The number of windows in which a constraint was violated, by constraint."""
        self.shown: Mapping[str, Shown] = {}
        """For metrics; replaced as a whole."""
        self.work = Work()

    def load(self, constraints: Iterable[messages.LatencyConstraint]) -> None:
        """Load the constraints; they are evaluated once brokers have sent heartbeats."""
        settings, now_s = self._state.settings, self._state.clock.monotonic_s()
        for constraint in constraints:
            each = Wanted.of(constraint)
            wait_s = min(each.window_ms, FIRST_BEATS * settings.heartbeat_interval_ms) / 1000
            self._wanted[each.name] = each
            self._looked_s[each.name] = now_s + wait_s - each.window_ms / 1000
        if not self._wanted:
            self._budgets = {}

    @property
    def count(self) -> int:
        """The number of constraints."""
        return len(self._wanted)

    @property
    def not_held(self) -> int:
        """The number of constraints that were not held when they were evaluated last."""
        return self._news.not_held

    def put(self, name: str, constraint: messages.LatencyConstraint | None) -> None:
        """Apply a constraint that was stored, or was deleted, and plan anew."""
        self._looked_s.pop(name, None)
        if constraint is not None:
            self._wanted[name] = Wanted.of(constraint)
        else:
            del self._wanted[name]
            self._news.forget(name)
            self._broken.discard(name)
            del self.violations[name]
            self.shown = {each: shown for each, shown in self.shown.items() if each != name}
        self._splits.pop(name, None)
        self._before.pop(name, None)
        self._changed = True
        self.work.start("plan", self._plan)

    def _all(self) -> Iterable[Wanted]:
        return self._wanted.values()

    # -- brokers ---------------------------------------------------------------------------------------------------

    def heard(self, request: coordinator_pb2.HeartbeatRequest) -> coordinator_pb2.StreamBudgets | None:
        """Take the measurements of a living broker, and the version of its budgets.

        Returns the budgets to use from now on; None: the broker has them already.
        """
        self._measured.note(Launch(request.broker_id, request.broker_epoch), request.latency, request.latency_left_out)
        if self._budgets is None or self._told.version == request.budgets_version:
            return None
        return self._told

    def _is_alive(self, launch: Launch) -> bool:
        brokers = self._state.brokers
        return brokers.is_current(launch) and brokers.is_alive(launch.member_id)

    # -- evaluation ------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Evaluate the constraints that are due, and log changes."""
        now_s = self._state.clock.monotonic_s()
        self._news.tell(now_s)
        self._notice_streams()
        if self._changed or (now_s >= self._rests_until_s and any(self._is_due(each) for each in self._all())):
            self.work.start("plan", self._plan)

    def _notice_streams(self) -> None:
        """Make constraints due whose streams were created or deleted, however long their windows are."""
        gone = set()
        for stream, stream_id in self._told_ids.items():
            found = self._stream(stream)
            if found is None or found.stream_id != stream_id:
                gone.add(stream)
        there_again = [name for name in self._broken if not self._missing(self._wanted[name])]
        broken = [each.name for each in self._all() if not gone.isdisjoint(each.streams)] if gone else []
        for name in (*there_again, *broken):
            self._looked_s.pop(name, None)

    def _is_due(self, each: Wanted) -> bool:
        looked_s = self._looked_s.get(each.name)
        return looked_s is None or self._state.clock.monotonic_s() >= looked_s + each.window_ms / 1000

    async def _plan(self) -> None:
        """Evaluate the constraints that are due, and set budgets; repeat if constraints have changed meanwhile."""
        while True:
            self._changed, begun_s = False, self._state.clock.monotonic_s()
            await self._look([each for each in self._all() if self._is_due(each)])
            now_s = self._state.clock.monotonic_s()
            self._rests_until_s = now_s + REST * (now_s - begun_s)
            if not self._changed:
                return

    async def _look(self, due: Iterable[Wanted]) -> None:
        state, pace = self._state, self._state.pace()
        self._measured.forget_lost()
        counted, shown = [], dict(self.shown)
        for each in due:
            await pace.step()
            if not self._is_current(each):
                continue
            self._looked_s[each.name] = state.clock.monotonic_s()
            missing = self._missing(each)
            if missing:
                self._splits.pop(each.name, None)
                self._before.pop(each.name, None)
                shown.pop(each.name, None)
                self._broken.add(each.name)
                self._news.saw(each.name, Verdict(messages.LATENCY_STATE_BROKEN, reason=missing))
                continue
            self._broken.discard(each.name)
            counted.append(each)
            current = self._current(each)
            self._note(each, current)
            late = self._judge(each, current)
            violations, hops = self.violations[each.name], tuple(current.items())
            shown[each.name] = Shown(each.limit_us, each.by_p99, violations, late, hops)
        self._news.tell(state.clock.monotonic_s())
        names = {each.name for each in counted}
        others = {name: found for name, found in self._splits.items() if name not in names}
        splits = await state.in_slices(splits_of(counted, others, self._last))
        for each in filter(self._is_current, counted):
            if each.name in self._splits:
                self._before[each.name] = self._splits[each.name]
            self._splits[each.name] = splits[each.name]
        self.shown = {name: each for name, each in shown.items() if name in self._wanted}
        there = [each for each in self._all() if not self._missing(each)]
        if all(each.name in self._splits for each in there):  # else those without a split are next
            budgets = await state.in_slices(budgets_of(there, dict(self._splits)))
            if not self._changed:  # else the changed ones are next
                self._tell(budgets, next_streams(there), last_groups(there))
        if len(self._last) > LAST_MAX:
            kept = {hop for each in self._all() for hop in each.hops}
            self._last = {hop: last for hop, last in self._last.items() if hop in kept}

    def _is_current(self, each: Wanted) -> bool:
        return self._wanted.get(each.name) is each

    def _note(self, each: Wanted, current: Mapping[Hop, Figures]) -> None:
        """Remember how long hops took, and how long their buffers were allowed to wait meanwhile."""
        for hop, found in current.items():
            granted_us, window_ms = 0.0, each.window_ms
            budget = None if self._budgets is None else self._budgets.get(hop.stream)
            if budget is not None:
                granted_us, window_ms = budget.granted_us(hop), budget.window_ms
            elif self._budgets is None and hop.hop == GATHER:
                granted_us = math.inf
            most_us = UNLIMITED
            if hop.hop == GATHER:
                granted_us = max(granted_us, found.own_linger_us)  # a wait that writers chose themselves is no need
                now_s = self._state.clock.monotonic_s()
                self._filling.look(hop.stream, found.mean_us, found.p99_us, window_ms / 1000, now_s)
                most_us = self._filling.most_us(hop.stream)
            self._last[hop] = Measured(found.chunks, found.mean_us, found.p99_us, window_ms, granted_us, most_us)

    def _judge(self, each: Wanted, current: Mapping[Hop, Figures]) -> bool:
        """Record whether a constraint was held over its last window; return whether it was violated."""
        found = self._splits.get(each.name)
        if found is None:
            return False  # it is new: earlier records were under no limit
        verdict = judged(each, found, current)
        took_us = verdict.p99_us if each.by_p99 else verdict.mean_us
        late = took_us > each.limit_us
        self.violations[each.name] += late
        self._news.saw(each.name, verdict)
        return late

    def _tell(
        self,
        budgets: Mapping[str, Budget],
        following: Mapping[str, Sequence[tuple[str, str]]],
        last: Mapping[str, Sequence[str]],
    ) -> None:
        """Set the brokers' budgets. `following`: by stream the consumer groups that read it, with the streams
        they write to.

        `last`: by stream the consumer groups with which a path ends.
        """
        known = self._budgets or {}
        steadied = {stream: steady(known.get(stream), budget) for stream, budget in budgets.items()}
        ids = {each.name: each.stream_id for each in map(self._stream, steadied) if each is not None}
        self._told_ids = ids
        told = [steadied[stream].message(ids[stream]) for stream in sorted(ids)]
        for stream, message in zip(sorted(ids), told, strict=True):
            message.ends.consumer_groups.extend(last.get(stream, ()))
            message.ends.SetInParent()  # also if there are none: brokers need to know that
            for group, next_stream in following.get(stream, ()):
                if next_stream in ids:
                    message.next.add(consumer_group=group, stream_id=ids[next_stream])
        if self._budgets is None or told != list(self._told.budgets):
            self._last_version += 1
            self._told = coordinator_pb2.StreamBudgets(version=self._last_version, budgets=told)
        self._budgets = steadied
        for stream, budget in steadied.items():
            self._filling.grant(stream, budget.gather_us, self._state.clock.monotonic_s())
        self._filling.keep(steadied)

    # -- queries ---------------------------------------------------------------------------------------------------

    def view(self, name: str) -> View:
        """Return a constraint with its present evaluation."""
        each = self._wanted[name]
        missing = self._missing(each)
        if missing:
            verdict = Verdict(messages.LATENCY_STATE_BROKEN, reason=missing)
            return View(each, verdict, None, {}, self.violations[name])
        found, current = self._splits.get(name), self._current(each)
        verdict = judged(each, found, current, self._before.get(name))
        return View(each, verdict, found, current, self.violations[name])

    def advised_us(self, hop: Hop) -> int:
        """Return how long the buffer of a hop may wait according to the brokers' budgets."""
        budget = (self._budgets or {}).get(hop.stream)
        return 0 if budget is None else budget.granted_us(hop)

    def _current(self, each: Wanted) -> dict[Hop, Figures]:
        """Return the measurements over the last window; all streams of the constraint exist."""
        found = {}
        for hop in each.hops:
            stream_id = self._state.catalog.named(hop.stream).stream_id
            figures = self._measured.of(HopKey(stream_id, hop.hop, hop.group))
            if figures is not None:
                found[hop] = figures
        return found

    def _missing(self, each: Wanted) -> str:
        """Return in words which stream does not exist; empty if all do."""
        for stream in each.streams:
            if self._stream(stream) is None:
                return f"stream {stream!r} does not exist: the constraint is ignored until it does, or the path changes"
        return ""

    def _stream(self, name: str) -> common_pb2.StreamInfo | None:
        try:
            return self._state.catalog.named(name)
        except UnknownStream:
            return None
