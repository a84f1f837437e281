"""Running figures of the hops of streams with a budget, and advice for their writers and readers. Pure.

Clients report times that they can measure themselves, see ``latency.proto``. The manager derives the hops from them:

* SEND is the time that writers see from the closing of a chunk to its acknowledgement, less REPLICATE;
* REPLICATE is measured here, for requests with a report, from the start of their handling to their answer;
* HAND_OVER is the time that readers see from a chunk's ``created_us``, by the clock of its writer, to its arrival, less
  the hops before it. It is corrected by how far the clocks of writers, and the clocks that readers use, are ahead.

Only hops on paths are measured, if the coordinator names the paths, and their number is bounded: each stream with a
budget has an equal share. Reports beyond that are dropped until another hop has had no chunks for a window.

The means of hops are exact. From a 99th percentile, those of the hops before are subtracted, so the sum of all hops is
at least the 99th percentile of the whole path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from kera.broker.latency.budgets import STREAMS_MAX, Budget
from kera.broker.latency.holding import Hold, Holds
from kera.broker.latency.running_hop import RunningHop, Sums
from kera.core.base.clock import Clock, SystemClock
from kera.core.latency.hop import Hop
from kera.core.latency.report import INTERVAL_S, Of
from kera.core.latency.sample import Sample
from kera.core.latency.window import RunningMean, RunningMost
from kera.v1 import latency_pb2

VALID_MS = round(5 * INTERVAL_S * 1000)
"""How long advice counts, because some reports may be late, or lost."""
GROUPS_MAX = 32
"""Consumer groups of a stream with separate figures, if the coordinator does not name those on paths."""
HOPS_MAX = 6000
"""Maximum number of measured hops: with the maximum of budgets, those of writers and of one consumer group for each."""
STREAMLETS_MAX = 100_000
"""Maximum number of separate means of streamlets, which take about 10 MB."""
FETCH_BYTES = 256 << 10
"""A reader need not wait for more data than this, the usual maximum of a chunk."""


_OF_READERS = tuple(hop for hop in Hop if hop.of_reader)
_OF_WRITERS = tuple(hop for hop in Hop if not hop.of_reader)
_NOTHING = Sums(0, 0)


class Figures(NamedTuple):
    """The figures of a hop over the last window, in microseconds."""

    stream_id: int
    hop: Hop
    consumer_group: str
    chunks: int
    mean_us: int
    p99_us: int
    worst_mean_us: int
    """The mean of the worst streamlet."""
    worst_streamlet_id: int
    clock_error_us: int = 0
    """For HAND_OVER: the possible error of the mean, from the error of the clocks; 0: unknown."""
    own_linger_us: int = 0
    """For GATHER: the longest linger_ms that a writer has set itself."""

    def message(self) -> latency_pb2.HopFigures:
        """Return the figures as a message for heartbeats."""
        fields = self._asdict()
        return latency_pb2.HopFigures(count=fields.pop("chunks"), **fields)


class _Watched:
    """A stream with a budget."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._groups_max = 0
        self._streamlets_max = 0
        self.hops: dict[tuple[Hop, str], RunningHop] = {}
        self.ahead = RunningMean(budget.window_s)
        """How far the clocks of writers are ahead, over all chunks."""
        self.ahead_us = 0
        """The mean of `ahead`."""
        self.reckoned: dict[str, RunningMean] = {}
        """How far the clocks are ahead that a consumer group's readers measure HAND_OVER by, by consumer group."""
        self.clock_errors: dict[str, RunningMost] = {}
        """How far clocks can be off: those of readers by consumer group, and those of writers under the empty name."""
        self.own_linger = RunningMost(budget.window_s)
        """The longest linger_ms of writers that follow no advice."""

    def go_by(self, budget: Budget, hops_max: int, streamlets_max: int) -> None:
        """Set the budget, and the maximum numbers of hops and streamlets; forget figures beyond these."""
        self.budget, self._streamlets_max = budget, streamlets_max
        self._groups_max = (hops_max - len(_OF_WRITERS)) // len(_OF_READERS)
        if budget.groups is None:
            self._groups_max = min(GROUPS_MAX, self._groups_max)
        kept = [group for group in self._groups() if budget.measures(Hop.HAND_OVER, group)][: self._groups_max]
        for hop, group in list(self.hops):
            if hop.of_reader and group not in kept:
                self.forget(hop, group)
        if self._streamlets() > streamlets_max:
            for running in self.hops.values():
                running.forget_streamlets()  # clients report them again

    def forget(self, hop: Hop, group: str) -> None:
        """Forget the figures of a hop."""
        del self.hops[hop, group]
        if hop is Hop.HAND_OVER:
            self.reckoned.pop(group, None)
            self.clock_errors.pop(group, None)

    def merge(self, now_s: float, key: tuple[Hop, str], sample: Sample, of_streamlets: Mapping[int, Sums]) -> bool:
        """Add a sample, if its hop is measured and there is room for it; return whether it was added."""
        found = self.hops.get(key)
        if found is None:
            if not self.budget.measures(*key) or (key[0].of_reader and not self._has_room_for(key[1])):
                return False
            found = self.hops[key] = RunningHop(self.budget.window_s)
        found.merge(now_s, sample, of_streamlets, room=self._streamlets_max - self._streamlets())
        return True

    def _has_room_for(self, group: str) -> bool:
        groups = self._groups()
        return group in groups or len(groups) < self._groups_max

    def _groups(self) -> dict[str, None]:
        """Return the measured consumer groups, in the order of their first samples."""
        return dict.fromkeys(group for hop, group in self.hops if hop.of_reader)

    def _streamlets(self) -> int:
        return sum(running.streamlets for running in self.hops.values())

    def clock_error(self, group: str, now_s: float, error_us: int) -> None:
        """Note how far the clock of a reader of a group, or of a writer (empty), can be off."""
        self.clock_errors.setdefault(group, RunningMost(self.budget.window_s)).add(now_s, error_us)

    def most_us(self, hop: Hop, group: str, now_s: float) -> tuple[int, int]:
        """Return the possible error of HAND_OVER, and how long writers let chunks GATHER against advice; else 0."""
        if hop is Hop.HAND_OVER:
            return sum(self.clock_errors[of].most(now_s) for of in ("", group) if of in self.clock_errors), 0
        return 0, self.own_linger.most(now_s) if hop is Hop.GATHER else 0


