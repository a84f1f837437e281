"""How long an open chunk of one producer for one broker may fill. Nothing here does I/O.

A latency target gives each chunk a deadline (Lohrmann, Warneke and Kao, *Nephele Streaming*, 3.2 to 3.5; the paper
searches for a size in steps, this module computes a time in one step):

    time when its oldest record was accepted + the target - the send time - a tenth of the target

The send time is from closing a chunk until its acknowledgement, measured on the last requests. It is their p99, to
allow for occasional pauses. If that leaves less than half of the target, the pace takes a lower quantile that leaves
half of it, down to the median: some chunks are late in any case, and smaller chunks would add load and make more of
them late. As long as nothing is measured, or the target leaves no time at all, chunks go as if there were no target:
when nothing is in flight.

For a stream with a latency constraint, its broker advises how long chunks may fill; advice holds for a while. The
smaller of advice and target counts. Neither makes a chunk wait for more than half of ``delivery_timeout_ms``, which
counts from acceptance: the rest is for requests. ``linger_ms`` overrides both.

Brokers also hold acknowledgements back for the constraint, so that replication can gather chunks. The producer limits
how long they may, if its own settings require it.
"""

from __future__ import annotations

from collections.abc import Iterable

from kera.client.producing.lanes.lane import PendingChunk
from kera.client.producing.sending.fill_time import TIMER_S, Due
from kera.client.settings import ProducerSettings
from kera.core.latency.limits import HELD_REQUESTS_MAX, HELD_US_MAX
from kera.core.latency.sample import TIME_US_MAX, Sample
from kera.core.latency.window import Running
from kera.v1 import latency_pb2

WINDOW_S = 10.0
"""Time for which measurements count."""
MARGIN = 0.1
"""Share of a target for delays that are not measured, such as a busy event loop."""
QUANTILES = (0.99, 0.95, 0.9, 0.75, 0.5)
LEFT = 0.5
"""Share of a target that a quantile has to leave to be taken; the last quantile need not."""
SLACK, SLACK_OF_FEW, FEW = 1 / 8, 1 / 2, 16
"""A chunk may go along with a due one early, by the first share of its wait; by the second if fewer than `FEW` go.

A request costs as much as some eight chunks: saving one is worth a few chunks that are less full, but not many.
"""
WAIT_SHARE_MAX, HELD_SHARE_MAX = 1 / 2, 1 / 4
"""Shares of the delivery timeout: how long a chunk waits at most by advice or target, and how long a broker may hold
its acknowledgement back."""
ADVICE_MAX = 1000
"""Maximum number of streams with advice."""
ADVISED_S_MAX = 3600.0
VALID_S_MAX = 60.0
"""Maximum time for which advice counts, whatever the broker says."""


class Lateness:
    """Measures how long chunks stay open beyond their deadlines although nothing blocks them: the event loop is busy.

    A missing connection blocks chunks, and so does a lack of room for another request; the sender looks at chunks as
    soon as the blockage is gone. A chunk that is due by advice that has just come was not due before. Times are on the
    loop's clock.
    """

    def __init__(self) -> None:
        self._was_free = False
        """Whether the last round ended with a look at open chunks."""
        self._is_free = False
        self._free_s = 0.0
        """Time since which nothing blocks chunks."""

    def begins(self) -> None:
        """Note that another round begins; the sender may look at chunks in it."""
        self._was_free, self._is_free = self._is_free, False

    def sent(self) -> None:
        """Note that a request was sent: there may be no room for another one."""
        self._is_free = False

    def told(self, now_s: float) -> None:
        """Note that deadlines may change from now on."""
        self._free_s = now_s

    def looked(self, due: Due, now_s: float) -> float:
        """Note a look at open chunks. Returns how long the first closed chunk stayed open beyond its deadline."""
        if not self._was_free:
            self._was_free, self._free_s = True, now_s
        self._is_free = True
        return 0.0 if due.since_s is None else max(0.0, now_s - max(due.since_s, self._free_s))


