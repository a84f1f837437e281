"""The persistence manager (thesis 7.2.1): which segments are in memory, which go to disk, and which come back. Pure.

It decides and keeps the books; ``kera.broker.storage.segment_files`` does what it plans, on threads, and reports back:

    appends, reads, timers ──► PersistenceManager ──plan()──► jobs ──► SegmentStore.perform ──► finished(job)

* **Flush**: closed segments are written whole, those that all readers have read first, then the oldest; of one entry
  always in the order of the log. This is done as soon as they close: it costs little (whole slots, around the page
  cache), bounds what a host's crash can take, and then memory can be given away without waiting. Or it waits for
  `flush_delay_ms`, as long as there is memory: what retention removes by then never goes to disk.
* **Commit**: what has gathered for level `persisted` since the last commit is written in one go (group commit), open
  segments included. Then it is published, and who waits for it is told.
* **Eviction**: when no slot is free, one whose segment is on disk is taken: first those that no reader has before it
  (the oldest first), then the one that is farthest from any reader.
* **Load**: a segment that a reader wants comes back, and the following ones ahead of it, as long as that leaves three
  quarters of the memory to others.
* **Arrive**: what this broker has not written, but is to have (``kera.broker.recovery.rebuild``), comes into the index
  before its bytes are here, so that readers and positions find it, and gets its file when that is complete.
* **Remove**: what retention, truncation or deletion takes goes from the index first and then from the disk.
* **Back-pressure**: when everything in memory is open or unwritten, `allocate` says so (`ArenaFull`, or `DiskFull` when
  the disk takes nothing), open segments that were not written to for the longest time are closed to be flushed, and
  `on_room` tells when there is room.
* **Reserve**: some slots are never the writers', nor held by readers: they are free, or what is in them is on disk.
  When writers and readers have all others, readers get copies of what is in them (`may_lease`). So what is on disk can
  be loaded, whatever the disk takes and whoever lets go of nothing.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kera.broker.log.arena import Arena, Slot
from kera.broker.log.entry import Entry
from kera.broker.log.segment import Segment
from kera.broker.log.streamlet import Streamlet
from kera.broker.records import Change, Graft, Key, SegmentAddress, SegmentRecord
from kera.broker.storage.adoptions import Arrivals
from kera.broker.storage.disk import block_ceiling, block_floor
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.index_format import put_entry, put_producer
from kera.broker.storage.jobs import RETRY_MS, ArriveJob, Job, LoadJob, Part, RemoveJob, Totals, WriteJob
from kera.broker.storage.loads import Loads
from kera.broker.storage.removals import Removals, files_of
from kera.core.done import Done, nothing
from kera.core.errors import DiskFull, NotPersisted, Recovering, Unavailable
from kera.core.ids import Position
from kera.core.telemetry import get_logger

log = get_logger("kera.persistence")

FLUSH_SEGMENTS_MAX = 32
"""In one job: with their index records committed together."""
SLOTS_PER_SPARE_SLOT = 4
"""When no more than one slot in so many is free, or could be freed at once, no flush is put off."""
RESERVE_SHARE = 4
"""One slot in so many is the reserve, and no more than `RESERVE_SLOTS_MAX`."""
RESERVE_SLOTS_MAX = 3


@dataclass(slots=True)
class _Pending:
    """Somebody waits until these are durable on disk."""

    wanted: list[tuple[Segment, int]]
    done: Done


class PersistenceManager:
    """See the head of this module. Belongs to one event loop."""

    def __init__(
        self,
        arena: Arena,
        index: SegmentIndex,
        *,
        next_physical_id: int,
        meta: dict[str, Any],
        now_ms: int = 0,
        now_us: int = 0,
        flush_delay_ms: int = 0,
        reserve_slots: int | None = None,
    ) -> None:
        """`reserve_slots`: by default a share of all."""
        self._arena = arena
        self._flush_delay_ms = flush_delay_ms
        self._index = index
        self._directory = index.path.parent
        """Of the log."""
        self._next_physical_id = next_physical_id
        self._meta = meta
        self.totals = Totals()
        self.on_work: Callable[[], None] = lambda: None
        """Called when `plan` may have something to do."""
        self.on_room: Callable[[], None] = lambda: None
        """Called when `allocate` may succeed again."""
        self.on_gone: Callable[[SegmentAddress], None] = lambda _: None
        """Called when nothing of a segment is left in the log, unless all of its stream goes."""
        self.now_ms = now_ms
        """Set by `tick`."""
        self.now_us = now_us
        """The time of day; set by whoever ticks. It says when something was appended, and decides nothing here."""
        self._heads: dict[Segment, None] = {}
        self._closed: dict[Segment, None] = {}
        """Not on disk yet, in the order in which they closed."""
        self._stored: dict[Segment, None] = {}
        """On disk and in memory, oldest first."""
        self._dirty: dict[Entry, None] = {}
        """With something that waits for level persisted."""
        self._pending: list[_Pending] = []
        self._locked: set[Entry] = set()
        """With a change of their records under way: there is never more than one."""
        self._unsettled: set[int] = set()
        """Files that there may be, and that the index does not know: a start looks for them."""
        self._removals = Removals(
            index, self.totals, locked=self._locked, unsettled=self._unsettled, on_removed=self._removed
        )
        self._loads = Loads(
            arena, self.totals, evict=self._evict, beyond_reserve=self._beyond_reserve, on_loaded=self._loaded
        )
        self._arrivals = Arrivals(
            index,
            self.totals,
            locked=self._locked,
            unsettled=self._unsettled,
            meta=lambda: self.meta,
            on_arrived=self._arrived,
        )
        self._flushing = self._committing = False
        self._room_wanted = False
        self._error: OSError | None = None
        if reserve_slots is None:
            reserve_slots = min(arena.slot_count // RESERVE_SHARE, RESERVE_SLOTS_MAX)
        self._reserve = reserve_slots
        self._retry_ms = 0
        arena.on_release = self._released

    # -- slots -----------------------------------------------------------------------------------------------------

    @property
    def slot_bytes(self) -> int:
        """Size of a segment."""
        return self._arena.slot_bytes

    @property
    def slot_count(self) -> int:
        """How many segments fit into memory."""
        return self._arena.slot_count

    def allocate(self) -> Slot:
        """A slot, free or freed. Raises `ArenaFull` or `DiskFull`; then `on_room` is called when it is worth trying."""
        if self._beyond_reserve() and (self._arena.free_slots or self._evict()):
            return self._arena.allocate()
        self._room_wanted = True
        self.on_work()
        self.check_disk()
        raise self._arena.full()

    def check_disk(self) -> None:
        """Raise `DiskFull` while the disk takes nothing: what has to be persisted is refused before it is appended."""
        if self._error is not None:
            raise _disk_full(self._error, self._directory)

    def may_lease(self, segment: Segment) -> bool:
        """Whether readers may hold the slot of a segment. If not, it is of the reserve: they get copies.

        Also while the disk takes everything: what they hold when it gets full, they may hold for ever.
        """
        if segment.slot.leases > 0 or segment not in self._stored:
            return True
        return self._beyond_reserve()

    def not_loaded(self, entry: Entry, key: Key) -> Unavailable:
        """The error for a segment that did not come into memory in time."""
        if entry.recovering(key):
            return Recovering(
                f"segment {key} is being recovered from backups, after its broker was lost; try again",
                log=list(entry.log_id),
            )
        why = "all of it is in use; try again, it goes on when some is written to disk or let go by its readers"
        attributes: dict[str, Any] = {"log": list(entry.log_id)}
        if self._error is not None:
            cause = _disk_full(self._error, self._directory)
            why, attributes = cause.message, {**cause.attributes, **attributes}
        return Unavailable(f"segment {key} is on disk, and there was no room in memory to load it: {why}", **attributes)

    def _beyond_reserve(self) -> bool:
        """Whether the reserve is there without one of the slots that are free, or could be at once."""
        left = self._reserve - self._arena.free_slots - self._loads.in_flight
        for segment in self._stored if left >= 0 else ():
            if not (segment.slot.leases or segment.slot.pins):
                left -= 1
                if left < 0:
                    break
        return left < 0

    def _evict(self) -> bool:
        """Free the slot that will be missed least. Returns whether there was one."""
        farthest: Segment | None = None
        farthest_distance = (-1, -1)
        for segment in self._stored:
            if segment.slot.leases or segment.slot.pins or segment in self._loads:
                continue
            distance = segment.entry.distance(segment.key)
            if distance is None:
                farthest = segment
                break
            if distance > farthest_distance:
                farthest, farthest_distance = segment, distance
        if farthest is None:
            return False
        self._forget(farthest)
        farthest.slot.retire()
        self.totals.segments_evicted += 1
        return True

    def _forget(self, segment: Segment) -> None:
        """A stored segment is not in memory any more."""
        self._stored.pop(segment, None)
        self._loads.forget(segment)
        if segment.entry.resident.get(segment.key) is segment:
            del segment.entry.resident[segment.key]

    def _released(self) -> None:
        if self._loads or self._closed:
            self.on_work()
        if self._room_wanted:
            self._room_wanted = False
            self.on_room()

    # -- life of segments ------------------------------------------------------------------------------------------

    def opened(self, segment: Segment) -> None:
        """See `Memory`."""
        segment.opened_ms = segment.touched_ms = self.now_ms
        self._heads[segment] = None

    def closed(self, segment: Segment) -> None:
        """See `Memory`."""
        self._heads.pop(segment, None)
        if not segment.busy:
            self._closed[segment] = None
            self.on_work()

    def adopt(self, segment: Segment) -> None:
        """A segment of the tail that the last launch left in memory.

        Its chunks do not say when they were appended: it counts as now, so that nothing of it goes early.
        """
        segment.newest_us = self.now_us
        segment.opened_ms = segment.touched_ms = self.now_ms
        (self._closed if segment.closed else self._heads)[segment] = None

    def touched(self, segment: Segment) -> None:
        """A reader has got something of a segment: if it was loaded for that, it is one like the others now."""
        self._loads.forget(segment)

    def load(self, entry: Entry, key: Key, done: Done | None = None, *, ahead: bool = True) -> None:
        """See `Loads.load`."""
        self._loads.load(entry, key, done, ahead=ahead)
        self.on_work()

    def _loaded(self, segment: Segment) -> None:
        self._stored[segment] = None

    def persist(self, wanted: list[tuple[Segment, int]], done: Done) -> None:
        """Call `done` when each segment is durable on disk up to its offset, or with `NotPersisted`."""
        missing = [(segment, end) for segment, end in wanted if not segment.in_index and segment.stored < end]
        if not missing:
            done(None)
            return
        for segment, _ in missing:
            self._dirty[segment.entry] = None
        self._pending.append(_Pending(missing, done))
        self.on_work()

    # -- planning --------------------------------------------------------------------------------------------------

    def plan(self) -> list[Job]:
        """What to do next; each job must be performed and then given to `finished`."""
        jobs: list[Job] = []
        may_write = self._error is None or self.now_ms >= self._retry_ms
        if may_write and not self._committing and self._dirty:
            job = self._plan_commit()
            if job is not None:
                jobs.append(job)
        if may_write and not self._flushing:
            if not self._closed and self._room_wanted:
                self._close_stalest()
            job = self._plan_flush()
            if job is not None:
                jobs.append(job)
        jobs += self._loads.plan()
        arrival = self._arrivals.plan(self.now_ms)
        if arrival is not None:
            jobs.append(arrival)
        removal = self._removals.plan(self.now_ms)
        if removal is not None:
            jobs.append(removal)
        return jobs

    def _plan_commit(self) -> WriteJob | None:
        """Everything unstored of the entries that somebody waits for."""
        parts: list[Part] = []
        changes: list[Change] = []
        for entry in list(self._dirty):
            if entry in self._locked:
                continue  # once what is under way is done
            del self._dirty[entry]
            segments = [segment for segment in entry.tail if segment.head > segment.stored or segment.closed]
            if segments:  # if not, a flush that was under way has written all of it
                self._add_parts(entry, segments, parts, changes)
        if not parts:
            return None
        self._committing = True
        return WriteJob(parts, changes, self._meta_if_new(parts), commit=True)

    def _plan_flush(self) -> WriteJob | None:
        """The closed segments that go next."""
        chosen: dict[Entry, list[Segment]] = {}
        count = 0
        ready = [
            segment
            for segment in self._closed
            if segment.entry not in self._locked and segment.entry not in self._dirty and not segment.waits_for_replicas
        ]
        if self._may_put_off:
            due_ms = self.now_ms - self._flush_delay_ms
            ready = [segment for segment in ready if segment.touched_ms <= due_ms]
        if len(ready) > 1 and self._arena.free_slots <= self._reserve:
            ready.sort(key=lambda segment: segment.entry.distance(segment.key) is not None)  # stable: then the oldest
        for segment in ready:
            if count >= FLUSH_SEGMENTS_MAX:
                break
            entry = segment.entry
            mine = chosen.get(entry, [])
            if len(mine) >= len(entry.tail) or entry.tail[len(mine)] is not segment:
                continue  # an older one of its entry comes first
            chosen.setdefault(entry, []).append(segment)
            count += 1
        if not chosen:
            return None
        parts: list[Part] = []
        changes: list[Change] = []
        for entry, segments in chosen.items():
            self._add_parts(entry, segments, parts, changes)
        self._flushing = True
        return WriteJob(parts, changes, self._meta_if_new(parts), commit=False)

    @property
    def _may_put_off(self) -> bool:
        """Whether closed segments may stay in memory alone: there is enough of it, and time."""
        spare = self._arena.free_slots + len(self._stored)
        scarce = self._room_wanted or spare * SLOTS_PER_SPARE_SLOT <= self._arena.slot_count
        return self._flush_delay_ms > 0 and not scarce

    def _add_parts(self, entry: Entry, segments: list[Segment], parts: list[Part], changes: list[Change]) -> None:
        self._locked.add(entry)
        created = not all(segment.physical_id for segment in segments)
        parts += [self._part(segment) for segment in segments]
        final = [segment for segment in segments if segment.closed]
        if final:
            changes.append(put_entry(entry.log_id, entry.record_with(final)))
        elif created:  # without a record of its entry, a restart would not look for an open file
            changes.append(put_entry(entry.log_id, entry.record()))
        for segment in final:
            for producer_id, state in segment.producers.items():
                changes.append(put_producer(*entry.log_id[:2], producer_id, state))

    def _part(self, segment: Segment) -> Part:
        create = not segment.physical_id
        if create:
            segment.physical_id = self._next_physical_id
            self._unsettled.add(segment.physical_id)
            self._next_physical_id += 1
        end = segment.head
        begin, ceiling = block_floor(segment.stored), block_ceiling(end)
        segment.slot.view[end:ceiling] = bytes(ceiling - end)  # nothing of an earlier segment goes along
        segment.slot.pin()
        segment.busy = True
        self._closed.pop(segment, None)
        return Part(
            segment,
            segment.physical_id,
            create,
            ceiling if segment.closed else self.slot_bytes,
            begin,
            segment.slot.view[begin:ceiling],
            segment.stored,
            end,
            segment.closed,
            segment.crc32c,
        )

    def _meta_if_new(self, parts: Iterable[Part]) -> dict[str, Any] | None:
        created = {part.physical_id for part in parts if part.create}
        if not created:
            return None
        first_unsettled = min(self._unsettled - created, default=self._next_physical_id)
        return dict(self._meta, next_physical_id=self._next_physical_id, first_unsettled_id=first_unsettled)

    def _close_stalest(self) -> None:
        """Make room: close the open segments that were not written to for the longest time."""
        heads = sorted(self._heads, key=lambda segment: segment.touched_ms)
        for segment in heads[: max(1, min(FLUSH_SEGMENTS_MAX, self._arena.slot_count // 8))]:
            if not segment.busy:
                segment.close()
                self.closed(segment)

    def _removed(self, job: RemoveJob) -> None:
        """The index has forgotten segments: memory follows."""
        for entry, key, length in job.stored:
            entry.stored_bytes -= length
            entry.stored_segments -= 1
            self._count_removed(length)
            self._drop_resident(entry, key)
            self.on_gone(entry.address(key))
        for address in job.gone:
            self.on_gone(address)
        for segment in job.tail:
            entry = segment.entry
            self._count_removed(segment.head)
            if segment.dropped:
                continue  # with its whole streamlet, meanwhile
            entry.stored(segment)
            entry.stored_bytes -= segment.head
            entry.stored_segments -= 1
            self._closed.pop(segment, None)
            self._forget(segment)
            segment.in_index = True
            segment.slot.retire()
            self.on_gone(segment.address)

    def _count_removed(self, length: int) -> None:
        self.totals.segments_removed += 1
        self.totals.bytes_removed += length

    # -- results ---------------------------------------------------------------------------------------------------

    def finished(self, job: Job) -> None:
        """A job was performed: take note, tell who waits."""
        match job:
            case WriteJob():
                self._written(job)
            case LoadJob():
                self._loads.finished(job, self.now_ms)
            case RemoveJob():
                self._removals.finished(job, self.now_ms)
            case ArriveJob():
                self._arrivals.finished(job, self.now_ms)
        self.on_work()

    def _written(self, job: WriteJob) -> None:
        if job.commit:
            self._committing = False
        else:
            self._flushing = False
        touched = {part.segment.entry: None for part in job.parts}
        self._locked.difference_update(touched)
        if job.error is None:
            self._write_succeeded(job)
        else:
            self._write_failed(job)
        for part in job.parts:
            segment = part.segment
            segment.busy = False
            if job.error is None:
                self._part_written(part)
            elif segment.closed and not segment.dropped:
                self._closed[segment] = None
            segment.slot.unpin()
            if segment.dropped:
                self._drop_written(segment)
        if job.error is None:
            for entry in touched:
                entry.wake()
        else:
            self._restore_order()
        self._tell_pending(job)
        if self._room_wanted and (self._arena.free_slots or self._stored):
            self._room_wanted = False
            self.on_room()

    def _write_succeeded(self, job: WriteJob) -> None:
        if self._error is not None:
            log.info("the disk takes data again")
        self._error = None
        self._unsettled.difference_update(part.physical_id for part in job.parts)
        size = sum(part.end - part.begin for part in job.parts)
        if job.commit:
            self.totals.commits += 1
            self.totals.bytes_committed += size
        else:
            self.totals.bytes_flushed += size
        self.totals.segments_flushed += sum(part.final for part in job.parts)

    def _part_written(self, part: Part) -> None:
        segment = part.segment
        segment.stored, segment.crc32c = part.end, part.crc32c
        self._removals.remove_files(segment.abandoned)
        segment.abandoned = []
        if segment.dropped:
            return
        if part.end > segment.durable_head and not segment.entry.by_replicas:
            segment.advance_durable_head(part.end)
        if not part.final:
            self._removals.durable_further(segment)
        if part.final:
            self._removals.forget(segment)
            segment.in_index = True
            segment.producers = {}
            segment.entry.stored(segment)
            self._stored[segment] = None
        elif segment.closed:
            self._closed[segment] = None  # it closed meanwhile, with more in it or not

    def _write_failed(self, job: WriteJob) -> None:
        error = job.error
        self.totals.disk_errors += 1
        if self._error is None:
            log.error("cannot write the log; it is tried again", error=str(error), retry_ms=RETRY_MS)
        self._error = error
        self._retry_ms = self.now_ms + RETRY_MS
        for part in job.parts:
            # What a file holds after a failed write is anybody's guess: begin anew in another one. Until that is
            # durable, the old one stays, with what had been durable in it.
            segment = part.segment
            segment.abandoned.append(segment.physical_id)
            segment.physical_id = segment.stored = segment.crc32c = 0
            self._removals.forget(segment)

    def _restore_order(self) -> None:
        """Segments that failed are older than those that closed meanwhile."""
        self._closed = dict.fromkeys(sorted(self._closed, key=lambda segment: segment.key))

    def _drop_written(self, segment: Segment) -> None:
        """A segment whose streamlet was dropped while it was being written."""
        segment.slot.retire()
        self._remove_files(segment)

    def _remove_files(self, segment: Segment) -> None:
        """Of a segment that was dropped; files in the index go with their stream's records."""
        if not segment.in_index:
            self._removals.remove_files(files_of(segment))

    def _tell_pending(self, job: WriteJob) -> None:
        still: list[_Pending] = []
        written = {part.segment for part in job.parts}
        for pending in self._pending:
            pending.wanted = [
                (segment, end) for segment, end in pending.wanted if not segment.in_index and segment.stored < end
            ]
            if not pending.wanted:
                pending.done(None)
            elif any(segment.dropped for segment, _ in pending.wanted):
                pending.done(NotPersisted("the stream was deleted"))
            elif job.error is not None and any(segment in written for segment, _ in pending.wanted):
                cause = _disk_full(job.error, self._directory)
                for segment, _ in pending.wanted:
                    self._dirty[segment.entry] = None  # it stays to be done, whoever asks for it again
                pending.done(NotPersisted(cause.message, **cause.attributes))
            else:
                still.append(pending)
        self._pending = still

    # -- removal ---------------------------------------------------------------------------------------------------

    def collect(self, entry: Entry, done: Done = nothing) -> None:
        """See `Removals.collect`."""
        self._removals.collect(entry, done)
        self.on_work()

    def drop_stream(self, stream_id: int, done: Done = nothing) -> None:
        """See `Removals.drop_stream`."""
        self._removals.drop_stream(stream_id, done)
        self.on_work()

    def drop_streamlet(self, stream_id: int, streamlet_id: int, done: Done = nothing) -> None:
        """See `Removals.drop_streamlet`."""
        self._removals.drop_streamlet(stream_id, streamlet_id, done)
        self.on_work()

    def commit_cursor(self, entry: Entry, consumer_group: str, position: Position, done: Done) -> None:
        """See `Removals.commit_cursor`."""
        self._removals.commit_cursor(entry, consumer_group, position, done)
        self.on_work()

    def note(self, changes: list[Change], done: Done) -> None:
        """See `Removals.note`."""
        self._removals.note(changes, done)
        self.on_work()

    def remove_files(self, physical_ids: list[int]) -> None:
        """See `Removals.remove_files`."""
        self._removals.remove_files(physical_ids)
        self.on_work()

    # -- what comes from elsewhere ---------------------------------------------------------------------------------

    def take_physical_id(self) -> int:
        """The id of a new file. The index remembers that it was given when it gets to know the file."""
        self._next_physical_id += 1
        return self._next_physical_id - 1

    def graft(self, grafts: dict[Entry, Graft], changes: list[Change], done: Done) -> None:
        """See `Arrivals.graft`."""
        self._arrivals.graft(grafts, changes, done)
        self.on_work()

    def install(self, entry: Entry, key: Key, record: SegmentRecord, done: Done) -> None:
        """See `Arrivals.install`."""
        self._arrivals.install(entry, key, record, done)
        self.on_work()

    def _arrived(self, job: ArriveJob) -> None:
        for entry, _ in job.grafts:
            entry.wake()
        for entry, key in job.installed:
            self._loads.arrived(entry, key)

    def when_awaited(self, call: Callable[[Entry, Key], None]) -> None:
        """Have `call` called when a reader wants a segment that has yet to come."""
        self._loads.on_awaited = call

    def _drop_resident(self, entry: Entry, key: Key) -> None:
        segment = entry.resident.get(key)
        if segment is None:
            return
        if segment.loading or segment.busy:
            segment.dropped = True
            entry.resident.pop(key, None)
            self._stored.pop(segment, None)
            return
        self._forget(segment)
        segment.slot.retire()

    def dropped(self, streamlet: Streamlet) -> None:
        """See `Memory`. Its records and files go with `drop_stream`."""
        for entry in streamlet.entries:
            self._dirty.pop(entry, None)
            self._removals.cancel(entry)
            self._arrivals.cancel(entry)
            for segment in list(entry.resident.values()):
                segment.dropped = True
                self._heads.pop(segment, None)
                self._closed.pop(segment, None)
                self._stored.pop(segment, None)
                self._loads.forget(segment)
                self._removals.forget(segment)
                if not segment.busy and not segment.loading:
                    segment.slot.retire()
                    self._remove_files(segment)
            entry.resident.clear()
            entry.tail.clear()
            self._loads.cancel(entry)
        still = []
        for pending in self._pending:
            if any(segment.dropped for segment, _ in pending.wanted):
                pending.done(NotPersisted("the stream was deleted"))
            else:
                still.append(pending)
        self._pending = still

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self, now_ms: int, *, idle_close_ms: int) -> None:
        """Time goes on: close what nobody writes to, forget what nobody came for, try the disk again."""
        self.now_ms = now_ms
        for segment in [head for head in self._heads if now_ms - head.touched_ms >= idle_close_ms]:
            segment.close()
            self.closed(segment)
        self._loads.expire(now_ms)
        waiting = self._closed or self._dirty or self._flushing or self._committing
        if self._error is not None and now_ms >= self._retry_ms and not waiting:
            self._error = None  # what could not be written is gone: whoever writes next will see
        put_off = self._flush_delay_ms > 0 and bool(self._closed)
        removals_wait = self._removals.note_soon(quiet=not (self._dirty or self._committing))
        wanted = self._error is not None or self._loads or self._room_wanted
        if removals_wait or self._arrivals.waits or wanted or put_off:
            self.on_work()

    def close_older(self, entries: Iterable[Entry], age_ms: int) -> None:
        """Close open segments of that age: what is to go by age has to be closed first."""
        for entry in entries:
            head = entry.head
            if head is not None and self.now_ms - head.opened_ms >= age_ms:
                head.close()
                self.closed(head)

    # -- for the end and for those who watch -----------------------------------------------------------------------

    def close_all(self) -> None:
        """Close all open segments, and have everything flushed now."""
        self._flush_delay_ms = 0
        for segment in list(self._heads):
            segment.close()
            self.closed(segment)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way or waiting, except what only time or a reader will bring."""
        arrived = self._removals.idle and self._arrivals.idle
        return arrived and not (self._closed or self._dirty or self._locked or self._loads.in_flight)

    @property
    def bytes_left(self) -> int:
        """Of segments that are not on disk."""
        return sum(segment.head - segment.stored for segment in (*self._heads, *self._closed))

    @property
    def held_back(self) -> bool:
        """Whether all that is left to do waits for replicas."""
        under_way = self._dirty or self._locked or self._loads.in_flight or not self._removals.idle
        return not under_way and all(segment.waits_for_replicas for segment in self._closed)

    def remember(self, **meta: Any) -> None:
        """Have the index remember something of the broker, from the next change of `meta` on."""
        self._meta = {**self._meta, **meta}

    @property
    def meta(self) -> dict[str, Any]:
        """What the index is to remember of the broker."""
        first_unsettled = min(self._unsettled, default=self._next_physical_id)
        return dict(self._meta, next_physical_id=self._next_physical_id, first_unsettled_id=first_unsettled)

    @property
    def disk_error(self) -> OSError | None:
        """Why nothing can be written, if so."""
        return self._error

    def segments_by_state(self) -> dict[str, int]:
        """How many segments are in memory, by state."""
        counts: dict[str, int] = {"head": 0, "group": 0, "processed": 0, "loading": self._loads.in_flight}
        for segments in (self._heads, self._closed, self._stored):
            for segment in segments:
                counts[segment.entry.state_of(segment).value] += 1
        return counts


def _disk_full(error: OSError, directory: Path) -> DiskFull:
    """The error for writers while the disk takes nothing."""
    what = "has no room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"fails ({error})"
    return DiskFull(
        f"the broker's disk {what}; make room for {directory}, or delete or truncate streams: it goes on by itself",
        path=str(error.filename or directory),
        errno=error.errno,
    )
