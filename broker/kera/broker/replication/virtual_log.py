"""Virtual logs: the data to replicate, its order, and the progress of its replication (thesis 5.3.3, 7.3). Pure.

A stream has V virtual logs on a broker, which its entries share. A virtual log holds no data: it refers to runs of
chunks in segments, gathers them in batches, and gives each batch a place in a virtual segment:

    appends ──► queue of batches ──plan()──► in flight, to R backups side by side ──acknowledged──► complete
                     ▲ runs that arrive while a batch is under way go with the next one (group commit)

    virtual segment   0          acknowledged by all R      head          capacity
                      ├── durable ──┼── batches in flight ────┼── free ─────┤

* A plug-in may delay the last batch, so that more data goes with it (``kera.broker.replication.hooks``).
* Batches complete in the order of the log, whatever the order of the answers. A complete run is on all R backups, and
  moves the durable head of its segment if that follows the replicas.
* A virtual segment lives on R backups that are chosen when it is opened. It closes when it is full, when it has been
  idle for some time, or when a backup fails. In the last case it is *sealed* at the length that all backups have
  acknowledged, the batches in flight go to the next virtual segment, elsewhere, and repair later restores R copies.
* Every answer, failure and choice comes in as a call; requests to backups go out as `Send`, `Close` and `Free`.

``kera.broker.replication.virtual_segment`` has the batches and virtual segments. The virtual logs of all streams, and
the choice of backups, are in ``kera.broker.replication.virtual_logs``; ``kera.broker.replication.replicator`` sends the
requests.
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
    """A request to append a batch to a replica."""

    log: VirtualLog
    batch: Batch
    place: VirtualSegment
    backup_id: int


@dataclass(slots=True)
class Close:
    """A request to close a replica at the virtual segment's length, and to cut off any data beyond it."""

    log: VirtualLog | None
    """None: the virtual segment was closed while the replica was out of reach."""
    place: VirtualSegment
    backup_id: int


Effect = Send | Close | Free


Opener = Callable[["VirtualLog"], VirtualSegment | None]
"""Opens the next virtual segment of a log; returns None if there are not enough backups."""


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
        """`after`: logs that its entries had before; this log sends nothing until they have sent everything."""
        self.stream_id = stream_id
        self.log_id = log_id
        self.replication = replication
        """R, the number of copies on backups."""
        self.open: VirtualSegment | None = None
        self.lag_bytes = 0
        """Size of the data that is not complete."""
        self.starved = False
        """Whether there are not enough backups for the next virtual segment."""
        self._limits = limits
        self._batch_bytes_max = min(limits.request_bytes_max, limits.segment_bytes)
        self._on_closed = on_closed
        self._after = after or []
        self._queue: deque[Batch] = deque()
        """Batches to send. The first ones may have been sent before, and are then also in `_in_flight`."""
        self._in_flight: deque[Batch] = deque()
        """Batches that were sent, in the order of the log; complete batches leave at the left."""
        self._in_flight_bytes = 0
        self._places: dict[VirtualSegment, None] = {}
        """The virtual segments that are open, or closing."""
        self.totals = totals

    # -- appends ---------------------------------------------------------------------------------------------------

    def append(self, segment: Segment, start: int, end: int, now_ms: int, *, persist: bool = False) -> Batch:
        """Append a reference to chunks of a segment in memory; return their batch."""
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
        """Return the last batch that is not complete; None if all are."""
        if self._queue and not self._queue[-1].sent:
            return self._queue[-1]
        return self._in_flight[-1] if self._in_flight else None

    @property
    def lags(self) -> bool:
        """Whether writers have to wait."""
        return self.lag_bytes >= self._limits.lag_bytes_max

    @property
    def busy(self) -> bool:
        """Whether any batch is not complete."""
        return bool(self._queue or self._in_flight)

    @property
    def settled(self) -> bool:
        """Whether no virtual segment is open or closing, and no batch is under way."""
        return not (self._queue or self._in_flight or self._places)

    def lag_ms(self, now_ms: int) -> int:
        """Return the age of the oldest batch that is not complete; 0 if all are."""
        oldest = self._in_flight[0] if self._in_flight else self._queue[0] if self._queue else None
        return max(0, now_ms - oldest.born_ms) if oldest is not None else 0

    @property
    def in_flight(self) -> int:
        """The number of batches that are on their way to backups."""
        return sum(batch.place is not None for batch in self._in_flight)

    # -- requests --------------------------------------------------------------------------------------------------

    def plan(self, now_ms: int, open_next: Opener, hooks: ReplicationHooks | None = None) -> list[Effect]:
        """Return the requests to send now."""
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
        """Whether a batch waits for others in flight; for batches that were not sent before."""
        limits, size = self._limits, batch.length
        return size < limits.pipelined_bytes_min or self._in_flight_bytes + size > limits.in_flight_bytes_max

    def _may_wait(self, batch: Batch) -> bool:
        """Whether a batch may be delayed: more data can go with it, and no writer waits for room."""
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
        """End the open virtual segment; its replicas are closed when all its batches are complete."""
        if self.open is not None:
            self._end(self.open, effects)

    def _end(self, place: VirtualSegment, effects: list[Effect]) -> None:
        """Let a virtual segment take no more batches, and close it as soon as its batches are complete."""
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

    # -- answers ---------------------------------------------------------------------------------------------------

    def acknowledged(self, batch: Batch, place: VirtualSegment, backup_id: int) -> list[Effect]:
        """Note that a backup has a batch; return the requests that follow."""
        if batch.place is not place:
            return []  # the virtual segment was given up meanwhile
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
        """Note that a backup has closed its replica."""
        if place.closing is not None:
            place.closing.discard(backup_id)
            self._close_when_all_have(place)

    def lost(self, backup_id: int) -> list[Effect]:
        """Let all virtual segments leave a backup that has failed; return the requests that follow."""
        effects: list[Effect] = []
        for place in [place for place in self._places if backup_id in place.backups]:
            self.leave(place, backup_id, effects)
        return effects + self._complete()

    def leave(self, place: VirtualSegment, backup_id: int, effects: list[Effect]) -> None:
        """Seal a virtual segment that a backup cannot take (any more), and continue elsewhere."""
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
        """Queue all batches again from the first incomplete one of `place` on, in the order of the log.

        That includes batches in flight to other virtual segments, so that each has consecutive batches of the log.
        Returns the virtual segments that lost batches; they must not get any more.
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
        """Fail the waiters of batches from before `before_ms`; their chunks are still to be replicated."""
        for batches in (self._in_flight, self._queue):
            for batch in batches:
                if batch.born_ms > before_ms:
                    break
                batch.finish(error)

    def shed(self) -> list[Extent]:
        """Forget the batches that were never sent and that no request waits for; return their extents."""
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
        """Forget everything of a dropped stream; return the requests that follow."""
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
