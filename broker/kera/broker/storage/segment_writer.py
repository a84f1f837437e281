"""Decides which segments go to disk, and when. Pure.

* **Flush**: closed segments are written as a whole. Segments that all readers have read come first, then the oldest;
  the segments of one entry always in the order of the log. A segment is flushed as soon as it closes: that costs little
  (whole slots, around the page cache), bounds the loss by a crash of the host, and its memory can later be given away
  without waiting. With `flush_delay_ms`, a flush waits that long while memory is not scarce; data that retention
  removes before never goes to disk.
* **Commit**: data that requests wait for (``kera.broker.storage.group_commits``) is written in one go, including open
  segments. Then readers see it, and the requests are completed.
* When writers find no room, the open segments that have been idle for longest are closed, so that they are flushed.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right

from kera.broker.log.digests import digests_in
from kera.broker.log.entry import Entry
from kera.broker.log.segment import Segment
from kera.broker.records import Change
from kera.broker.storage.books import Books
from kera.broker.storage.disk import block_ceiling, block_floor
from kera.broker.storage.group_commits import GroupCommits
from kera.broker.storage.index_format import put_digests, put_entry, put_producer
from kera.broker.storage.index_writer import IndexWriter
from kera.broker.storage.jobs import StoreJob, WritePart
from kera.broker.storage.removals import Removals
from kera.broker.storage.slots import SegmentSlots

FLUSH_SEGMENTS_MAX = 32
"""Maximum number of segments in one job, which commits their index records together."""
FLUSH_BYTES_MAX = 8 << 20
"""Maximum size of a job with more than one segment: its memory becomes free only when the whole job is done, and
writers wait for it."""


class SegmentWriter:
    """Plans the writes of segments: flushes in the order of each entry, and commits of data that producers wait for."""

    def __init__(
        self,
        slots: SegmentSlots,
        commits: GroupCommits,
        index_writer: IndexWriter,
        removals: Removals,
        books: Books,
        *,
        flush_delay_ms: int,
    ) -> None:
        self.heads: dict[Segment, None] = {}
        self.closed: dict[Segment, None] = {}
        """Closed segments that are not on disk yet, in the order in which they closed."""
        self._slots = slots
        self._commits = commits
        self._index_writer = index_writer
        self._removals = removals
        self._books = books
        self._locked = books.locked
        self._flush_delay_ms = flush_delay_ms
        self._flushing = self._committing = False

    # -- life of segments ------------------------------------------------------------------------------------------

    def add(self, segment: Segment) -> None:
        """Add a segment that is not on disk."""
        (self.closed if segment.closed else self.heads)[segment] = None

    def close(self, segment: Segment) -> None:
        """Close an open segment, so that it takes no more appends and goes to disk."""
        segment.close()
        self.heads.pop(segment, None)
        if not segment.busy:
            self.closed[segment] = None
            self._books.events.disk_work()

    def close_idle(self, before_ms: int) -> None:
        """Close the segments that were last written to at `before_ms` or earlier."""
        for segment in [head for head in self.heads if head.touched_ms <= before_ms]:
            self.close(segment)

    def close_all(self) -> None:
        """Close all open segments, and flush without delay from now on."""
        self._flush_delay_ms = 0
        for segment in list(self.heads):
            self.close(segment)

    def forget(self, segment: Segment) -> None:
        """Forget a segment that is removed without having been written."""
        self.heads.pop(segment, None)
        self.closed.pop(segment, None)

    # -- planning --------------------------------------------------------------------------------------------------

    def plan(self, now_ms: int) -> list[StoreJob]:
        """Return the next writes; each job must be performed and then given to `finished`."""
        jobs: list[StoreJob | None] = []
        if not self._books.disk.may_write(now_ms):
            return []
        if not self._committing and self._commits.dirty:
            jobs.append(self._plan_commit())
        if not self._flushing:
            if not self.closed and self._slots.room_wanted:
                self._close_stalest()
            jobs.append(self._plan_flush(now_ms))
        return [job for job in jobs if job is not None]

    def _plan_commit(self) -> StoreJob | None:
        """Plan the write of all unstored data of the entries that requests wait for."""
        chosen: dict[Entry, list[Segment]] = {}
        dirty = self._commits.dirty
        for entry in list(dirty):
            if entry in self._locked:
                continue  # its turn comes when the change under way is done
            del dirty[entry]
            segments = [segment for segment in entry.tail if segment.head > segment.stored or segment.closed]
            if segments:  # otherwise a flush that was under way has written all of it
                chosen[entry] = segments
        if not chosen:
            return None
        self._committing = True
        return self._job(chosen, commit=True)

    def _plan_flush(self, now_ms: int) -> StoreJob | None:
        """Plan the write of the next closed segments."""
        ready = [
            segment
            for segment in self.closed
            if segment.entry not in self._locked
            and segment.entry not in self._commits.dirty
            and not segment.waits_for_replicas
        ]
        if self._flush_delay_ms > 0 and not self._slots.scarce:
            ready = [segment for segment in ready if segment.touched_ms <= now_ms - self._flush_delay_ms]
        if len(ready) > 1 and self._slots.reserve_used:
            ready.sort(key=lambda segment: segment.entry.distance(segment.key) is not None)  # stable: then the oldest
        chosen: dict[Entry, list[Segment]] = {}
        count = size = 0
        for segment in ready:
            if count >= FLUSH_SEGMENTS_MAX or (count and size + segment.head > FLUSH_BYTES_MAX):
                break
            entry = segment.entry
            mine = chosen.get(entry, [])
            if len(mine) >= len(entry.tail) or entry.tail[len(mine)] is not segment:
                continue  # an older one of its entry comes first
            chosen.setdefault(entry, []).append(segment)
            count += 1
            size += segment.head
        if not chosen:
            return None
        self._flushing = True
        return self._job(chosen, commit=False)

    def _job(self, chosen: dict[Entry, list[Segment]], *, commit: bool) -> StoreJob:
        parts: list[WritePart] = []
        changes: list[Change] = []
        for entry, segments in chosen.items():
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
                changes += put_digests(*entry.log_id[:2], digests_in(segment))
        files = [part.physical_id for part in parts if part.create]
        return StoreJob(parts, changes, self._books.ids.meta_with(files) if files else None, commit)

    def _part(self, segment: Segment) -> WritePart:
        create = not segment.physical_id
        if create:
            physical_id = self._books.ids.take()
            self._books.ids.expect(physical_id)
            segment.physical_id = physical_id
        end = segment.head
        begin, ceiling = block_floor(segment.stored), block_ceiling(end)
        segment.slot.view[end:ceiling] = bytes(ceiling - end)  # no remains of an earlier segment go to disk
        segment.slot.pin()
        segment.busy = True
        self.closed.pop(segment, None)
        return WritePart(
            segment,
            segment.physical_id,
            create,
            ceiling if segment.closed else self._slots.slot_bytes,
            begin,
            segment.slot.view[begin:ceiling],
            segment.stored,
            end,
            array("I") if segment.holes else segment.chunk_ends[bisect_right(segment.chunk_ends, segment.stored) :],
            segment.closed,
            segment.crc32c,
        )

    def _close_stalest(self) -> None:
        """Make room: close the open segments that have been idle for longest."""
        heads = sorted(self.heads, key=lambda segment: segment.touched_ms)
        for segment in heads[: max(1, min(FLUSH_SEGMENTS_MAX, self._slots.slot_count // 8))]:
            if not segment.busy:
                self.close(segment)

    # -- results ---------------------------------------------------------------------------------------------------

    def finished(self, job: StoreJob, now_ms: int) -> None:
        """Record the result of a performed job, and tell the requests that wait for it."""
        if job.commit:
            self._committing = False
        else:
            self._flushing = False
        touched = {part.segment.entry: None for part in job.parts}
        self._locked.difference_update(touched)
        if job.error is None:
            self._succeeded(job)
        else:
            self._failed(job, job.error, now_ms)
        for part in job.parts:
            segment = part.segment
            segment.busy = False
            if job.error is None:
                self._part_written(part)
            if segment.closed and not (segment.dropped or segment.in_index):
                self.closed[segment] = None  # the write has failed, or it was closed meanwhile
            segment.slot.unpin()
            if segment.dropped:
                segment.slot.retire()
                self.remove_files(segment)
        if job.error is None:
            for entry in touched:
                entry.wake()
        else:  # segments that failed are older than those that closed meanwhile
            self.closed = dict.fromkeys(sorted(self.closed, key=lambda segment: segment.key))
        self._commits.written(job)

    def _succeeded(self, job: StoreJob) -> None:
        self._books.disk.works()
        self._books.ids.indexed(part.physical_id for part in job.parts)
        size = sum(part.end - part.begin for part in job.parts)
        if job.commit:
            self._books.totals.commits += 1
            self._books.totals.bytes_committed += size
        else:
            self._books.totals.bytes_flushed += size
        self._books.totals.segments_flushed += sum(part.final for part in job.parts)

    def _part_written(self, part: WritePart) -> None:
        segment = part.segment
        self._removals.remove_files(segment.stored_up_to(part.end, part.crc32c))
        if segment.dropped:
            return
        if part.end > segment.durable_head and not segment.entry.by_replicas:
            segment.advance_durable_head(part.end)
        if part.final:
            self._index_writer.forget(segment)
            segment.entry.stored(segment)
            self._slots.stored[segment] = None
        else:
            self._index_writer.durable_further(segment)

    def _failed(self, job: StoreJob, error: OSError, now_ms: int) -> None:
        self._books.totals.disk_errors += 1
        self._books.disk.fails(error, now_ms)
        for part in job.parts:
            part.segment.abandon_file()
            self._index_writer.forget(part.segment)

    def remove_files(self, segment: Segment) -> None:
        """Remove the files of a segment that was dropped; files in the index go with their stream's records."""
        if not segment.in_index:
            self._removals.remove_files(segment.files)

    # -- for the shutdown and for metrics --------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether a write is wanted, or under way."""
        return bool(self.closed or self._commits.dirty or self._flushing or self._committing)

    @property
    def puts_off(self) -> bool:
        """Whether closed segments wait for their delayed flush."""
        return self._flush_delay_ms > 0 and bool(self.closed)

    @property
    def committing(self) -> bool:
        """Whether a group commit is under way, or wanted."""
        return bool(self._commits.dirty or self._committing)

    @property
    def bytes_left(self) -> int:
        """The size of the data that is not on disk."""
        return sum(segment.head - segment.stored for segment in (*self.heads, *self.closed))
