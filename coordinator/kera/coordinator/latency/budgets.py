"""The budgets that several constraints together give the buffers of each stream, and which constraints are held. Pure.

Each constraint is split on its own. If several concern a stream, each of its buffers gets the least time that any of
them allows. A constraint that has time left over because of that gives it to its other streams.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from kera.coordinator.latency.figures import Figures
from kera.coordinator.latency.paths import P99, WORDS, stages_of
from kera.coordinator.latency.splitting import (
    FILLING,
    GATHER,
    HAND_OVER,
    MARGIN,
    PREFETCH,
    REPLICATE,
    UNLIMITED,
    WORK,
    Hop,
    Measured,
    Part,
    Split,
    hops_of,
    split,
)
from kera.core.latency.hop import Hop as Kind
from kera.v1 import latency_pb2 as messages

STEADY = 0.05
"""Relative change of a budget below which it stays as it is, because each change is sent to all brokers."""
STEADY_US = 500
STEADY_PART = MARGIN / 10
"""Maximum change that is ignored, as a share of a stream's whole budget: more would use up the margin."""
NOTABLE = 0.02
"""Share of a limit; a hop that exceeds its part by less than this is not reported."""


class Wanted(NamedTuple):
    """A constraint in the form in which it is split."""

    name: str
    hops: tuple[Hop, ...]
    limit_us: int
    window_ms: int
    by_p99: bool

    @classmethod
    def of(cls, constraint: messages.LatencyConstraint) -> Wanted:
        """Return this form of a checked constraint."""
        hops = tuple(hops_of(stages_of(constraint.path)))
        return cls(constraint.name, hops, constraint.limit_us, constraint.window_ms, by_p99=constraint.statistic == P99)

    @property
    def streams(self) -> list[str]:
        """The streams in the order of the path."""
        return list(dict.fromkeys(hop.stream for hop in self.hops))


class Budget(NamedTuple):
    """How long the buffers of a stream may wait."""

    window_ms: int
    limit_us: int
    """The limit for all of the stream's hops together."""
    gather_us: int
    replicate_us: int
    hand_over_us: int
    constraint: str
    """The constraint that allows the least."""

    def message(self, stream_id: int) -> messages.StreamBudget:
        """Return the budget in the form for brokers."""
        return messages.StreamBudget(stream_id=stream_id, **self._asdict())

    def granted_us(self, hop: Hop) -> int:
        """Return how long the buffer of a hop may wait, in microseconds."""
        return {GATHER: self.gather_us, REPLICATE: self.replicate_us, HAND_OVER: self.hand_over_us}.get(hop.hop, 0)


class Verdict(NamedTuple):
    """Whether a constraint was held in the last window."""

    state: messages.LatencyState.ValueType
    mean_us: int = 0
    p99_us: int = 0
    least_limit_us: int = 0
    violators: tuple[Hop, ...] = ()
    """Hops that take more than their part, if the limit is exceeded; the hop that exceeds its part the most
    comes first.
    """
    reason: str = ""


def splits_of(
    due: Sequence[Wanted], others: Mapping[str, Split], measured: Mapping[Hop, Measured]
) -> Generator[None, None, dict[str, Split]]:
    """Return the splits of the constraints that are due; `others` stay as they are. Yields between constraints."""
    found, caps = {}, _Caps()
    for name, other in others.items():
        yield
        caps.add(name, other)
    for each in due:
        yield
        found[each.name] = split(each.hops, each.limit_us, measured, by_p99=each.by_p99)
        caps.add(each.name, found[each.name])
    for each in due:
        yield
        cap = caps.besides(each.name)
        if any(cap(hop) < part.grant_us for hop, part in found[each.name].parts.items()):
            found[each.name] = split(each.hops, each.limit_us, measured, by_p99=each.by_p99, caps=cap)
    return found


