"""Measurements of a group's consumer in streams with a latency constraint, for their brokers.

Measured is each run of chunks that came together, by its oldest one: from its ``created_us`` until it came (HAND_OVER,
which the broker puts right), until it was taken (PREFETCH), and until the first record that was made of it was
accepted (WORK, see ``at_work``): one for a stream that comes next on the path, before the application took something
else. If there is none, until the application asked for more, which is no later than when it took that. What waits
still, or is worked at, counts with the time so far (see ``waiting``). Of chunks that came before a constraint was heard
of, PREFETCH and WORK count. Own times are those of a clock that is never set; what the broker's time of day is by it,
its answers tell. Where a writer's clock is ahead, chunks come before they were created: HAND_OVER is reckoned with a
time that is ahead likewise, and brokers are told by how much.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from kera.client.cluster.at_work import AtWork, Job
from kera.client.cluster.fetch import Fetched
from kera.client.consuming.fetching.ranges import Range
from kera.client.consuming.latency.waiting import Came, StreamHop, Usual, Waiting, oldest
from kera.core.base.ids import EntryId
from kera.core.format.chunk import created_us_at
from kera.core.latency.hop import Hop
from kera.core.latency.offset import PeerClockOffset
from kera.core.latency.report import SAMPLES_MAX, Of, add_sample
from kera.core.latency.sample import TIME_US_MAX, Sample
from kera.v1 import broker_pb2, latency_pb2

VALID_S_MAX = 60.0
WAIT_S_MAX = 60.0
WATCHED_MAX = 1000
"""Streams of a broker that are measured."""
NEXT_MAX = 32
"""Streams that come next on the paths that a stream is on."""


class _Advice(NamedTuple):
    """A broker's advice about a stream with a constraint."""

    until_s: float
    """It counts until then."""
    wait_s: float = 0.0
    bytes_min: int = 0
    """After an answer with fewer bytes the next request may be put off."""
    next_ids: tuple[int, ...] = ()
    """Streams to which goes what is made of it."""


NO_ADVICE = _Advice(0.0)


class _Taken:
    """The data that the application has taken last."""

    __slots__ = ("asked_s", "at_s", "broker_id", "entry", "job", "range")

    def __init__(self, broker_id: int, entry: EntryId, at_s: float, job: Job | None, of: Range | None) -> None:
        self.broker_id = broker_id
        self.entry = entry
        self.at_s = at_s
        self.range = of
        self.job = job
        """None: nobody knows what is made of it."""
        self.asked_s: float | None = None
        """When the application asked for more."""


