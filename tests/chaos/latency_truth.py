"""What clients of `tests.chaos.latency` have measured themselves, by slots of time, and what follows from it.

The truth is that of records' own timestamps, on the monotonic clock that all processes share. Two figures are made of
it over a window: of all records, from one end of the path to the other; and of chunks by their oldest record, which is
what a constraint is about: from when it was sent until the first record that was made of its chunk was accepted, and
from then until that was durable. Descriptions weigh what hops took by chunks, and some by those that came together, of
each broker by itself: that makes them differ from the truth by up to `WEIGHED`.

How busy the machine was is told by how late the clients' event loops were. Whoever waits for a loop at any time waits
for the rest of what keeps it: with pauses of L each, that is the sum of L * L / 2 for each unit of time, on average. A
record that goes the whole path waits `PASSAGES` times for a processor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from tests.chaos.latency_client import SLOT_S, Slot

PASSAGES = 12
"""Of each of two streams: the timer of the writer's chunk, the broker, its backup, the broker again, the writer that is
told; between them the reader, and the application."""
SHOWN_S = 3.0
"""So old is at most what a description shows: a second until clients report, whose next request may be a chunk's time
away, the same for what readers report, an interval of heartbeats, and a look at the description."""
PART = 0.1
"""A window of brokers moves on by so much of itself, and has up to so much more."""
WEIGHED = 0.01
KEPT_S = 120.0


class Told(NamedTuple):
    """What was true over a time."""

    records: int
    records_us: float
    """Their mean."""
    longest_us: int
    runs: int
    chunks: int
    path_us: float
    """What a constraint is about: the mean of chunks, by their oldest record; 0 if there were none."""


class Truth:
    """Slots of all clients."""

    def __init__(self) -> None:
        self._slots: dict[str, dict[int, Slot]] = {}
        self.totals: dict[str, Slot] = {}
        """Of each client, since it began."""

    def add(self, client: str, told: Mapping[str, Any]) -> None:
        """A client has told of a slot."""
        slot, slots = Slot(**told), self._slots.setdefault(client, {})
        if slot.number in slots:
            return
        slots[slot.number] = slot
        while slots and min(slots) < slot.number - KEPT_S / SLOT_S:
            del slots[min(slots)]
        total = self.totals.setdefault(client, Slot(0))
        for name in ("sent", "acknowledged", "failed", "records", "records_us", "runs", "chunks", "late"):
            setattr(total, name, getattr(total, name) + getattr(slot, name))
        total.late_us = max(total.late_us, slot.late_us)
        total.errors += slot.errors

    def known_until_s(self) -> float:
        """All clients have told of all before this."""
        return min((max(slots) + 1) * SLOT_S for slots in self._slots.values())

    def _within(self, begin_s: float, end_s: float, client: str | None = None) -> list[Slot]:
        first, last = round(begin_s / SLOT_S), round(end_s / SLOT_S)
        clients = self._slots.values() if client is None else [self._slots.get(client, {})]
        return [slots[number] for slots in clients for number in range(first, last) if number in slots]

    def over(self, begin_s: float, end_s: float) -> Told:
        """What was true over a time."""
        slots = self._within(begin_s, end_s)
        records, runs, chunks = (sum(getattr(slot, name) for slot in slots) for name in ("records", "runs", "chunks"))
        records_us = sum(slot.records_us for slot in slots) / max(1, records)
        path_us = sum(slot.runs_us for slot in slots) / max(1, runs) + sum(slot.chunks_us for slot in slots) / max(
            1, chunks
        )
        longest_us = max((slot.longest_us for slot in slots), default=0)
        return Told(records, records_us, longest_us, runs, chunks, path_us)

    def band_us(self, at_s: float, window_s: float) -> tuple[float, float]:
        """Least and most that a description at this moment may say, by what was true until then."""
        found = []
        for ago in range(round(SHOWN_S / SLOT_S) + 1):
            end_s = at_s - ago * SLOT_S
            found += [self.over(end_s - window_s * each, end_s).path_us for each in (1 - PART, 1, 1 + PART)]
        return min(found), max(found)

    def lags_ms(self, begin_s: float, end_s: float, shares: Sequence[float] = (0.5, 0.95, 1.0)) -> list[float]:
        """How late event loops were over a time: these quantiles, of the worst client for each."""
        found = [0.0] * len(shares)
        for client in self._slots:
            lags = sorted(lag for slot in self._within(begin_s, end_s, client) for lag in slot.lags_us)
            for index, share in enumerate(shares):
                if lags:
                    found[index] = max(found[index], lags[min(len(lags) - 1, int(share * len(lags)))] / 1000)
        return found

    def wait_us(self, begin_s: float, end_s: float) -> float:
        """What who waits for an event loop waits on average, of the worst client."""
        waits = [0.0]
        for client in self._slots:
            slots = self._within(begin_s, end_s, client)
            if slots:
                waits.append(sum(wait_of(slot.lags_us) for slot in slots) / (len(slots) * SLOT_S * 1e6))
        return max(waits)

    def explained_us(self, at_s: float, window_s: float) -> float:
        """How much longer records took, at most, as the machine was busy: in what a description at that time is of.

        However many passages there are, nobody waits for longer than all pauses of the time together.
        """
        begin_s = at_s - window_s * (1 + PART) - SHOWN_S
        (longest_ms,) = self.lags_ms(begin_s, at_s, (1.0,))
        return min(PASSAGES * self.wait_us(begin_s, at_s), len(self._slots) * longest_ms * 1000)


def wait_of(lags_us: Iterable[int]) -> float:
    """The waits of who comes while a loop is kept for so long each time, put together."""
    return sum(lag * lag / 2 for lag in lags_us)


class Look(NamedTuple):
    """What a description has shown."""

    at_s: float
    state: str
    mean_us: int
    reason: str
    round_trip_us: int
    """What requests to write took, by the description."""
    measured: int
    """Hops that were measured."""


class Looks:
    """Descriptions, one after the other."""

    def __init__(self) -> None:
        self._looks: deque[Look] = deque(maxlen=round(KEPT_S / SLOT_S))

    def add(self, look: Look) -> None:
        """Another one."""
        self._looks.append(look)

    @property
    def last(self) -> Look | None:
        """The newest one."""
        return self._looks[-1] if self._looks else None

    def within(self, begin_s: float, end_s: float) -> list[Look]:
        """Those of a time."""
        return [look for look in self._looks if begin_s <= look.at_s < end_s]


def unseen_s(looks: Iterable[Look], begin_s: float, end_s: float) -> float:
    """The longest time between these two in which nobody has looked."""
    return max(later - earlier for earlier, later in pairwise([begin_s, *(look.at_s for look in looks), end_s]))


class Settled(NamedTuple):
    """How it went after something has happened."""

    held_after_s: float
    """From then on it was held for the rest of the time."""
    in_time: bool
    busy: int
    """Looks after which it should have been held, and was not by less than a busy machine explains."""
    missed: list[Look]
    """Those of which that is not so."""


def settled(
    looks: Sequence[Look], truth: Truth, at_s: float, within_s: float, limit_us: int, window_s: float
) -> Settled:
    """Whether a constraint was held `within_s` after `at_s`, as far as it was looked at."""
    held_after_s, busy, missed = 0.0, 0, []
    for look in looks:
        if look.state == "held" and look.mean_us <= limit_us:
            continue
        held_after_s = look.at_s - at_s + SLOT_S
        if look.at_s < at_s + within_s:
            continue
        if look.measured and look.mean_us - limit_us <= truth.explained_us(look.at_s, window_s):
            busy += 1
        else:
            missed.append(look)
    return Settled(held_after_s, not missed, busy, missed)


class Compared(NamedTuple):
    """Figures, beside what was true."""

    looks: int
    off_us: float
    """By how much they were off at most."""
    allowed_us: float
    """By how much that one may have been."""
    wrong: list[tuple[Look, float, float, float]]
    """Those that were off by more, with the band and what was allowed."""


def compared(looks: Iterable[Look], truth: Truth, window_s: float) -> Compared:
    """How far figures are from what was true: by no more than a round trip, and what a busy machine explains."""
    count, off_us, allowed, wrong = 0, 0.0, 0.0, []
    for look in looks:
        low_us, high_us = truth.band_us(look.at_s, window_s)
        allowed_us = look.round_trip_us + WEIGHED * look.mean_us
        allowed_us += 2 * truth.wait_us(look.at_s - window_s - SHOWN_S, look.at_s)
        beyond_us = max(low_us - look.mean_us, look.mean_us - high_us, 0.0)
        count += 1
        if beyond_us - allowed_us > off_us - allowed or count == 1:
            off_us, allowed = beyond_us, allowed_us
        if beyond_us > allowed_us:
            wrong.append((look, low_us, high_us, allowed_us))
    return Compared(count, off_us, allowed, wrong)
