"""The time of day at brokers, by a clock that is never set: for chunks of streams with a latency constraint.

Readers compare a chunk's ``created_us`` with the broker's time of day. A writer's own clock may be set by seconds while
it runs, and the readers' results would be wrong for as long as such chunks are measured. So chunks of a measured stream
carry the time of the broker that they go to, estimated from its last answers to within half of their round trip.

A stream with columns and epochs is an exception: rows without a time count as of their chunk's time, and the writer's
clock decided their epoch. Nothing here does I/O; times in seconds are on the loop's clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from kera.client.types import StreamDescription
from kera.core.latency.offset import Offset, PeerClockOffset

KEPT_S = 60.0
"""A stream's chunks have a broker's time for so long after the last advice: also while its broker is recovered."""
BROKERS_MAX = 1000


class BrokerTimes:
    """Estimates the time of day at brokers, and stamps chunks of measured streams with it. Belongs to one producer."""

    def __init__(self) -> None:
        self._offsets: dict[int, PeerClockOffset] = {}
        self._until_s: dict[int, float] = {}
        """Measured streams, with the end of the measurement."""
        self.own: set[int] = set()
        """Measured streams whose chunks have their writer's time even if brokers' times are known."""

    def answered(self, broker_id: int, asked_s: float, answered_s: float, broker_us: int) -> None:
        """Note a broker's time of day, which it answered between `asked_s` and `answered_s`."""
        offset = self._offsets.get(broker_id)
        if offset is None:
            if len(self._offsets) >= BROKERS_MAX:
                return
            offset = self._offsets[broker_id] = PeerClockOffset()
        offset.answered(round(asked_s * 1e6), round(answered_s * 1e6), broker_us)

    def advised(self, stream_ids: Iterable[int], now_s: float) -> None:
        """Note that a broker has given advice about these streams."""
        for stream_id in stream_ids:
            self._until_s[stream_id] = now_s + KEPT_S

    def best(self, broker_id: int) -> Offset | None:
        """Return how far a broker's time of day is ahead of the loop's clock; None: that is not known."""
        offset = self._offsets.get(broker_id)
        return None if offset is None else offset.best

    def created_us(self, broker_id: int, stream: StreamDescription, at_s: float) -> int | None:
        """Return the time of day at a broker at `at_s`; None: a chunk of this stream has its writer's time."""
        if not self._until_s:
            return None
        until_s = self._until_s.get(stream.stream_id)
        if until_s is None:
            return None
        if stream.typed and stream.config.epoch_ms:
            self.own.add(stream.stream_id)
            return None
        if until_s < at_s:
            del self._until_s[stream.stream_id]
            return None
        best = self.best(broker_id)
        return None if best is None else round(at_s * 1e6) + best.ahead_us
