"""Virtual logs whose references to chunks wait for others, as latency constraints leave time for that. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kera.broker.latency.holding import Held, Holds
from kera.broker.log.segment import Segment
from kera.broker.replication.virtual_log import VirtualLog
from kera.broker.replication.virtual_segment import Batch
from kera.core.format.chunk import read_header
from kera.core.latency.limits import HELD_REQUESTS_MAX


class HeldBack:
    """The virtual logs whose references to chunks are delayed within a latency budget, with the time each is due."""

    def __init__(self) -> None:
        self._held = Held[VirtualLog]()
        self.go_by(Holds(lambda: 0.0, lambda: 0))

    def go_by(self, holds: Holds) -> None:
        """References of each stream may wait for so long from now on; nothing until this is called."""
        self._holds = holds
        # Both are looked at for each request, and so no properties.
        self.of = holds.of
        """The streams whose references may wait."""
        self.active = bool(self._held)
        """Something may be held back: `due` has to be called."""

    def came(self, batch: Batch, stream_id: int, created_us: int, size: int) -> None:
        """`size` bytes of chunks have come to a batch; the oldest record of them was accepted then."""
        due_s = self._holds.until_s(stream_id, created_us)
        batch.due_s = due_s if batch.length == size else min(batch.due_s, due_s)
        self.active = True

    def waits(self, batch: Batch, segment: Segment, start: int, requests: int = 1) -> None:
        """So many more requests wait for a batch, of the producer whose chunk is there; with many it goes at once."""
        if batch.due_s:
            writer = read_header(segment.slot.view, start).producer_id
            batch.requests[writer] = batch.requests.get(writer, 0) + requests
            if batch.requests[writer] > HELD_REQUESTS_MAX:
                batch.due_s = 0.0

    def planned(self, log: VirtualLog, now_s: float) -> None:
        """Hold back a log whose next batch was planned."""
        self._held.hold(log, log.held_until_s, now_s)

    def discard(self, log: VirtualLog) -> None:
        """A log has nothing to send any more."""
        self._held.discard(log)

    @property
    def next_in_s(self) -> float:
        """After how many seconds the first is due; infinity: nothing is held back."""
        next_s = self._held.next_s
        return next_s - self._holds.now_s() if next_s < math.inf else math.inf

    def due(self) -> tuple[float, Iterable[VirtualLog]]:
        """The time, infinity if nothing may be held back any more, and the logs that are due."""
        now_s = self._holds.now_s() if self.of else math.inf
        found = self._held.take(now_s)
        self.active = bool(self.of or self._held)
        return now_s, found
