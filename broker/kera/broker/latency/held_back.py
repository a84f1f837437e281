"""Delays references to chunks, so that more go to backups together, as far as latency constraints leave time. Pure.

`HeldBack` is plugged into the virtual logs (``kera.broker.replication.hooks``). It holds back nothing of a stream whose
writers and readers do not wait for backups, because that data might be lost meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from kera.broker.latency.holding import HELD_BYTES_MAX, Held, Holds
from kera.broker.log.segment import Segment
from kera.broker.replication.virtual_log import VirtualLog
from kera.broker.replication.virtual_logs import VirtualLogs
from kera.broker.replication.virtual_segment import Batch
from kera.core.format.chunk import created_us_at, read_header
from kera.core.latency.limits import HELD_REQUESTS_MAX


class Note:
    """The note about a batch that may wait."""

    __slots__ = ("due_s", "requests")

    def __init__(self, due_s: float) -> None:
        self.due_s = due_s
        """When the batch is due; 0: it goes at once."""
        self.requests: dict[int, int] = {}
        """Number of waiting requests, by producer."""


class HeldBack:
    """The virtual logs whose next batch is held back, each with the time when it is due."""

    def __init__(self, logs: VirtualLogs, holds: Holds, wake_in: Callable[[float], None]) -> None:
        """`holds`: how long references of each stream may wait; `wake_in`: calls for a pump after some seconds."""
        self._logs = logs
        self._holds = holds
        self._wake_in = wake_in
        self._held = Held[VirtualLog]()
        self._now_s = 0.0

    def on_appended(self, log: VirtualLog, batch: Batch, segment: Segment, start: int, end: int) -> None:
        """See `ReplicationHooks`."""
        if not self._holds.of:
            return
        stream = self._logs.streams.get(log.stream_id) if log.stream_id in self._holds.of else None
        if stream is None or not stream.by_replicas or log is stream.repair:  # others may still be lost
            batch.noted = None
            return
        due_s = self._holds.until_s(log.stream_id, created_us_at(segment.slot.view, start))
        note = batch.noted
        if batch.length == end - start:
            batch.noted = Note(due_s)
        elif note is not None:
            note.due_s = min(note.due_s, due_s)

    def on_waiting(self, batch: Batch, segment: Segment, start: int, requests: int) -> None:
        """See `ReplicationHooks`. A batch with many requests of one producer goes at once: it may wait for answers."""
        note = batch.noted
        if note is not None and note.due_s:
            writer = read_header(segment.slot.view, start).producer_id
            note.requests[writer] = note.requests.get(writer, 0) + requests
            if note.requests[writer] > HELD_REQUESTS_MAX:
                note.due_s = 0.0

    def puts_off(self, log: VirtualLog, batch: Batch) -> bool:
        """See `ReplicationHooks`."""
        note = batch.noted
        if note is None or note.due_s <= self._now_s or batch.length >= HELD_BYTES_MAX:
            return False
        self._held.hold(log, note.due_s, self._now_s)
        self._wake_in(self.next_in_s)
        return True

    def on_dropped(self, log: VirtualLog) -> None:
        """See `ReplicationHooks`."""
        self._held.discard(log)

    def on_pump(self) -> Iterable[VirtualLog]:
        """See `ReplicationHooks`."""
        if not (self._holds.of or self._held):
            self._now_s = math.inf
            return ()
        self._now_s = self._holds.now_s() if self._holds.of else math.inf  # without constraints nothing waits
        due = self._held.take(self._now_s)
        if self._held:
            self._wake_in(self.next_in_s)
        return due

    @property
    def next_in_s(self) -> float:
        """The seconds until the first log is due; infinite if nothing is held back."""
        next_s = self._held.next_s
        return next_s - self._holds.now_s() if next_s < math.inf else math.inf