class _Caps:
    """The limits that each constraint sets for the buffers of streams; those of hand-over are the same for all
    readers.
    """

    def __init__(self) -> None:
        self._least: dict[tuple[str, int], list[tuple[int, str]]] = {}
        """The two constraints that allow the least, by stream and hop: at least one of them is not the caller's own."""

    def add(self, name: str, found: Split) -> None:
        """Add the limits of a constraint."""
        for hop, part in found.parts.items():
            if hop.hop in FILLING:
                known = self._least.setdefault((hop.stream, hop.hop), [])
                insort(known, (part.grant_us, name))
                del known[2:]

    def besides(self, name: str) -> Callable[[Hop], float]:
        """Return a function of a hop: the least time that the constraints other than `name` allow."""

        def cap(hop: Hop) -> float:
            known = self._least.get((hop.stream, hop.hop), ())
            return next((float(grant_us) for grant_us, whose in known if whose != name), UNLIMITED)

        return cap


def budgets_of(wanted: Iterable[Wanted], splits: Mapping[str, Split]) -> Generator[None, None, dict[str, Budget]]:
    """Return for each stream the least that any constraint allows. Yields between constraints."""
    of_streams: defaultdict[str, list[_Claim]] = defaultdict(list)
    for each in wanted:
        yield
        stages: defaultdict[str, dict[int, Part]] = defaultdict(dict)
        for hop, part in splits[each.name].parts.items():
            stages[hop.stream][hop.hop] = part
        for stream, parts in stages.items():
            of_streams[stream].append(_Claim(each, parts, sum(part.allowed_us for part in parts.values())))
    found = {}
    for stream, claims in of_streams.items():
        yield
        found[stream] = _least(claims)
    return found


def next_streams(wanted: Iterable[Wanted]) -> dict[str, list[tuple[str, str]]]:
    """Return for each stream the consumer groups on paths that read it, each with the stream to which it writes."""
    found: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    for each in wanted:
        for hop, following in pairwise(each.hops):
            if hop.group and hop.stream != following.stream:
                found[hop.stream].add((hop.group, following.stream))
    return {stream: sorted(pairs) for stream, pairs in found.items()}


