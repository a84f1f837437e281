"""The pace of a query with ``latencyTarget``: connects the decisions of `planning.pacing` to clocks and the cluster.

Spark does not report how long a micro-batch takes. Here it lasts from the decision to begin until Spark shows that it
is done: by asking for the end after it, by committing it, or (only for sources in the JVM) by asking for metrics, which
happens first. With a trigger interval Spark asks only at the next tick. So with Python workers micro-batches seem to
take whole intervals, and the target holds with more to spare than needed.

If Spark asks while the waiting records can still wait, the answer is "nothing new", because Spark itself does not wait.
It asks again after ten milliseconds, and each question costs a look at the cluster; so the answer is delayed for a
moment (`pacing.pause`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kera.spark_connector.options.names import LATENCY_TARGET
from kera.spark_connector.planning import Advance
from kera.spark_connector.planning.admission import BatchLimits, Waiting
from kera.spark_connector.planning.offsets import EntryName, EntryOffset
from kera.spark_connector.planning.pacing import Arrivals, BatchDecision, Pacer, Pause, pause
from kera.spark_connector.reading.latency.created import ENTRIES_MAX, Range, created_us

if TYPE_CHECKING:
    from kera.client import Client

RECALLS = 8
"""Number of recent measurements to keep."""
RECALL_S = 0.02
"""Assumed time until Spark asks again, before it was measured."""

log = logging.getLogger(__name__)


class _UnderWay(NamedTuple):
    end: Mapping[str, Any]
    bytes: int
    begun_s: float


class QueryPace:
    """The pace of one query. A pickled copy starts empty. Used by one thread at a time."""

    def __init__(
        self,
        now_s: Callable[[], float] = time.monotonic,
        *,
        wall_s: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._now_s, self._wall_s, self._sleep = now_s, wall_s, sleep
        self._pacer: Pacer | None = None
        self._arrivals = Arrivals()
        self._under_way: _UnderWay | None = None
        self._looked_at: Mapping[EntryName, EntryOffset] | None = None
        """The starts of the waiting records whose age was last asked for."""
        self._idle_s: float | None = None
        """When Spark got the answer that nothing is new; None: it has asked again since."""
        self._recalls_s: deque[float] = deque(maxlen=RECALLS)
        """Times from that answer until Spark asked again."""
        self._looking_s = now_s()
        """When the current look at the cluster began."""
        self._looks_s: deque[float] = deque(maxlen=RECALLS)
        """Durations of looks at the cluster."""
        self._decided_s = 0.0
        """When the last decision was made."""
        self._pause: Pause | None = None
        """How to delay the answer to the current question."""
        self._held_s: float | None = None
        """Since when waiting records are held back."""
        self._waiting_bytes = 0
        self._pace: BatchDecision | None = None
        self._figures: dict[str, str] = {}
        self.has_an_end = False
        """Whether the query ends at the present heads (``availableNow``)."""
        self._told: set[str] = set()

    def __reduce__(self) -> tuple[type[QueryPace], tuple[()]]:
        return QueryPace, ()

    # -- one question after the other --------------------------------------------------------------------------

    def asked(self, start: Mapping[str, Any]) -> None:
        """Note that Spark asks for the micro-batch after `start`."""
        self.done(start)
        if self._idle_s is not None:
            self._recalls_s.append(self._now_s() - self._idle_s)
            self._idle_s = None
        self._looking_s = self._now_s()

    def again(self) -> bool:
        """Delay the answer that nothing is new, and return whether to look at the cluster again before it is given."""
        waits, self._pause = self._pause, None
        if waits is not None and waits.sleep_s > 0:
            self._sleep(waits.sleep_s)
        if waits is not None and waits.again:
            self._looking_s = self._now_s()
            return True
        self._idle_s = self._now_s()
        return False

    async def admit(
        self,
        client: Client,
        advance: Advance,
        waiting: Mapping[EntryName, Waiting],
        limits: BatchLimits,
        waited_ms: int | None,
    ) -> BatchLimits | None:
        """Return the limits of a micro-batch that begins now; None: the waiting records can wait.

        The other limits count as well: the smaller size and the shorter wait win.
        """
        if limits.latency_target_ms is None:
            return limits
        if self._pacer is None:
            self._pacer = Pacer(limits.latency_target_ms / 1000)
        starts, heads = (
            {name: of[name] for name in waiting} for of in (advance.start.places(), advance.heads.places())
        )
        self._arrivals.look(starts, heads, self._now_s())
        self._looks_s.append(self._now_s() - self._looking_s)
        self._waiting_bytes = sum(entry.bytes for entry in waiting.values())
        pace = self._decide(self._pacer, starts)
        if waiting and pace.wait_s > 0 and self._looked_at != starts:
            self._looked_at = starts
            await self._look(client, starts, heads, self._pacer.target_s)
            pace = self._decide(self._pacer, starts)
        if waiting and pace.wait_s > 0 and not _is_enough(waiting, limits, waited_ms):
            self._pause = pause(pace.wait_s, max(self._recalls_s, default=RECALL_S), max(self._looks_s))
            if self._pause is not None:
                self._held_s = self._now_s() if self._held_s is None else self._held_s
                return None
        self._pace = pace
        bytes_max = min(pace.bytes_max, limits.bytes_max or pace.bytes_max)
        return replace(limits, bytes_max=bytes_max, records_min=None)

    def planned(self, end: Mapping[str, Any], of_bytes: int) -> None:
        """Note that a micro-batch of `of_bytes` bytes, up to `end`, begins now."""
        if self._pacer is None or self._pace is None:
            return
        self._under_way = _UnderWay(end, of_bytes, self._decided_s)
        held_s = 0.0 if self._held_s is None else self._decided_s - self._held_s
        self._held_s = None
        by_another_limit = 2 * of_bytes < self._pace.bytes_max
        self._pacer.began(self._waiting_bytes, self._waiting_bytes if by_another_limit else of_bytes)
        self._figures = {
            "latencyTargetMs": _ms(self._pacer.target_s),
            "latencyBytesMax": str(self._pace.bytes_max),
            "latencyHeldBackMs": _ms(held_s),
        }
        if self._pacer.fit is not None:
            self._figures["latencyPredictedMs"] = _ms(self._pacer.fit.seconds(of_bytes))
        self._warn("behind", _BEHIND if self._pacer.falls_behind else None)

    def done(self, end: Mapping[str, Any] | None) -> None:
        """Note how long the micro-batch up to `end` took, which Spark has done."""
        under_way = self._under_way
        if self._pacer is None or under_way is None or under_way.end != end:
            return
        self._under_way = None
        took_s = self._now_s() - under_way.begun_s
        self._pacer.done(under_way.bytes, took_s)
        least_s = self._pacer.least_s(self._arrivals.on_the_way_s)
        self._figures["latencyTookMs"] = _ms(took_s)
        if least_s is not None:
            self._figures["latencyLeastMs"] = _ms(least_s)
        short = least_s is not None and least_s > self._pacer.target_s
        self._warn("short", _SHORT.format(self._pacer.target_s, least_s) if short else None)

    def figures(self) -> dict[str, str]:
        """Return the figures of the last planned micro-batch, for a query's progress; empty without a target.

        After the micro-batch they also have its duration, and the smallest target that could be kept, if known.
        """
        return self._figures

    def limits(self, said: BatchLimits, of_options: BatchLimits) -> BatchLimits:
        """Return the limits of Spark that apply: a query that has an end has no target."""
        if of_options.latency_target_ms is None:
            return said
        if self.has_an_end or said.latency_target_ms is None:
            trigger = "AvailableNow" if self.has_an_end else "Once"
            self._warn(
                "end", f"it has no effect with Trigger.{trigger}, which takes what is there as fast as it can be"
            )
        return replace(said, latency_target_ms=None) if self.has_an_end else said

    # -- helpers -----------------------------------------------------------------------------------------------

    def _decide(self, pacer: Pacer, starts: Mapping[EntryName, EntryOffset]) -> BatchDecision:
        self._decided_s = self._now_s()
        return pacer.decide(self._waiting_bytes, self._arrivals.oldest_s(starts, self._decided_s))

    async def _look(
        self,
        client: Client,
        starts: Mapping[EntryName, EntryOffset],
        heads: Mapping[EntryName, EntryOffset],
        target_s: float,
    ) -> None:
        """Find out when some of the records that wait longest were made."""
        asked = [
            Range(*name, starts[name].position, heads[name].position)
            for name in self._arrivals.unknown(starts, ENTRIES_MAX)
        ]
        found = await created_us(client, asked)
        behind_s = self._wall_s() - self._now_s()
        made_s = {EntryName(*at[:3]): made_us / 1e6 - behind_s for at, made_us in found.items()}
        odd_s = self._arrivals.created(made_s, starts, target_s)
        self._warn("clock", _CLOCK.format(odd_s) if odd_s else None)

    def _warn(self, about: str, problem: str | None) -> None:
        """Log `problem` once; None: the problem is over, and is logged again if it returns."""
        if problem is None:
            self._told.discard(about)
        elif about not in self._told:
            self._told.add(about)
            log.warning("%s: %s", LATENCY_TARGET, problem)


_BEHIND = (
    "more records arrive than micro-batches within the target can process, so the query falls behind. Give it more"
    " cores, more streamlets to read side by side, or a larger target"
)
_CLOCK = (
    "records have timestamps {:.3g} s before their arrival, more than the target. The clock of a producer is behind, or"
    " records wait before they are sent: the target counts from their arrival"
)
_SHORT = (
    "{:.3g} s cannot be kept: delivery and a nearly empty micro-batch take {:.3g} s, and under steady load twice as"
    " much, since records wait for the micro-batch before. Raise the target; or leave it out and use real-time mode,"
    " trigger(realTime=...), which has no micro-batches to wait for"
)


def _is_enough(waiting: Mapping[EntryName, Waiting], limits: BatchLimits, waited_ms: int | None) -> bool:
    """Return whether another limit is reached, or lets a micro-batch begin."""
    records = sum(entry.records for entry in waiting.values())
    if limits.records_max is not None and records >= limits.records_max:
        return True
    if limits.bytes_max is not None and sum(entry.bytes for entry in waiting.values()) >= limits.bytes_max:
        return True
    if limits.records_min is None:
        return False
    return records >= limits.records_min or waited_ms is None or waited_ms >= limits.delay_max_ms


def _ms(seconds: float) -> str:
    return str(round(seconds * 1000))
