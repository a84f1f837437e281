"""The persistence manager (thesis 7.2.1): decides which segments are in memory, go to disk, and come back. Pure.

It plans jobs and keeps their state; ``kera.broker.storage.segment_files`` performs them on threads, and reports back:

    appends, reads, timers ──► PersistenceManager ──plan()──► jobs ──► SegmentStore.perform ──► finished(job)

Each part has its own task, and callers use the parts directly:

    slots           gives memory to writers, loads, and readers that hold slots
    segments        plans the writes of segments: flushes of closed segments, group commits
    commits         keeps the requests that wait for level persisted
    loads           loads the segments that readers want, and the following ones ahead of them
    arrivals        adds segments that this broker has not written to the index, and their files when they are complete
    index_writer    makes the index changes that belong to no segment
    removals        removes data for retention, truncation or deletion

This module joins them: it passes segments from one part to the next, passes on the time, and keeps the *locked*
entries, because each entry has at most one change of its records under way.
"""

from __future__ import annotations

from collections.abc import Iterable

from kera.broker.log.arena import Arena
from kera.broker.log.entry import Entry, state_of
from kera.broker.log.events import Events
from kera.broker.log.segment import Segment
from kera.broker.log.streamlet import Streamlet
from kera.broker.records import Key
from kera.broker.storage.arrivals import Arrivals
from kera.broker.storage.books import Books
from kera.broker.storage.disk_health import DiskHealth
from kera.broker.storage.group_commits import GroupCommits
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.index_writer import IndexWriter
from kera.broker.storage.jobs import ArriveJob, IndexJob, Job, LoadJob, RemoveJob, StoreJob
from kera.broker.storage.loads import Loads
from kera.broker.storage.physical_ids import PhysicalIds
from kera.broker.storage.removals import Removals
from kera.broker.storage.segment_writer import SegmentWriter
from kera.broker.storage.slots import SegmentSlots


