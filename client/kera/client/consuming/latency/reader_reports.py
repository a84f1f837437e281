"""Measurements of a group's consumer in streams with a latency constraint, for their brokers.

The meter measures each run of chunks that came together, by its oldest chunk: from its ``created_us`` until it came
(HAND_OVER, which the broker corrects), then until it was taken (PREFETCH), and then until the first record made from it
was accepted (WORK, see ``at_work``). This is a record for a stream that comes next on the path, accepted before the
application took other data. Without one, WORK ends when the application asked for more, which is no later than that.
Data that still wait, or that the application still works on, count with the time so far (see ``waiting``). For chunks
that came before the constraint was known, only PREFETCH and WORK count.

Own times are on a clock that is never set; the broker's answers show its time of day on that clock. If a writer's clock
is ahead, chunks come before they were created: then HAND_OVER is computed with a time that is ahead as well, and
reports say by how much.
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
"""Maximum number of measured streams."""
NEXT_MAX = 32
"""Maximum number of streams that come next on the paths of a stream."""


class _Advice(NamedTuple):
    """A broker's advice about a stream with a constraint."""

    until_s: float
    """Time until which it counts."""
    wait_s: float = 0.0
    bytes_min: int = 0
    """After an answer with fewer bytes, the next request may be delayed."""
    next_ids: tuple[int, ...] = ()
    """Streams that get the records made from this stream."""


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
        """Its entry in `AtWork`; None: no records are expected from it."""
        self.asked_s: float | None = None
        """Time at which the application asked for more."""


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
        """`at_work`: of the application; None: its records are not known. `waiting`: returns data not taken yet."""
        self._consumer_group = consumer_group
        self._at_work = at_work
        self._waiting = waiting
        self._watched: dict[int, _Advice] = {}
        """Streams with a constraint."""
        self._samples: dict[int, dict[Of, Sample]] = {}
        """Samples that are not reported yet, by broker."""
        self._offsets: dict[int, PeerClockOffset] = {}
        self._ahead_us: dict[int, int] = {}
        """By broker: how much later than its time of day HAND_OVER is computed with."""
        self._taken: _Taken | None = None
        """The data that the application is working on."""
        self._usual = Usual()

    @property
    def watches(self) -> bool:
        """Whether there is a stream to measure."""
        return bool(self._watched)

    def watches_stream(self, stream_id: int, now_s: float) -> bool:
        """Return whether a stream is measured now."""
        return self._watched.get(stream_id, NO_ADVICE).until_s > now_s

    def pause_s(self, stream_id: int, size_bytes: int, now_s: float) -> float:
        """Return how long the next request may be delayed to collect more, after an answer with `size_bytes`.

        Returns 0 after an empty answer, because the next request waits for data anyway, and after a large one.
        """
        advice = self._watched.get(stream_id, NO_ADVICE)
        return advice.wait_s if advice.until_s > now_s and 0 < size_bytes < advice.bytes_min else 0.0

    def broker_us(self, broker_id: int, at_s: float) -> int | None:
        """Return the time of day at a broker at `at_s`; None: not known yet."""
        offset = self._offsets[broker_id].best if broker_id in self._offsets else None
        return None if offset is None else round(at_s * 1e6) + offset.ahead_us

    def came(self, fetched: Fetched, broker_id: int, now_s: float) -> Came | None:
        """Measure HAND_OVER of fetched chunks. Returns their arrival, for `taken`; None: there are no chunks."""
        if not fetched.buffers:
            return None
        if self._watched and self.watches_stream(fetched.entry.stream_id, now_s):
            broker_us = self.broker_us(broker_id, now_s)
            if broker_us is not None:
                self.add(broker_id, fetched.entry, Hop.HAND_OVER, broker_us - created_us_at(fetched.buffers[0]))
        return Came(broker_id, now_s)

    def asks(self, now_s: float) -> None:
        """Note that the application asks for more."""
        taken = self._taken
        if taken is None or taken.asked_s is not None:
            return
        taken.asked_s = now_s
        if taken.job is None or self._first_us(taken.job) is not None:
            self._done()  # else another task of the application may still work on it

    def taken(self, fetched: Fetched, came: Came | None, now_s: float, of: Range | None = None) -> None:
        """Note that the application takes the data of a range. `came`: from `came`; None: not measured."""
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
        """Count waiting data, and data being worked on, with the time so far. Called once in `interval_s`."""
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
        """End the measurements: the application takes nothing more."""
        self._done()

    def _first_us(self, job: Job) -> int | None:
        return None if self._at_work is None else self._at_work.first_us(job)

    def _done(self) -> None:
        """End WORK on the data taken last."""
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
        """Add the time that chunks of an entry took for a hop. Only HAND_OVER may be negative: a writer is ahead."""
        if hop is Hop.HAND_OVER:
            us = self._reckoned_us(broker_id, us)
        of = Of(entry.stream_id, entry.streamlet_id, hop, self._consumer_group)
        self._samples.setdefault(broker_id, {}).setdefault(of, Sample()).add(us)

    def _reckoned_us(self, broker_id: int, us: int) -> int:
        ahead_us = self._ahead_us.get(broker_id, 0)
        if us + ahead_us < 0 and ahead_us < TIME_US_MAX:
            ahead_us = self._ahead_us[broker_id] = min(-us, TIME_US_MAX)
            samples = self._samples.get(broker_id, {})
            for of in [of for of in samples if of.hop is Hop.HAND_OVER]:  # computed with another time
                del samples[of]
        return us + ahead_us

    def report(self, broker_id: int, stream_ids: Iterable[int]) -> latency_pb2.LatencyReport:
        """Return the report for a broker that sends these streams; removes the reported samples."""
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
        """Take a broker's answer to a report: its time of day, and advice."""
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
        """Forget all other brokers, because no data come from them any more."""
        self._samples = {broker_id: samples for broker_id, samples in self._samples.items() if broker_id in broker_ids}
        self._offsets = {broker_id: offset for broker_id, offset in self._offsets.items() if broker_id in broker_ids}
        self._ahead_us = {broker_id: us for broker_id, us in self._ahead_us.items() if broker_id in broker_ids}