class ReaderMeter:
    """Measures a consumer's latencies in streams with constraints, and makes the reports to their brokers.

    Nothing here does I/O; times in seconds are on the loop's clock.
    """

    def __init__(
        self,
        consumer_group: str,
        at_work: AtWork | None = None,
        waiting: Callable[[], Iterable[Waiting]] = tuple,
    ) -> None:
        """`at_work`: of the application; None: nothing is known of what it makes. `waiting`: what it has not taken."""
        self._consumer_group = consumer_group
        self._at_work = at_work
        self._waiting = waiting
        self._watched: dict[int, _Advice] = {}
        """Streams with a constraint."""
        self._samples: dict[int, dict[Of, Sample]] = {}
        """By broker."""
        self._offsets: dict[int, PeerClockOffset] = {}
        self._ahead_us: dict[int, int] = {}
        """By broker: how much later than its time of day HAND_OVER is reckoned with."""
        self._taken: _Taken | None = None
        """The data that the application is working on."""
        self._usual = Usual()

    @property
    def watches(self) -> bool:
        """Whether there is a stream to measure."""
        return bool(self._watched)

    def watches_stream(self, stream_id: int, now_s: float) -> bool:
        """Whether this one is to be measured."""
        return self._watched.get(stream_id, NO_ADVICE).until_s > now_s

    def pause_s(self, stream_id: int, size_bytes: int, now_s: float) -> float:
        """How long the next request may be put off after an answer with so many bytes, for more to come together.

        Not after one without any, as the next one is left open until there is something, nor after a large one.
        """
        advice = self._watched.get(stream_id, NO_ADVICE)
        return advice.wait_s if advice.until_s > now_s and 0 < size_bytes < advice.bytes_min else 0.0

    def broker_us(self, broker_id: int, at_s: float) -> int | None:
        """The time of day at a broker at this moment; None: not known yet."""
        offset = self._offsets[broker_id].best if broker_id in self._offsets else None
        return None if offset is None else round(at_s * 1e6) + offset.ahead_us

    def came(self, fetched: Fetched, broker_id: int, now_s: float) -> Came | None:
        """Chunks have come from a broker, if there are any. How long they wait may be asked for later."""
        if not fetched.buffers:
            return None
        if self._watched and self.watches_stream(fetched.entry.stream_id, now_s):
            broker_us = self.broker_us(broker_id, now_s)
            if broker_us is not None:
                self.add(broker_id, fetched.entry, Hop.HAND_OVER, broker_us - created_us_at(fetched.buffers[0]))
        return Came(broker_id, now_s)

    def asks(self, now_s: float) -> None:
        """The application asks for more."""
        taken = self._taken
        if taken is None or taken.asked_s is not None:
            return
        taken.asked_s = now_s
        if taken.job is None or self._first_us(taken.job) is not None:
            self._done()  # else somebody of it may still be at work

    def taken(self, fetched: Fetched, came: Came | None, now_s: float, of: Range | None = None) -> None:
        """The application takes what has come of a range. `came`: None, it is not measured."""
        self._done()
        if came is None:
            return
        job = None
        if self._watched and self.watches_stream(fetched.entry.stream_id, now_s):
            self._over(came.broker_id, fetched.entry, Hop.PREFETCH, round((now_s - came.at_s) * 1e6))
            next_ids = self._watched[fetched.entry.stream_id].next_ids
            if next_ids and self._at_work is not None:
                job = self._at_work.begin(next_ids, now_s)
        self._taken = _Taken(came.broker_id, fetched.entry, now_s, job, of)

    def look(self, now_s: float, interval_s: float) -> None:
        """Have what waits now, and what the application is at, count with the time so far. Once in `interval_s`."""
        least_us = round(interval_s * 1e6)
        watched = [stream_id for stream_id, advice in self._watched.items() if advice.until_s > now_s]
        for each in oldest(self._waiting(), watched).values():
            if each.came is not None:
                us = round((now_s - each.came.at_s) * 1e6)
                self._so_far(each.came.broker_id, each.entry, Hop.PREFETCH, us, least_us)
        taken = self._taken
        if taken is None or taken.asked_s is not None or taken.entry.stream_id not in watched:
            return
        is_over = taken.job is not None and self._first_us(taken.job) is not None
        if not is_over and not (taken.range is not None and taken.range.dropped):
            us = round((now_s - taken.at_s) * 1e6)
            self._so_far(taken.broker_id, taken.entry, Hop.WORK, us, least_us)

    def _so_far(self, broker_id: int, entry: EntryId, hop: Hop, us: int, least_us: int) -> None:
        if self._usual.is_exceeded(StreamHop(entry.stream_id, hop), us, least_us):
            self.add(broker_id, entry, hop, us)

    def _over(self, broker_id: int, entry: EntryId, hop: Hop, us: int) -> None:
        self._usual.over(StreamHop(entry.stream_id, hop), us)
        self.add(broker_id, entry, hop, us)

    def close(self) -> None:
        """The application takes nothing more."""
        self._done()

    def _first_us(self, job: Job) -> int | None:
        return None if self._at_work is None else self._at_work.first_us(job)

    def _done(self) -> None:
        """The application is done with what it took last."""
        taken, self._taken = self._taken, None
        if taken is None:
            return
        us = None if taken.asked_s is None else round((taken.asked_s - taken.at_s) * 1e6)
        if taken.job is not None and self._at_work is not None:
            first_us = self._at_work.first_us(taken.job)
            self._at_work.end(taken.job)
            us = us if first_us is None else first_us
        if us is not None and taken.entry.stream_id in self._watched:
            self._over(taken.broker_id, taken.entry, Hop.WORK, us)

    def add(self, broker_id: int, entry: EntryId, hop: Hop, us: int) -> None:
        """Chunks of an entry have taken so long for a hop. Less than nothing: HAND_OVER, where a writer is ahead."""
        if hop is Hop.HAND_OVER:
            us = self._reckoned_us(broker_id, us)
        of = Of(entry.stream_id, entry.streamlet_id, hop, self._consumer_group)
        self._samples.setdefault(broker_id, {}).setdefault(of, Sample()).add(us)

    def _reckoned_us(self, broker_id: int, us: int) -> int:
        ahead_us = self._ahead_us.get(broker_id, 0)
        if us + ahead_us < 0 and ahead_us < TIME_US_MAX:
            ahead_us = self._ahead_us[broker_id] = min(-us, TIME_US_MAX)
            samples = self._samples.get(broker_id, {})
            for of in [of for of in samples if of.hop is Hop.HAND_OVER]:  # which were reckoned with another time
                del samples[of]
        return us + ahead_us

    def report(self, broker_id: int, stream_ids: Iterable[int]) -> latency_pb2.LatencyReport:
        """The report for a broker of which these streams are read."""
        report, samples = latency_pb2.LatencyReport(), self._samples.get(broker_id, {})
        while samples and len(report.samples) < SAMPLES_MAX - 1:
            add_sample(report, *samples.popitem())
        told = {sample.stream_id for sample in report.samples}
        for stream_id in sorted(set(stream_ids) - told)[: SAMPLES_MAX - len(report.samples)]:
            report.samples.add(stream_id=stream_id, consumer_group=self._consumer_group)
        best = self._offsets[broker_id].best if broker_id in self._offsets else None
        if best is not None:
            report.clock_error_us = min(best.error_us, TIME_US_MAX)
        report.clock_ahead_us = self._ahead_us.get(broker_id, 0)
        return report

    def answered(
        self, broker_id: int, answer: broker_pb2.MultiReadChunksResponse, asked_s: float, now_s: float
    ) -> None:
        """A broker has answered a report."""
        if answer.broker_time_us:
            offset = self._offsets.setdefault(broker_id, PeerClockOffset())
            offset.answered(round(asked_s * 1e6), round(now_s * 1e6), answer.broker_time_us)
        self._watched = {stream_id: each for stream_id, each in self._watched.items() if each.until_s > now_s}
        for told in answer.advice:
            if told.stream_id in self._watched or len(self._watched) < WATCHED_MAX:
                self._watched[told.stream_id] = _Advice(
                    now_s + min(told.valid_ms / 1000, VALID_S_MAX),
                    min(told.fetch_wait_us / 1e6, WAIT_S_MAX),
                    told.fetch_bytes_min,
                    tuple(told.next_stream_ids[:NEXT_MAX]),
                )
        self._usual.keep(self._watched)
        if not self._watched:
            self._samples.clear()

    def keep(self, broker_ids: Collection[int]) -> None:
        """Nothing comes from other brokers any more."""
        self._samples = {broker_id: samples for broker_id, samples in self._samples.items() if broker_id in broker_ids}
        self._offsets = {broker_id: offset for broker_id, offset in self._offsets.items() if broker_id in broker_ids}
        self._ahead_us = {broker_id: us for broker_id, us in self._ahead_us.items() if broker_id in broker_ids}