class Pace:
    """Limits how long a chunk for one broker may fill, by latency target and advice.

    Times are on the loop's clock.
    """

    def __init__(self, settings: ProducerSettings) -> None:
        self._linger_s = None if settings.linger_ms is None else settings.linger_ms / 1000
        target_ms = settings.latency_target_ms
        self._target_s = None if target_ms is None or self._linger_s is not None else target_ms / 1000
        self._wait_s_max = WAIT_SHARE_MAX * settings.delivery_timeout_ms / 1000
        self.held_us_max = held_us_max(settings)
        """How long brokers may hold acknowledgements back; None: for as long as a constraint leaves time."""
        # Attributes, not properties: they are read for each request.
        self.measures = self._target_s is not None
        """Whether it needs the durations of requests."""
        self.advised = False
        """Whether there is advice about a stream, or was at the last answer."""
        self.holds = bool(self._linger_s) or self.measures
        """Whether chunks may have to wait for a time, and not only for an answer."""
        self.grace_s = 0.0 if self._linger_s is None else TIMER_S
        """How long after its time the sender may look at a due chunk."""
        self._advice: dict[int, tuple[float, float]] = {}
        """The advice by stream: the time that a chunk may fill, and the end of the advice."""
        self.connected_s = 0.0
        """Time of the last connection."""
        self._rest = Running(WINDOW_S)
        self._rest_s: float | None = None
        self._rest_until_s = 0.0

    @property
    def own_linger_us(self) -> int:
        """How long chunks wait by the producer's own setting, whatever is advised; 0: they do not, or advice counts."""
        return round(min((self._linger_s or 0.0) * 1e6, TIME_US_MAX))

    def acknowledged(self, chunks: Iterable[PendingChunk], now_s: float) -> None:
        """Measure chunks that were answered together, unless the first waited for a connection."""
        closed_s = min((chunk.closed_s for chunk in chunks if chunk.closed_s is not None), default=None)
        if closed_s is not None and closed_s >= self.connected_s:
            self._rest.add(now_s, round((now_s - closed_s) * 1e6))
            self._rest_until_s = 0.0

    def rest_s(self, now_s: float) -> float | None:
        """Return the send time to reckon with; None: not measured."""
        if now_s >= self._rest_until_s:
            sample = self._rest.sample(now_s)
            self._rest_s = self._reckoned_s(sample) if sample.count else None
            self._rest_until_s = now_s + WINDOW_S / 10
        return self._rest_s

    def _reckoned_s(self, sample: Sample) -> float:
        most_s, rest_s = LEFT * (self._target_s or 0.0), 0.0
        for share in QUANTILES:
            rest_s = sample.quantile_us(share) / 1e6
            if rest_s <= most_s:
                break
        return rest_s

    def wait_s(self, stream_id: int, now_s: float) -> float:
        """Return how long a chunk of a stream may fill; 0: until nothing is in flight."""
        if self._linger_s is not None:
            return self._linger_s
        advised_s = self._advised_s(stream_id, now_s) if self._advice else None
        if self._target_s is None:
            return min(advised_s or 0.0, self._wait_s_max)
        rest_s = self.rest_s(now_s)
        wait_s = 0.0 if rest_s is None else max(0.0, self._target_s * (1 - MARGIN) - rest_s)
        return min(wait_s, self._wait_s_max if advised_s is None else min(advised_s, self._wait_s_max))

    def is_advised(self, stream_id: int) -> bool:
        """Return whether there is advice about a stream."""
        return stream_id in self._advice

    def advise(self, advice: Iterable[latency_pb2.WriterAdvice], now_s: float) -> None:
        """Take a broker's advice. Bounds odd values, and forgets expired advice."""
        self._advice = {stream_id: each for stream_id, each in self._advice.items() if each[1] > now_s}
        for each in advice:
            if each.stream_id in self._advice or len(self._advice) < ADVICE_MAX:
                wait_s = min(each.linger_us / 1e6, ADVISED_S_MAX)
                self._advice[each.stream_id] = wait_s, now_s + min(each.valid_ms / 1000, VALID_S_MAX)
        self.advised = bool(self._advice)
        self.holds = bool(self._linger_s) or self.measures or self.advised

    def _advised_s(self, stream_id: int, now_s: float) -> float | None:
        wait_s, until_s = self._advice.get(stream_id, (0.0, 0.0))
        return wait_s if now_s < until_s else None

    def early_s(self, wait_s: float, others: int) -> float:
        """Return how much before the end of `wait_s` a chunk may go along with `others` due ones; 0: it may not."""
        if self._linger_s is not None:
            return 0.0
        slack = (SLACK if others >= FEW else SLACK_OF_FEW) if others else 0.0
        return min(wait_s, max(wait_s * slack, TIMER_S))


def held_us_max(settings: ProducerSettings) -> int | None:
    """Return how long brokers may hold acknowledgements back by the settings; None: the settings do not limit it."""
    if settings.linger_ms is not None or settings.latency_target_ms is not None:
        return 0
    if settings.requests_in_flight_max <= HELD_REQUESTS_MAX:
        return 0
    held_us = round(HELD_SHARE_MAX * settings.delivery_timeout_ms * 1000)
    return held_us if held_us < HELD_US_MAX else None
