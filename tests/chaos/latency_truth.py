"""Measurements of the clients of `tests.chaos.latency`, by slots of time, and conclusions from them.

The truth is that of records' own timestamps, on the monotonic clock that all processes share. It gives two figures over
a window: that of all records, from one end of the path to the other; and that of chunks by their oldest record, which
a constraint is about: from sending that record until the first record made from its chunk was accepted, and from then
until that one was durable. Descriptions weight the times of hops by chunks, and some by chunks that came together, for
each broker separately: therefore they differ from the truth by up to `WEIGHED`.

The lag of the clients' event loops shows how busy the machine was. A task that waits for a loop at any time waits for
the rest of its pause: with pauses of L each, that is the sum of L * L / 2 for each unit of time, on average. A record
that goes the whole path waits `PASSAGES` times for a processor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from tests.chaos.latency_client import SLOT_S, Slot

PASSAGES = 12
"""Waits in each of two streams: the timer of the writer's chunk, the broker, its backup, the broker again, and the
writer's acknowledgement; between the streams the reader, and the application."""
SHOWN_S = 3.0
"""The highest age of a description's data: a second until clients report, whose next request may be a chunk's time
away, the same for what readers report, an interval of heartbeats, and a look at the description."""
PART = 0.1
"""A window of brokers moves on by this share of itself, and may be longer by the same share."""
WEIGHED = 0.01
KEPT_S = 120.0


class Told(NamedTuple):
    """The truth about a time."""

    records: int
    records_us: float
    """Their mean."""
    longest_us: int
    runs: int
    chunks: int
    path_us: float
    """The figure that a constraint is about: the mean of chunks, by their oldest record; 0 without chunks."""


class Truth:
    """The slots of all clients."""

    def __init__(self) -> None:
        self._slots: dict[str, dict[int, Slot]] = {}
        self.totals: dict[str, Slot] = {}
        """Totals of each client, since its start."""

    def add(self, client: str, told: Mapping[str, Any]) -> None:
        """Add a slot that a client has reported."""
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
        """The time until which all clients have reported."""
        return min((max(slots) + 1) * SLOT_S for slots in self._slots.values())

    def _within(self, begin_s: float, end_s: float, client: str | None = None) -> list[Slot]:
        first, last = round(begin_s / SLOT_S), round(end_s / SLOT_S)
        clients = self._slots.values() if client is None else [self._slots.get(client, {})]
        return [slots[number] for slots in clients for number in range(first, last) if number in slots]

    def over(self, begin_s: float, end_s: float) -> Told:
        """The truth about a time."""
        slots = self._within(begin_s, end_s)
        records, runs, chunks = (sum(getattr(slot, name) for slot in slots) for name in ("records", "runs", "chunks"))
        records_us = sum(slot.records_us for slot in slots) / max(1, records)
        path_us = sum(slot.runs_us for slot in slots) / max(1, runs) + sum(slot.chunks_us for slot in slots) / max(
            1, chunks
        )
        longest_us = max((slot.longest_us for slot in slots), default=0)
        return Told(records, records_us, longest_us, runs, chunks, path_us)

    def band_us(self, at_s: float, window_s: float) -> tuple[float, float]:
        """The lowest and highest value that a description at this moment may have, by the truth until then."""
        found = []
        for ago in range(round(SHOWN_S / SLOT_S) + 1):
            end_s = at_s - ago * SLOT_S
            found += [self.over(end_s - window_s * each, end_s).path_us for each in (1 - PART, 1, 1 + PART)]
        return min(found), max(found)

    def lags_ms(self, begin_s: float, end_s: float, shares: Sequence[float] = (0.5, 0.95, 1.0)) -> list[float]:
        """The lag of event loops over a time: these quantiles, of the worst client for each."""
        found = [0.0] * len(shares)
        for client in self._slots:
            lags = sorted(lag for slot in self._within(begin_s, end_s, client) for lag in slot.lags_us)
            for index, share in enumerate(shares):
                if lags:
                    found[index] = max(found[index], lags[min(len(lags) - 1, int(share * len(lags)))] / 1000)
        return found

    def wait_us(self, begin_s: float, end_s: float) -> float:
        """The average wait for an event loop, of the worst client."""
        waits = [0.0]
        for client in self._slots:
            slots = self._within(begin_s, end_s, client)
            if slots:
                waits.append(sum(wait_of(slot.lags_us) for slot in slots) / (len(slots) * SLOT_S * 1e6))
        return max(waits)

    def explained_us(self, at_s: float, window_s: float) -> float:
        """The most that a busy machine delayed records, in the time that a description at `at_s` covers.

        However many passages a record has, its wait is not longer than all pauses of the time together.
        """
        begin_s = at_s - window_s * (1 + PART) - SHOWN_S
        (longest_ms,) = self.lags_ms(begin_s, at_s, (1.0,))
        return min(PASSAGES * self.wait_us(begin_s, at_s), len(self._slots) * longest_ms * 1000)


def wait_of(lags_us: Iterable[int]) -> float:
    """The sum of waits for a loop with these pauses, over all moments of arrival."""
    return sum(lag * lag / 2 for lag in lags_us)


class Look(NamedTuple):
    """The content of one description."""

    at_s: float
    state: str
    mean_us: int
    reason: str
    round_trip_us: int
    """The duration of requests to write, by the description."""
    measured: int
    """The number of measured hops."""


class Looks:
    """Descriptions, in order."""

    def __init__(self) -> None:
        self._looks: deque[Look] = deque(maxlen=round(KEPT_S / SLOT_S))

    def add(self, look: Look) -> None:
        """Add a description."""
        self._looks.append(look)

    @property
    def last(self) -> Look | None:
        """The newest one."""
        return self._looks[-1] if self._looks else None

    def within(self, begin_s: float, end_s: float) -> list[Look]:
        """The looks within a time."""
        return [look for look in self._looks if begin_s <= look.at_s < end_s]


def unseen_s(looks: Iterable[Look], begin_s: float, end_s: float) -> float:
    """The longest time between these two without a look."""
    return max(later - earlier for earlier, later in pairwise([begin_s, *(look.at_s for look in looks), end_s]))


class Settled(NamedTuple):
    """The outcome after an event."""

    held_after_s: float
    """From then on the constraint was held for the rest of the time."""
    in_time: bool
    busy: int
    """Looks that found it not held too late, by no more than a busy machine explains."""
    missed: list[Look]
    """Looks that found it not held too late, by more than that."""


def settled(
    looks: Sequence[Look], truth: Truth, at_s: float, within_s: float, limit_us: int, window_s: float
) -> Settled:
    """Whether a constraint was held from `within_s` after `at_s` on, as far as looks show."""
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
    """Figures, beside the truth."""

    looks: int
    off_us: float
    """The largest error."""
    allowed_us: float
    """The allowed error of that figure."""
    wrong: list[tuple[Look, float, float, float]]
    """Looks with a larger error than allowed, with the band and the allowed error."""


def compared(looks: Iterable[Look], truth: Truth, window_s: float) -> Compared:
    """The errors of figures: at most a round trip is allowed, and the delay that a busy machine explains."""
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
