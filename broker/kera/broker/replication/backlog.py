"""Data that no virtual segment covers, and data on too few backups: both are covered again in the background. Pure.

The *backlog* is the end of the log after a restart, and data of a stream with level leader that could not be replicated
for lack of backups. It is appended to the stream's repair log, a separate virtual log with its own pace; so is data
with too few replicas (``kera.broker.replication.repair``). Replicas of earlier launches that the index does not know
(*strangers*) are kept until the backlog is covered. Data that is covered again is on the backups' disks before older
replicas are freed: the older ones were on disk, too, and some data may have been acknowledged as persisted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from functools import partial

from kera.broker.log.entry import Entry, length_of
from kera.broker.log.events import Events
from kera.broker.log.segment import Segment
from kera.broker.records import SegmentAddress, SegmentRecord
from kera.broker.replication.backups import Backups
from kera.broker.replication.coverage import Coverage
from kera.broker.replication.limits import ReplicationLimits
from kera.broker.replication.virtual_log import Effect, VirtualLog
from kera.broker.replication.virtual_logs import StreamLogs, VirtualLogs, priority_of
from kera.broker.replication.virtual_segment import Batch, Extent, Free, ReplicationTotals, VirtualSegment
from kera.core.base.done import Done


class Backlog:
    """The parts of the log that need new replicas. Old replicas stay until their part is covered again."""

    def __init__(
        self,
        limits: ReplicationLimits,
        logs: VirtualLogs,
        backups: Backups,
        coverage: Coverage,
        effects: list[Effect],
        totals: ReplicationTotals,
        events: Events,
        *,
        spared: Callable[[int], bool],
    ) -> None:
        """`spared`: whether the strangers of a stream, which is not open, are kept: its data may not be covered."""
        self.extents: deque[Extent] = deque()
        """The parts of the log that have to be covered."""
        self._limits = limits
        self._logs = logs
        self._backups = backups
        self._coverage = coverage
        self._effects = effects
        self._totals = totals
        self._events = events
        self._spared = spared
        self._strangers: list[tuple[int, int, int]] = []
        """Strangers, each as backup, virtual segment and stream."""
        self._restored: list[Batch] = []
        """Batches with data in memory that was not covered when this launch began."""

    # -- additions -------------------------------------------------------------------------------------------------

    def restore(self, stream: StreamLogs, entry: Entry) -> None:
        """Cover the uncovered parts of an entry; those in memory at once, because writers and readers wait for them."""
        for key, found in entry.segments():
            if isinstance(found, SegmentRecord) and found.to_come:
                continue  # it still has to come from backups: see `add`
            for extent in self._coverage.uncovered(entry.address(key), length_of(found)):
                if isinstance(found, Segment) and not found.in_index:
                    self._restore_part(stream.of(entry.log_id.streamlet_id, entry.index), found, extent)
                else:
                    self.extents.append(extent)
        self._events.backup_work()

    def _restore_part(self, log: VirtualLog, segment: Segment, extent: Extent) -> None:
        parts = list(segment.intact(extent.start, extent.end))
        self._restored += [
            self._logs.append(log, segment, *piece, persist=True)
            for start, end in parts
            for piece in segment.pieces(start, end, self._limits.request_bytes_max)
        ]
        if not parts:
            segment.replicated(extent.start)  # the extent is only damage, which is never replicated

    def add(self, address: SegmentAddress, length: int, *, first: bool = False) -> None:
        """Add the uncovered parts of a segment that has come from backups; `first`: before all others."""
        extents = self._coverage.uncovered(address, length)
        if first:
            self.extents.extendleft(reversed(extents))
        else:
            self.extents.extend(extents)
        self._events.backup_work()

    def add_stranger(self, backup_id: int, virtual_segment_id: int, stream_id: int) -> None:
        """Note that a backup has a replica of an earlier launch that the index does not know."""
        self._strangers.append((backup_id, virtual_segment_id, stream_id))

    def strangers_of(self, stream_id: int) -> dict[int, list[int]]:
        """Return a stream's virtual segments that the index does not know, each with the backups that have it."""
        found: dict[int, list[int]] = {}
        for backup_id, virtual_segment_id, of_stream in self._strangers:
            if of_stream == stream_id:
                found.setdefault(virtual_segment_id, []).append(backup_id)
        return found

    def shed(self, stream: StreamLogs) -> bool:
        """Move data to the backlog that a stream's logs cannot send now, and for which no request waits.

        Returns whether there was any.
        """
        extents = stream.shed()
        self.extents += extents
        return bool(extents)

    def make_room(self) -> bool:
        """Make room in full memory: `shed` the data of all streams; return whether there was any."""
        found = False
        for stream in self._logs.streams.values():
            found = self.shed(stream) or found
        return found

    @property
    def replicas_needed(self) -> bool:
        """Whether replicas of earlier launches may be needed, because this launch has not covered all data yet."""
        return bool(self._restored or self.extents)

    # -- repair ----------------------------------------------------------------------------------------------------

    def next_deficient(self, besides: Container[object] = ()) -> VirtualSegment | None:
        """Return the virtual segment to repair next, none of `besides`.

        None: there is none, or too few backups can be used.
        """
        priority = partial(priority_of, self._logs.streams)
        return self._coverage.next_deficient(self._backups.usable(self._logs.now_ms), priority, besides)

    def cover(self, segment: Segment, start: int, end: int, done: Done) -> Batch | None:
        """Replicate chunks again; return their batch, or None if the stream is gone."""
        log = self._logs.repair_log(segment.address.stream_id)
        if log is None:
            return None
        batch = self._logs.append(log, segment, start, end, persist=True)
        batch.waiters.append(done)
        self._totals.bytes_repaired += end - start
        return batch

    @property
    def repairing(self) -> bool:
        """Whether data is being covered again."""
        return any(stream.repair is not None and stream.repair.busy for stream in self._logs.streams.values())

    @property
    def covered(self) -> bool:
        """Whether all data is covered, except damaged data, and no repair is left."""
        idle = not (self.extents or self._coverage.deficient or self._coverage.replacing)
        return idle and all(stream.repair is None for stream in self._logs.streams.values())

    def rest(self) -> None:
        """Finish a repair with nothing left: close its virtual segments, so the index gets them; free strangers."""
        for stream in self._logs.streams.values():
            if stream.repair is not None and not stream.repair.busy:
                stream.repair.close_open(self._effects)
                if stream.repair.settled:
                    stream.repair = None
        self._restored = [batch for batch in self._restored if not batch.over]
        if not self.replicas_needed:
            strangers = self._strangers
            self._strangers = [each for each in strangers if self._spared(each[2])]
            self._effects += [
                Free(backup_id, (id_,)) for backup_id, id_, stream_id in strangers if not self._spared(stream_id)
            ]
        self._events.backup_work()
