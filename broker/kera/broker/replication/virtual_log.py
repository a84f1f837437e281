"""Virtual logs: what is to be replicated, in which order, and how far that is (thesis 5.3.3, 7.3). Pure.

A stream has V virtual logs on a broker, which its entries share. A virtual log holds no data: it refers to runs of
chunks in segments, gathers them in batches, and gives each batch a place in a virtual segment:

    appends ──► queue of batches ──plan()──► in flight, to R backups side by side ──acknowledged──► complete
                     ▲ what gathers while a batch is under way goes with the next one (group commit)

    virtual segment   0          acknowledged by all R      head          capacity
                      ├── durable ──┼── batches in flight ────┼── free ─────┤

* What is plugged in may put off the last batch, so that more goes with it (``kera.broker.replication.hooks``).
* Batches complete in the order of the log, whatever the order of the answers. A run that is complete is on all R
  backups, and moves the durable head of its segment if that waits for replicas.
* A virtual segment lives on R backups that were chosen when it was opened. It closes when it is full, when nobody has
  written for some time, or when a backup fails: then it is *sealed* at what all had acknowledged, what was in flight
  goes to the next one, elsewhere, and repair brings it back to R copies later.
* Every answer, failure and choice comes in as a call; what has to be sent goes out as `Send`, `Close` and `Free`.

Batches and virtual segments are in ``kera.broker.replication.virtual_segment``. Which virtual logs there are, and which
backups are chosen, is for ``kera.broker.replication.virtual_logs``, sending for ``kera.broker.replication.replicator``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kera.broker.log.segment import Segment
from kera.broker.replication.hooks import ReplicationHooks
from kera.broker.replication.limits import ReplicationLimits
from kera.broker.replication.virtual_segment import (
    Batch,
    Extent,
    Free,
    ReplicationTotals,
    SegmentRun,
    VirtualSegment,
)
from kera.core.errors import KeraError, invariant


@dataclass(slots=True)
class Send:
    """Append a batch to a replica."""

    log: VirtualLog
    batch: Batch
    place: VirtualSegment
    backup_id: int


@dataclass(slots=True)
class Close:
    """Close a replica at the virtual segment's length, and cut what it has beyond that."""

    log: VirtualLog | None
    """None: the virtual segment is closed, and the replica was out of reach when that happened."""
    place: VirtualSegment
    backup_id: int


Effect = Send | Close | Free


Opener = Callable[["VirtualLog"], VirtualSegment | None]
"""Opens the next virtual segment of a log; None when there are not enough backups."""


