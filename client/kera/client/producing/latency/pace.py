"""How long an open chunk may fill: of one producer's chunks for one broker. Nothing here does I/O.

A latency target gives each chunk a deadline (Lohrmann, Warneke and Kao, *Nephele Streaming*, 3.2 to 3.5, where a size
is searched for in steps; here time is reckoned with, in one step):

    when its oldest record was accepted + the target - what the rest of the way takes - a tenth of the target

The rest of the way is from when a chunk is closed until it is acknowledged, as measured of the last requests: their
p99, so that a pause that comes now and then is reckoned with. Where that leaves less than half of the target, a lower
quantile is taken that leaves it, down to the median: some are late whatever is done, and small chunks would make more
load, and more of them late. As long as nothing is measured, or the target leaves no time at all, chunks go as if there
were no target: when nothing is in flight.

Of a stream with a latency constraint its broker advises how long chunks may fill, for a while; of advice and target
what is less counts. Neither makes a chunk wait for more than half of ``delivery_timeout_ms``, which counts from
acceptance: what is left is for requests. ``linger_ms`` wins where it is given.

Brokers hold acknowledgements back for the constraint as well, so that replication gathers. They are told for how long
they may, where that goes against the producer's own settings.
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
"""Measurements count for so long."""
MARGIN = 0.1
"""Share of a target for delays that are not measured, such as a busy event loop."""
QUANTILES = (0.99, 0.95, 0.9, 0.75, 0.5)
LEFT = 0.5
"""Share of a target that has to be left for a quantile to be taken, but for the last one."""
SLACK, SLACK_OF_FEW, FEW = 1 / 8, 1 / 2, 16
"""A chunk may go this part of its time early with one that is due, and the second one if fewer than so many go then.

A request costs as much as some eight chunks: it is worth a few that are not as full as they could be, but not many.
"""
WAIT_SHARE_MAX, HELD_SHARE_MAX = 1 / 2, 1 / 4
"""Shares of the delivery timeout: the maximum for which a chunk waits by advice or target, and for which a broker holds
it back."""
ADVICE_MAX = 1000
"""Streams about which there is advice."""
ADVISED_S_MAX = 3600.0
VALID_S_MAX = 60.0
"""For so long advice counts at most, whoever says what."""


class Lateness:
    """How long chunks are left beyond their deadlines with nothing in the way: as the event loop is busy.

    What is in the way: no connection, or no room for another request; chunks are looked at as soon as it is gone. And
    what is due by advice that has just come was not due before. Times are on the loop's clock.
    """

    def __init__(self) -> None:
        self._was_free = False
        """The last round ended with a look at open chunks."""
        self._is_free = False
        self._free_s = 0.0
        """Since when nothing is in the way."""

    def begins(self) -> None:
        """Another round: chunks may be looked at in it."""
        self._was_free, self._is_free = self._is_free, False

    def sent(self) -> None:
        """There may be no room for another request."""
        self._is_free = False

    def told(self, now_s: float) -> None:
        """Other deadlines count from now on."""
        self._free_s = now_s

    def looked(self, due: Due, now_s: float) -> float:
        """Open chunks were looked at: how long the first of those that are closed was left beyond its deadline."""
        if not self._was_free:
            self._was_free, self._free_s = True, now_s
        self._is_free = True
        return 0.0 if due.since_s is None else max(0.0, now_s - max(due.since_s, self._free_s))


class Pace:
    """Limits the time that a chunk for one broker may fill, by latency target and advice.

    Times are on the loop's clock.
    """

    def __init__(self, settings: ProducerSettings) -> None:
        self._linger_s = None if settings.linger_ms is None else settings.linger_ms / 1000
        target_ms = settings.latency_target_ms
        self._target_s = None if target_ms is None or self._linger_s is not None else target_ms / 1000
        self._wait_s_max = WAIT_SHARE_MAX * settings.delivery_timeout_ms / 1000
        self.held_us_max = held_us_max(settings)
        """For how long brokers may hold its acknowledgements back; None: for as long as a constraint leaves time."""
        # Looked at for each request, and so no properties.
        self.measures = self._target_s is not None
        """It wants to know what requests take."""
        self.advised = False
        """There is, or was, advice about a stream."""
        self.holds = bool(self._linger_s) or self.measures
        """Chunks may have to wait: for a time, not for an answer."""
        self.grace_s = 0.0 if self._linger_s is None else TIMER_S
        """How much later than it is due a look at a chunk is soon enough."""
        self._advice: dict[int, tuple[float, float]] = {}
        """By stream: how long a chunk may fill, and until when that counts."""
        self.connected_s = 0.0
        """Since when there is a connection."""
        self._rest = Running(WINDOW_S)
        self._rest_s: float | None = None
        self._rest_until_s = 0.0

    @property
    def own_linger_us(self) -> int:
        """For how long chunks wait whatever is advised; 0: they do not, or it goes by advice."""
        return round(min((self._linger_s or 0.0) * 1e6, TIME_US_MAX))

    def acknowledged(self, chunks: Iterable[PendingChunk], now_s: float) -> None:
        """These were answered together. What waited for a connection says nothing of those that come."""
        closed_s = min((chunk.closed_s for chunk in chunks if chunk.closed_s is not None), default=None)
        if closed_s is not None and closed_s >= self.connected_s:
            self._rest.add(now_s, round((now_s - closed_s) * 1e6))
            self._rest_until_s = 0.0

    def rest_s(self, now_s: float) -> float | None:
        """The time that the rest of the way takes; None: unknown."""
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
        """How long a chunk of a stream may fill; 0: until nothing is in flight."""
        if self._linger_s is not None:
            return self._linger_s
        advised_s = self._advised_s(stream_id, now_s) if self._advice else None
        if self._target_s is None:
            return min(advised_s or 0.0, self._wait_s_max)
        rest_s = self.rest_s(now_s)
        wait_s = 0.0 if rest_s is None else max(0.0, self._target_s * (1 - MARGIN) - rest_s)
        return min(wait_s, self._wait_s_max if advised_s is None else min(advised_s, self._wait_s_max))

    def is_advised(self, stream_id: int) -> bool:
        """Whether there is advice about a stream."""
        return stream_id in self._advice

    def advise(self, advice: Iterable[latency_pb2.WriterAdvice], now_s: float) -> None:
        """Take a broker's advice. Odd values are bounded; old advice is forgotten."""
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
        """How much earlier than after `wait_s` a chunk may go with so many others; 0: it has to be due by itself."""
        if self._linger_s is not None:
            return 0.0
        slack = (SLACK if others >= FEW else SLACK_OF_FEW) if others else 0.0
        return min(wait_s, max(wait_s * slack, TIMER_S))


def held_us_max(settings: ProducerSettings) -> int | None:
    """For how long brokers may hold acknowledgements back, as settings say; None: they say nothing of it."""
    if settings.linger_ms is not None or settings.latency_target_ms is not None:
        return 0
    if settings.requests_in_flight_max <= HELD_REQUESTS_MAX:
        return 0
    held_us = round(HELD_SHARE_MAX * settings.delivery_timeout_ms * 1000)
    return held_us if held_us < HELD_US_MAX else None