class PersistenceManager:
    """Moves segments between memory and disk through its parts, with one change of an entry's records at a time.

    Belongs to one event loop.
    """

    def __init__(
        self,
        arena: Arena,
        index: SegmentIndex,
        ids: PhysicalIds,
        events: Events,
        *,
        now_ms: int = 0,
        now_us: int = 0,
        flush_delay_ms: int = 0,
        reserve_slots: int | None = None,
    ) -> None:
        """`reserve_slots`: by default a share of all slots."""
        self.now_ms = now_ms
        """The monotonic time of the last `tick`."""
        self.now_us = now_us
        """The time of day of the last `tick`: it dates appends, and no decision here depends on it."""
        books = Books(ids, DiskHealth(index.path.parent), events)
        self.ids = ids
        self.events = events
        self.disk = books.disk
        self.totals = books.totals
        self.locked = books.locked
        """Entries with a change of their records under way."""
        self.slots = SegmentSlots(arena, books, reserve_slots)
        self.loads = Loads(self.slots, books)
        self.removals = Removals(index, books)
        self.index_writer = IndexWriter(self.removals, books, on_removed=self._removed)
        self.arrivals = Arrivals(index, books, on_arrived=self._arrived, writes=self.index_writer.writes)
        self.commits = GroupCommits(books)
        self.segments = SegmentWriter(
            self.slots, self.commits, self.index_writer, self.removals, books, flush_delay_ms=flush_delay_ms
        )
        arena.released.listen(self._released)

    def _released(self) -> None:
        if self.loads or self.segments.closed:
            self.events.disk_work()
        self.slots.tell_room()

    # -- life of segments ------------------------------------------------------------------------------------------

    def opened(self, segment: Segment) -> None:
        """See `Memory`."""
        segment.opened_ms = segment.touched_ms = self.now_ms
        self.segments.add(segment)

    def close(self, segment: Segment) -> None:
        """See `Memory`."""
        self.segments.close(segment)

    def close_all_of(self, domain: str) -> None:
        """Close the open segments of a memory domain, so that further data goes to new ones."""
        for segment in list(self.segments.heads):
            if segment.entry.memory_domain == domain:
                self.close(segment)

    def close_elsewhere(self, segments: Iterable[Segment]) -> None:
        """Close open segments whose slot is not in the present file of their memory domain."""
        for segment in segments:
            if segment in self.segments.heads and not self.slots.is_in_place(segment):
                self.close(segment)

    def adopt(self, segment: Segment) -> None:
        """Take a segment of the tail that the last launch left in memory.

        Its chunks do not say when they were appended, so they count as appended now, and no data is removed too early.
        When the segment gets another file in the index, the index does not know its old file until that is marked for
        removal.
        """
        segment.newest_us = self.now_us
        for physical_id in segment.abandoned:
            self.ids.expect(physical_id)
        self.opened(segment)

    def dropped(self, streamlet: Streamlet) -> None:
        """See `Memory`. `Removals.drop_stream` removes its records and files."""
        for entry in streamlet.entries:
            self.commits.dirty.pop(entry, None)
            self.removals.cancel(entry)
            self.arrivals.cancel(entry)
            for segment in list(entry.resident.values()):
                segment.dropped = True
                self.segments.forget(segment)
                self.slots.forget(segment)
                self.index_writer.forget(segment)
                if not segment.busy and not segment.loading:
                    segment.slot.retire()
                    self.segments.remove_files(segment)
            entry.tail.clear()
            self.loads.cancel(entry)
        self.commits.dropped()

    # -- jobs ------------------------------------------------------------------------------------------------------

    def plan(self) -> list[Job]:
        """Return the next jobs; each must be performed and then given to `finished`."""
        change = self.index_writer.plan(self.now_ms)  # first: data that is removed need not be written
        removal = self.removals.plan(self.now_ms)
        jobs: list[Job | None] = [change, *self.segments.plan(self.now_ms), *self.loads.plan()]
        jobs += [self.arrivals.plan(self.now_ms), removal]
        return [job for job in jobs if job is not None]

    def finished(self, job: Job) -> None:
        """Record the result of a performed job, and tell the requests that wait for it."""
        match job:
            case StoreJob():
                self.segments.finished(job, self.now_ms)
                if self.slots.available:
                    self.slots.tell_room()
            case LoadJob():
                self.loads.finished(job, self.now_ms)
            case IndexJob():
                self.index_writer.finished(job, self.now_ms)
            case RemoveJob():
                self.removals.finished(job, self.now_ms)
            case ArriveJob():
                self.arrivals.finished(job, self.now_ms)
        self.events.disk_work()

    def _removed(self, job: IndexJob) -> None:
        """Remove segments from memory that the index has forgotten, and queue the removal of their files."""
        self.removals.marked(job.physical_ids)
        for entry, key, length in job.stored:
            entry.removed(length)
            self._count_removed(length)
            self._drop_resident(entry, key)
            self.events.gone(entry.address(key))
        for address in job.gone:
            self.events.gone(address)
        for segment in job.tail:
            self._count_removed(segment.head)
            if segment.dropped:
                continue  # its whole streamlet was dropped meanwhile
            segment.entry.stored(segment)
            segment.entry.removed(segment.head)
            self.segments.forget(segment)
            self.slots.forget(segment)
            segment.slot.retire()
            self.events.gone(segment.address)

    def _count_removed(self, length: int) -> None:
        self.totals.segments_removed += 1
        self.totals.bytes_removed += length

    def _drop_resident(self, entry: Entry, key: Key) -> None:
        segment = entry.resident.get(key)
        if segment is None:
            return
        self.slots.forget(segment)
        if segment.loading or segment.busy:
            segment.dropped = True
        else:
            segment.slot.retire()

    def _arrived(self, job: ArriveJob) -> None:
        for entry, _ in job.grafts:
            entry.wake()
        for entry, key in job.installed:
            self.loads.arrived(entry, key)

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self, now_ms: int, now_us: int | None = None, *, idle_close_ms: int) -> None:
        """Set the time: close idle segments, stop keeping loaded segments that were not read, and retry the disk.

        `now_us`: the time of day; None: unchanged.
        """
        self.now_ms, self.now_us = now_ms, self.now_us if now_us is None else now_us
        self.segments.close_idle(now_ms - idle_close_ms)
        self.slots.expire(now_ms)
        self.loads.expire(now_ms)
        if not self.segments.waits:
            self.disk.forget_error(now_ms)
        changes_wait = self.index_writer.has_work(quiet=not self.segments.committing)
        wanted = self.disk.error is not None or self.removals.failed or self.loads or self.slots.room_wanted
        if changes_wait or self.arrivals.waits or wanted or self.segments.puts_off:
            self.events.disk_work()

    def close_older(self, entries: Iterable[Entry], age_ms: int) -> None:
        """Close open segments of at least `age_ms`: retention can only remove closed ones."""
        for entry in entries:
            head = entry.head
            if head is not None and self.now_ms - head.opened_ms >= age_ms:
                self.close(head)

    # -- for the shutdown and for metrics --------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no work is under way or waiting, except work that only time or a reader starts."""
        return self._only_closed_left and self.arrivals.idle and not self.segments.closed

    @property
    def waits_for_replicas(self) -> bool:
        """Whether all remaining work waits for replicas."""
        return self._only_closed_left and all(segment.waits_for_replicas for segment in self.segments.closed)

    @property
    def _only_closed_left(self) -> bool:
        return self.index_writer.idle and not (self.commits.dirty or self.locked or self.loads.in_flight)

    def segments_by_state(self) -> dict[str, int]:
        """Return the number of segments in memory, by state."""
        counts: dict[str, int] = {"head": 0, "group": 0, "processed": 0, "loading": self.loads.in_flight}
        for segments in (self.segments.heads, self.segments.closed, self.slots.stored):
            for segment in segments:
                counts[state_of(segment).value] += 1
        return counts