class VirtualLog:
    """Orders the chunks of its entries into batches on R backups, and completes the batches in that order.

    Belongs to one event loop.
    """

    def __init__(
        self,
        stream_id: int,
        log_id: int,
        *,
        replication: int,
        limits: ReplicationLimits,
        on_closed: Callable[[VirtualSegment], None],
        totals: ReplicationTotals,
        after: list[VirtualLog] | None = None,
    ) -> None:
        """`after`: logs that its entries had before; nothing is sent until they have nothing more to send."""
        self.stream_id = stream_id
        self.log_id = log_id
        self.replication = replication
        """R: copies on backups."""
        self.open: VirtualSegment | None = None
        self.lag_bytes = 0
        """Size of the data that are not complete."""
        self.starved = False
        """There are not enough backups for the next virtual segment."""
        self._limits = limits
        self._batch_bytes_max = min(limits.request_bytes_max, limits.segment_bytes)
        self._on_closed = on_closed
        self._after = after or []
        self._queue: deque[Batch] = deque()
        """To be sent. Those at its left may have been sent before, and are in flight as well."""
        self._in_flight: deque[Batch] = deque()
        """In the order of the log; complete ones leave at the left."""
        self._in_flight_bytes = 0
        self._places: dict[VirtualSegment, None] = {}
        """Open, or closing."""
        self.totals = totals

    # -- what comes in ---------------------------------------------------------------------------------------------

    def append(self, segment: Segment, start: int, end: int, now_ms: int, *, persist: bool = False) -> Batch:
        """Refer to chunks of a segment that is in memory; returns the batch they go with."""
        size = end - start
        batch = self._queue[-1] if self._queue else None
        run = batch.runs.get(segment) if batch is not None else None
        if batch is None or not batch.takes(run, start, size, now_ms, self._batch_bytes_max):
            batch, run = Batch(now_ms), None
            self._queue.append(batch)
        if run is None:
            batch.runs[segment] = SegmentRun(segment, start, end)
        else:
            run.end = end
        batch.length += size
        batch.persist = batch.persist or persist
        self.lag_bytes += size
        return batch

    def last(self) -> Batch | None:
        """The batch behind which nothing is pending; None when nothing is."""
        if self._queue and not self._queue[-1].sent:
            return self._queue[-1]
        return self._in_flight[-1] if self._in_flight else None

    @property
    def lags(self) -> bool:
        """Whether writers have to wait."""
        return self.lag_bytes >= self._limits.lag_bytes_max

    @property
    def busy(self) -> bool:
        """Whether anything is not complete."""
        return bool(self._queue or self._in_flight)

    @property
    def settled(self) -> bool:
        """Whether nothing is open or under way."""
        return not (self._queue or self._in_flight or self._places)

    def lag_ms(self, now_ms: int) -> int:
        """Age of the oldest thing that is not complete."""
        oldest = self._in_flight[0] if self._in_flight else self._queue[0] if self._queue else None
        return max(0, now_ms - oldest.born_ms) if oldest is not None else 0

    @property
    def in_flight(self) -> int:
        """Batches that were sent and are not complete."""
        return sum(batch.place is not None for batch in self._in_flight)

    # -- what goes out ---------------------------------------------------------------------------------------------

    def plan(self, now_ms: int, open_next: Opener, hooks: ReplicationHooks | None = None) -> list[Effect]:
        """The requests to send now."""
        effects: list[Effect] = []
        if self._after:
            if any(log.busy for log in self._after):
                return effects
            self._after = []
        while self._queue:
            batch = self._queue[0]
            if self._in_flight_bytes and not batch.sent and self._gathers(batch):
                break
            if hooks is not None and self._may_wait(batch) and hooks.puts_off(self, batch):
                break
            place = self.open
            if place is not None and place.head + batch.length > self._limits.segment_bytes:
                self.close_open(effects)
                place = None
            if place is None:
                place = open_next(self)
                self.starved = place is None
                if place is None:
                    break
                self.open = place
                self._places[place] = None
            self._queue.popleft()
            self._send(batch, place, now_ms, effects)
        return effects

    def _gathers(self, batch: Batch) -> bool:
        """Whether a batch waits for others that are in flight. What is sent again does not: they wait for it."""
        limits, size = self._limits, batch.length
        return size < limits.pipelined_bytes_min or self._in_flight_bytes + size > limits.in_flight_bytes_max

    def _may_wait(self, batch: Batch) -> bool:
        """Whether a batch may be put off: more can go with it, and nobody waits for room."""
        return not batch.sent and len(self._queue) == 1 and batch.length < self._batch_bytes_max and not self.lags

    def _send(self, batch: Batch, place: VirtualSegment, now_ms: int, effects: list[Effect]) -> None:
        if not batch.sent:
            self._in_flight.append(batch)
        batch.sent = True
        batch.place, batch.offset, batch.checksum = place, place.head, place.checksum
        batch.missing = set(place.backups)
        place.checksum = batch.checksum_after = batch.checksum_from(place.checksum)
        place.head += batch.length
        place.pending += 1
        place.touched_ms = now_ms
        self._in_flight_bytes += batch.length
        effects += [Send(self, batch, place, backup_id) for backup_id in place.backups]

    def close_open(self, effects: list[Effect]) -> None:
        """End the open virtual segment; its replicas are closed when all of it is complete."""
        if self.open is not None:
            self._end(self.open, effects)

    def _end(self, place: VirtualSegment, effects: list[Effect]) -> None:
        """Nothing more comes to a virtual segment; it is closed as soon as what it has is complete."""
        place.ended = True
        if self.open is place:
            self.open = None
        if place.closing is not None or place.pending:
            return
        if place.head:
            place.closing = set(place.backups)
            effects += [Close(self, place, backup_id) for backup_id in place.backups]
            self._close_when_all_have(place)
        else:
            del self._places[place]
            self._on_closed(place)
            effects += place.freed()

    def _close_when_all_have(self, place: VirtualSegment) -> None:
        if place.closing == set() and place in self._places:
            del self._places[place]
            place.close()
            self._on_closed(place)

    # -- what comes back -------------------------------------------------------------------------------------------

    def acknowledged(self, batch: Batch, place: VirtualSegment, backup_id: int) -> list[Effect]:
        """A backup has a batch; returns what to do about it."""
        if batch.place is not place:
            return []  # the answer of a replica that was given up meanwhile
        batch.missing.discard(backup_id)
        return self._complete()

    def _complete(self) -> list[Effect]:
        effects: list[Effect] = []
        while self._in_flight and self._in_flight[0].complete:
            batch = self._in_flight.popleft()
            place = batch.place
            invariant(place is not None, "a complete batch has a place")
            if place is None:
                break
            self._in_flight_bytes -= batch.length
            self.lag_bytes -= batch.length
            self.totals.batches += 1
            self.totals.bytes += batch.length
            place.pending -= 1
            batch.completed = batch.over = True
            for run in batch.runs.values():
                place.cover(run)
                run.segment.replicated(run.end)
                run.segment.slot.unpin()
            batch.finish(None)
            if place.ended:
                self._end(place, effects)
        return effects

    def closed(self, place: VirtualSegment, backup_id: int) -> None:
        """A backup has closed its replica."""
        if place.closing is not None:
            place.closing.discard(backup_id)
            self._close_when_all_have(place)

    def lost(self, backup_id: int) -> list[Effect]:
        """A backup has failed: leave it; returns what to do about it."""
        effects: list[Effect] = []
        for place in [place for place in self._places if backup_id in place.backups]:
            self.leave(place, backup_id, effects)
        return effects + self._complete()

    def leave(self, place: VirtualSegment, backup_id: int, effects: list[Effect]) -> None:
        """One backup cannot take a virtual segment (any more): seal it, and go on elsewhere."""
        if place not in self._places or backup_id not in place.backups:
            return
        place.backups.remove(backup_id)
        place.left.append(backup_id)
        self.totals.virtual_segments_sealed += 1
        if place.closing is not None:
            self.closed(place, backup_id)
            return
        for each in {**self._send_again(place), place: None}:
            self._end(each, effects)

    def _send_again(self, place: VirtualSegment) -> dict[VirtualSegment, None]:
        """Send everything again from the first batch of `place` on that is not complete, in the order of the log.

        That takes along what is in flight to other virtual segments: so each has batches that follow each other in the
        log. Returns those that lost batches; nothing more may come to them.
        """
        batches = list(self._in_flight)
        first = next((index for index, batch in enumerate(batches) if batch.place is place), len(batches))
        ended: dict[VirtualSegment, None] = {}
        for batch in batches[first:]:
            lost = batch.place
            if lost is None:
                continue
            if lost not in ended:
                ended[lost] = None
                lost.head, lost.checksum = batch.offset, batch.checksum
            lost.pending -= 1
            self._in_flight_bytes -= batch.length
            batch.place = None
            self.totals.batches_sent_again += 1
        if ended:
            unsent = [batch for batch in self._queue if not batch.sent]
            self._queue = deque([batch for batch in batches if batch.place is None] + unsent)
        return ended

    def expire(self, before_ms: int, error: KeraError) -> None:
        """Tell those that wait since `before_ms` that it takes too long; their chunks stay to be replicated."""
        for batches in (self._in_flight, self._queue):
            for batch in batches:
                if batch.born_ms > before_ms:
                    break
                batch.finish(error)

    def shed(self) -> list[Extent]:
        """Forget what was never sent and nobody waits for; returns it, to be covered later."""
        extents = []
        for batch in [batch for batch in self._queue if not batch.sent and not batch.waiters]:
            self._queue.remove(batch)
            self.lag_bytes -= batch.length
            batch.over = True
            for run in batch.runs.values():
                extents.append(Extent(run.segment.address, run.start, run.end))
                run.segment.slot.unpin()
        return extents

    def drop(self, error: KeraError) -> list[Effect]:
        """The stream is gone: forget everything; returns what to do about it."""
        batches = [*self._in_flight, *(batch for batch in self._queue if not batch.sent)]
        self._in_flight.clear()
        self._queue.clear()
        self.lag_bytes = self._in_flight_bytes = 0
        for batch in batches:
            batch.place, batch.over = None, True
            for run in batch.runs.values():
                run.segment.slot.unpin()
            batch.finish(error)
        places, self._places, self.open = self._places, {}, None
        return [effect for place in places for effect in place.freed()]