class LatencyManager:
    """Keeps the latency figures of the hops of streams with a budget, and advises their writers and readers.

    Belongs to one event loop.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._streams: dict[int, _Watched] = {}
        self.version = 0
        """The coordinator's version of the budgets."""
        self.replicate = Holds(self._clock.monotonic_s, self._clock.now_us)
        """How long references to chunks wait for others."""
        self.hand_over = Holds(self._clock.monotonic_s, self._clock.now_us)
        """How long chunks are held back from readers on the push channel."""
        self._told = 0
        """The hop at which `next_figures` continues."""

    def set_budgets(self, version: int, budgets: Iterable[latency_pb2.StreamBudget]) -> None:
        """Replace all budgets. A stream with the same window as before keeps its figures."""
        self.version = version
        before, self._streams = self._streams, {}
        told = {message.stream_id: Budget.of(message) for message in islice(budgets, STREAMS_MAX)}
        for stream_id, budget in told.items():
            known = before.get(stream_id)
            if known is None or known.budget.window_s != budget.window_s:
                known = _Watched(budget)
            known.go_by(budget, HOPS_MAX // len(told), STREAMLETS_MAX // len(told))
            self._streams[stream_id] = known
            self._hold(stream_id, budget, known.ahead_us)
        for stream_id in before.keys() - self._streams.keys():
            self._hold_nothing(stream_id)

    def _hold(self, stream_id: int, budget: Budget, ahead_us: int) -> None:
        way_in_us = budget.gather_us + budget.replicate_us
        self.replicate.set(stream_id, Hold(budget.replicate_us, way_in_us, ahead_us))
        self.hand_over.set(stream_id, Hold(budget.hand_over_us, way_in_us + budget.hand_over_us, ahead_us))

    def _hold_nothing(self, stream_id: int) -> None:
        self.replicate.forget(stream_id)
        self.hand_over.forget(stream_id)

    def watches(self, stream_id: int) -> bool:
        """Whether a stream has a budget."""
        return stream_id in self._streams

    def measures(self, stream_id: int, hop: int, group: str) -> bool:
        """Whether a hop is on the path of a constraint, or counts as such because the paths are unknown."""
        watched = self._streams.get(stream_id)
        return watched is not None and watched.budget.measures(hop, group)

    def forget(self, stream_id: int) -> None:
        """Forget a stream that is not here any more."""
        self._streams.pop(stream_id, None)
        self._hold_nothing(stream_id)

    def now_us(self) -> int:
        """Return the time of day, which answers tell clients."""
        return self._clock.now_us()

    def reported(
        self, samples: Iterable[tuple[Of, Sample]], ahead_us: int = 0, *, error_us: int = 0, own_linger_us: int = 0
    ) -> None:
        """Add the samples that a client has measured. `ahead_us`: how far the clock that it uses is ahead.

        `error_us`: how far that clock can be off; `own_linger_us`: how long a writer lets chunks fill against advice.
        """
        now_s = self._clock.monotonic_s()
        for (stream_id, hop, group), (sample, of_streamlets) in _by_hop(samples).items():
            watched = self._streams.get(stream_id)
            if watched is None or not watched.merge(now_s, (hop, group), sample, of_streamlets):
                continue
            if hop is Hop.GATHER:
                watched.ahead.add(now_s, ahead_us * sample.count, sample.count)
                watched.clock_error("", now_s, error_us)
                watched.own_linger.add(now_s, own_linger_us)
                watched.ahead_us = round(watched.ahead.mean(now_s) or 0.0)
                self.replicate.reckon(stream_id, watched.ahead_us)
                self.hand_over.reckon(stream_id, watched.ahead_us)
            elif hop is Hop.HAND_OVER:
                reckoned = watched.reckoned.setdefault(group, RunningMean(watched.budget.window_s))
                reckoned.add(now_s, ahead_us * sample.count, sample.count)
                watched.clock_error(group, now_s, error_us)

    def replicated(self, stream_ids: Iterable[int], seconds: float) -> None:
        """Note that a request with chunks of these streams was answered after `seconds`."""
        sample = Sample()
        sample.add(round(seconds * 1e6))
        now_s = self._clock.monotonic_s()
        for stream_id in stream_ids:
            watched = self._streams.get(stream_id)
            if watched is not None:
                watched.merge(now_s, (Hop.REPLICATE, ""), sample, {})

    def advise_writer(self, stream_ids: Iterable[int]) -> list[latency_pb2.WriterAdvice]:
        """Return how long chunks of these streams may fill; no advice for a stream without a budget."""
        return [
            latency_pb2.WriterAdvice(
                stream_id=stream_id, linger_us=self._streams[stream_id].budget.gather_us, valid_ms=VALID_MS
            )
            for stream_id in stream_ids
            if stream_id in self._streams
        ]

    def advise_reader(self, stream_ids: Iterable[int], groups: Iterable[str] = ()) -> list[latency_pb2.ReaderAdvice]:
        """Return how long a request for these streams may wait for data; `groups`: the reader's consumer groups."""
        groups = sorted(groups)
        return [
            latency_pb2.ReaderAdvice(
                stream_id=stream_id,
                fetch_wait_us=self._streams[stream_id].budget.hand_over_us,
                fetch_bytes_min=FETCH_BYTES if self._streams[stream_id].budget.hand_over_us else 0,
                valid_ms=VALID_MS,
                next_stream_ids=self._next_ids(stream_id, groups),
            )
            for stream_id in stream_ids
            if stream_id in self._streams
        ]

    def _next_ids(self, stream_id: int, groups: Iterable[str]) -> list[int]:
        known = self._streams[stream_id].budget.next_ids
        return sorted({each for group in groups for each in known.get(group, ())})

    def figures(self) -> list[Figures]:
        """Return the figures of all hops with chunks in the last window."""
        return self._figures(self._hops())

    def next_figures(self, most: int) -> tuple[list[Figures], int]:
        """Return the figures of at most `most` hops, and how many were left out: those come first the next time."""
        hops = self._hops()
        if len(hops) <= most:
            return self._figures(hops), 0
        begin = self._told % len(hops)
        self._told = begin + most
        return self._figures((hops[begin:] + hops[:begin])[:most]), len(hops) - most

    def _hops(self) -> list[tuple[int, Hop, str]]:
        return [(stream_id, *key) for stream_id, watched in self._streams.items() for key in watched.hops]

    def _figures(self, hops: Iterable[tuple[int, Hop, str]]) -> list[Figures]:
        now_s, found = self._clock.monotonic_s(), []
        for stream_id, hop, group in hops:
            watched = self._streams[stream_id]
            running = watched.hops[hop, group]
            sample = running.sample(now_s)
            if not sample.count:
                watched.forget(hop, group)
                continue
            before_us, before_p99_us = _before_us(watched, hop, group, now_s)
            worst_us, worst = running.worst(now_s)
            mean_us = _less(sample.mean_us, before_us)
            figures = Figures(
                stream_id,
                hop,
                group,
                sample.count,
                mean_us,
                max(mean_us, _less(sample.p99_us, before_p99_us)),
                max(mean_us, _less(worst_us, before_us)),
                worst,
                *watched.most_us(hop, group, now_s),
            )
            found.append(figures)
        return found


def _by_hop(
    samples: Iterable[tuple[Of, Sample]],
) -> dict[tuple[int, Hop, str], tuple[Sample, dict[int, Sums]]]:
    """Return the sum of each hop's samples, and the sums by streamlet."""
    found: dict[tuple[int, Hop, str], tuple[Sample, dict[int, Sums]]] = {}
    for of, sample in samples:
        key = of.stream_id, of.hop, of.consumer_group
        known = found.get(key)
        if known is None:
            known = found[key] = Sample(), {}
        known[0].merge(sample)
        before = known[1].get(of.streamlet_id, _NOTHING)
        known[1][of.streamlet_id] = Sums(before.us + sample.sum_us, before.chunks + sample.count)
    return found


def _before_us(watched: _Watched, hop: Hop, group: str, now_s: float) -> tuple[float, float]:
    """Return the parts of a hop's reported mean and p99 that belong to the hops before it."""
    if hop is Hop.SEND:
        return _of_hops(watched, [Hop.REPLICATE], now_s)
    if hop is Hop.HAND_OVER:
        # The time that writers report as SEND includes REPLICATE.
        way_in = [Hop.GATHER, Hop.SEND if (Hop.SEND, "") in watched.hops else Hop.REPLICATE]
        mean_us, p99_us = _of_hops(watched, way_in, now_s)
        reckoned = watched.reckoned.get(group)
        ahead_us = (watched.ahead.mean(now_s) or 0.0) - ((reckoned and reckoned.mean(now_s)) or 0.0)
        return mean_us - ahead_us, p99_us - ahead_us
    return 0.0, 0.0


def _of_hops(watched: _Watched, hops: Sequence[Hop], now_s: float) -> tuple[float, float]:
    samples = [watched.hops[hop, ""].sample(now_s) for hop in hops if (hop, "") in watched.hops]
    return float(sum(each.mean_us for each in samples)), float(sum(each.p99_us for each in samples))


def _less(us: int, before_us: float) -> int:
    return max(0, round(us - before_us))