def last_groups(wanted: Iterable[Wanted]) -> dict[str, list[str]]:
    """Return for each stream the consumer groups that read it as the end of a path."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for each in wanted:
        if each.hops[-1].group:
            found[each.hops[-1].stream].add(each.hops[-1].group)
    return {stream: sorted(groups) for stream, groups in found.items()}


class _Claim(NamedTuple):
    """The limits that a constraint sets for a stream."""

    of: Wanted
    parts: Mapping[int, Part]
    limit_us: int


def _least(claims: Sequence[_Claim]) -> Budget:
    strictest = min(claims, key=lambda each: (each.parts[GATHER].grant_us, each.of.limit_us, each.of.name))
    return Budget(
        window_ms=strictest.of.window_ms,
        limit_us=min(each.limit_us for each in claims),
        gather_us=strictest.parts[GATHER].grant_us,
        replicate_us=min(each.parts[REPLICATE].grant_us for each in claims),
        # A path that ends with the stream does not limit its readers.
        hand_over_us=min((each.parts[HAND_OVER].grant_us for each in claims if HAND_OVER in each.parts), default=0),
        constraint=strictest.of.name,
    )


def steady(before: Budget | None, after: Budget) -> Budget:
    """Return `before` if `after` hardly differs, else `after`."""
    if before is None or (before.window_ms, before.constraint) != (after.window_ms, after.constraint):
        return after
    pairs = zip(before[1:5], after[1:5], strict=True)
    slack_us = min(STEADY_US, STEADY_PART * after.limit_us)
    near = all(abs(old - new) <= max(STEADY * old, slack_us) for old, new in pairs)
    return before if near else after


def judged(wanted: Wanted, found: Split | None, current: Mapping[Hop, Figures], before: Split | None = None) -> Verdict:
    """Return whether a constraint is held. `current`: the hops with any chunks within the last window.

    `before`: the split that applied in part of that window.
    """
    measured = [(hop, current[hop]) for hop in wanted.hops if hop in current]
    if not measured:
        return Verdict(messages.LATENCY_STATE_UNKNOWN, reason="nothing was measured within the last window")
    mean_us, p99_us = sum(each.mean_us for _, each in measured), sum(each.p99_us for _, each in measured)
    own = {hop: each for hop, each in measured if each.own_linger_us > max(_granted_us(hop, found, before), STEADY_US)}
    infeasible = found is not None and not found.is_feasible
    least_us = found.least_limit_us if found is not None and infeasible else 0
    took_us = p99_us if wanted.by_p99 else mean_us
    if took_us <= wanted.limit_us:
        reason = f"with less than {MARGIN:.0%} to spare" if infeasible else ""
        return Verdict(messages.LATENCY_STATE_HELD, mean_us, p99_us, reason=reason)
    beyond = {}
    for hop, figures in measured:
        part, other = _part(before or found, hop), _part(found, hop)
        allowed_us = part.need_us + max(part.grant_us, other.grant_us)
        beyond[hop] = (figures.p99_us if wanted.by_p99 else figures.mean_us) - allowed_us
    ordered = sorted(beyond, key=lambda hop: -beyond[hop])
    violators = tuple(hop for hop in ordered if beyond[hop] > NOTABLE * wanted.limit_us) or (ordered[0],)
    if found is not None and infeasible and found.slowest is not None:
        slowest = found.slowest
        return Verdict(
            messages.LATENCY_STATE_INFEASIBLE,
            mean_us,
            p99_us,
            least_us,
            (slowest, *(hop for hop in violators if hop != slowest)),
            f"records take longer even without buffering, most of it in {in_words(slowest)}:"
            f" the minimum limit is {math.ceil(least_us / 1000)} ms",
        )
    statistic = WORDS[P99] if wanted.by_p99 else "mean"
    reason = f"the {statistic} is {took_us / 1000:.1f} ms; {in_words(violators[0])} exceeds its share the most"
    for hop, figures in own.items():
        own_ms = figures.own_linger_us / 1000
        reason += f"; a producer of {hop.stream} sets linger_ms {own_ms:g} itself, which overrides the constraint"
    return Verdict(messages.LATENCY_STATE_VIOLATED, mean_us, p99_us, least_us, violators, reason)


def _granted_us(hop: Hop, *splits: Split | None) -> int:
    return max(_part(each, hop).grant_us for each in splits)


def worst_of(wanted: Wanted, verdict: Verdict, current: Mapping[Hop, Figures]) -> Hop | None:
    """Return the measured hop that exceeds its part the most; while the limit is held, the hop that takes most;
    or None.
    """
    measured = [hop for hop in (verdict.violators or wanted.hops) if hop in current]
    if verdict.violators or not measured:
        return measured[0] if measured else None
    return max(measured, key=lambda hop: current[hop].p99_us if wanted.by_p99 else current[hop].mean_us)


def not_heard(hops: Iterable[Hop], current: Mapping[Hop, Figures]) -> list[tuple[str, str]]:
    """Return the streams with measured chunks, each with a consumer group for which no consumption was measured."""
    written = {hop.stream for hop in current}
    taken = {(hop.stream, hop.group) for hop in current if hop.hop in {PREFETCH, WORK}}
    read = dict.fromkeys((hop.stream, hop.group) for hop in hops if hop.group)
    return [each for each in read if each[0] in written and each not in taken]


def _part(found: Split | None, hop: Hop) -> Part:
    return Part(0) if found is None else found.parts[hop]


def in_words(hop: Hop) -> str:
    """Return the name of a hop for people: ``hand-over of clicks to enrich``."""
    return f"{Kind(hop.hop).word} of {hop.stream}" + (f" to {hop.group}" if hop.group else "")
