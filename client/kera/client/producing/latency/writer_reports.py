"""Measurements of a producer's requests to one broker, for streams with a latency constraint, and the broker's advice.

Once per interval a request names the streams that are written to. The answer has advice about streams with a
constraint, and the broker's time of day (`broker_times`). From then on, as long as advice comes, the producer measures
chunks of such a stream: the time until they are closed (GATHER), and from then until the acknowledgement (SEND).
Nothing is done per record, and nothing at all for other streams. See ``latency.proto``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from kera.client.producing.lanes.bundle import Bundle
from kera.client.producing.lanes.lane import PendingChunk
from kera.client.producing.latency.broker_times import BrokerTimes
from kera.client.producing.latency.pace import Pace
from kera.core.latency.hop import Hop
from kera.core.latency.report import INTERVAL_S, SAMPLES_MAX, Of, add_sample
from kera.core.latency.sample import TIME_US_MAX, Sample
from kera.v1 import broker_pb2

LONE_S = 1.25 * INTERVAL_S
"""Interval after which a report goes alone: a little longer than the one for reports that go with requests."""


class WriterReports:
    """Measures requests to one broker, reports the figures to it, and takes its advice.

    Times in seconds are on the loop's clock.
    """

    def __init__(
        self,
        broker_id: int,
        times: BrokerTimes,
        pace: Pace,
        delivery_timeout_s: float,
        now_us: Callable[[], int],
        now_s: float,
    ) -> None:
        """`now_us`: the time of day, on the clock that chunks carry.

        `delivery_timeout_s`: from acceptance to a chunk's deadline.
        """
        self._broker_id = broker_id
        self._times = times
        self._pace = pace
        self._delivery_timeout_s = delivery_timeout_s
        self._now_us = now_us
        self._next_s = (
            now_s if pace.held_us_max is not None else now_s + INTERVAL_S
        )  # its first answer may be held back
        self.lone_s = now_s + LONE_S
        """Time when a report goes alone, see `lone_reports`."""
        self._samples: dict[tuple[int, int], tuple[Sample, Sample]] = {}
        """Samples of GATHER and SEND, by stream and streamlet."""

    def add_to(
        self,
        request: broker_pb2.MultiWriteChunksRequest,
        stream_ids: Callable[[], Collection[int]],
        now_s: float,
        *,
        lone: bool = False,
    ) -> bool:
        """Add a report on these streams to a request if one is due. Returns whether it did.

        `lone`: the request carries nothing else. A lone report does not delay the next one that goes with a request.
        """
        if now_s < (self.lone_s if lone else self._next_s):
            return False
        report = request.latency
        whose = self._times.own
        # One report is either of streams with their writer's time or of others: `clock_ahead_us` differs.
        own = bool(self._samples) and next(iter(self._samples))[0] in whose
        for stream_id, streamlet in [key for key in self._samples if (key[0] in whose) == own]:
            if len(report.samples) >= SAMPLES_MAX - 1:
                break
            gather, send = self._samples.pop((stream_id, streamlet))
            add_sample(report, Of(stream_id, streamlet, Hop.GATHER), gather)
            add_sample(report, Of(stream_id, streamlet, Hop.SEND), send)
        if not self._samples:  # else the next request has more
            self._next_s = self._next_s if lone else now_s + INTERVAL_S
            self.lone_s = now_s + LONE_S
        told = {sample.stream_id for sample in report.samples}
        for stream_id in sorted(set(stream_ids()) - told)[: SAMPLES_MAX - len(report.samples)]:
            report.samples.add(stream_id=stream_id)
        best = self._times.best(self._broker_id)
        if best is not None:
            ahead_us = self._now_us() - round(now_s * 1e6) - best.ahead_us if own else 0
            if max(best.error_us, abs(ahead_us)) <= TIME_US_MAX:  # else a clock was never set
                report.clock_error_us, report.clock_ahead_us = best.error_us, ahead_us
        report.own_linger_us = self._pace.own_linger_us
        if self._pace.held_us_max is not None:
            report.held_us_max = self._pace.held_us_max
        return True

    @property
    def has_samples(self) -> bool:
        """Whether there are measurements to report."""
        return bool(self._samples)

    def answered(self, asked_s: float, answer: broker_pb2.MultiWriteChunksResponse, now_s: float) -> None:
        """Take the answer to a request that carried a report. `asked_s`: when the request was sent."""
        if answer.broker_time_us:
            self._times.answered(self._broker_id, asked_s, now_s, answer.broker_time_us)
        self._pace.advise(answer.advice, now_s)
        self._times.advised([each.stream_id for each in answer.advice if self._pace.is_advised(each.stream_id)], now_s)
        for key in [key for key in self._samples if not self._pace.is_advised(key[0])]:
            del self._samples[key]

    def delivered(self, bundles: Iterable[Bundle], chunks: Iterable[PendingChunk], now_s: float) -> None:
        """Measure acknowledged chunks. Called only if there is advice, see `Pace.advised`."""
        for bundle in bundles:
            accepted_s = bundle.deadline_s - self._delivery_timeout_s
            key = bundle.identity.stream_id, int(bundle.streamlets[0])
            self._add(key, 0.0, now_s - accepted_s, bundle.chunk_count)
        for chunk in chunks:
            closed_s = chunk.closed_s
            if closed_s is not None:
                identity = chunk.lane.identity
                waited_s = closed_s - (chunk.deadline_s - self._delivery_timeout_s)
                self._add((identity.stream_id, identity.streamlet_id), waited_s, now_s - closed_s, 1)

    def _add(self, key: tuple[int, int], waited_s: float, sent_s: float, count: int) -> None:
        samples = self._samples.get(key)
        if samples is None:
            if not self._pace.is_advised(key[0]):
                return
            samples = self._samples[key] = (Sample(), Sample())
        gather, send = samples
        gather.add(round(waited_s * 1e6), count)
        send.add(round(sent_s * 1e6), count)
