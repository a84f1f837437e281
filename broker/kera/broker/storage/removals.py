"""What goes for good: by retention, truncation and deletion. Part of the persistence manager; pure.

From the index first and then from the disk, in one job at a time, so that what a crash leaves is at most a file that
the index knows is to be removed. An entry of which something goes is locked meanwhile: there is never more than one
change of its records under way. A removal that failed is tried again before any other, with its entries still locked.

Here are also the other changes of the index that are nobody's segment: committed cursors, virtual segments, and how far
open segments are durable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kera.broker.log.entry import Entry
from kera.broker.log.segment import Segment
from kera.broker.records import Change
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.index_format import (
    delete_segment,
    put_cursor,
    put_entry,
    put_producer,
    put_removal,
    put_segment,
    stream_of,
    streamlet_of,
)
from kera.broker.storage.jobs import RETRY_MS, RemoveJob, Totals
from kera.core.done import Done, nothing
from kera.core.errors import DiskFailed, KeraError
from kera.core.ids import Position
from kera.core.telemetry import get_logger

log = get_logger("kera.persistence")

REMOVALS_MAX = 512
"""Segments removed in one job."""


class Removals:
    """See the head of this module."""

    def __init__(
        self,
        index: SegmentIndex,
        totals: Totals,
        *,
        locked: set[Entry],
        unsettled: set[int],
        on_removed: Callable[[RemoveJob], None],
    ) -> None:
        """`locked` and `unsettled` are the persistence manager's; `on_removed`: memory follows the index."""
        self._index = index
        self._totals = totals
        self._locked = locked
        self._unsettled = unsettled
        self._on_removed = on_removed
        self._drops: dict[int, list[Done]] = {}
        """Streams that go."""
        self._streamlet_drops: dict[tuple[int, int], list[Done]] = {}
        """Streamlets that go without their stream."""
        self._collect: dict[Entry, list[Done]] = {}
        """Entries whose start has moved."""
        self._unnoted: dict[Segment, None] = {}
        """Open, and durable further than the index knows."""
        self._note_now = False
        self._remove: list[tuple[list[Change], list[int], Done]] = []
        """Changes of the index, files to remove after them."""
        self._failed: RemoveJob | None = None
        self._retry_ms = 0
        self._removing = False

    # -- what is to be done ----------------------------------------------------------------------------------------

    def collect(self, entry: Entry, done: Done) -> None:
        """Remove what is before the entry's start; `done` when it is gone for good, whatever happens after."""
        self._collect.setdefault(entry, []).append(done)

    def drop_stream(self, stream_id: int, done: Done) -> None:
        """Remove all records and files of a stream, whose streamlets were dropped."""
        self._drops.setdefault(stream_id, []).append(done)

    def drop_streamlet(self, stream_id: int, streamlet_id: int, done: Done) -> None:
        """Remove all records and files of one streamlet, which was dropped."""
        self._streamlet_drops.setdefault((stream_id, streamlet_id), []).append(done)

    def commit_cursor(self, entry: Entry, consumer_group: str, position: Position, done: Done) -> None:
        """Remember, durably, how far a consumer group has read."""

        def committed(error: KeraError | None) -> None:
            if error is None:
                entry.committed[consumer_group] = position
            done(error)

        self.note([put_cursor(entry.log_id, consumer_group, position)], committed)

    def note(self, changes: list[Change], done: Done) -> None:
        """Write down what is nobody's segment; `done` when that is durable."""
        self._remove.append((changes, [], done))

    def remove_files(self, physical_ids: list[int]) -> None:
        """Remove files that the index does not know."""
        if physical_ids:
            self._remove.append(([], physical_ids, nothing))

    def cancel(self, entry: Entry) -> None:
        """The entry's whole stream goes."""
        for done in self._collect.pop(entry, ()):
            done(None)

    def durable_further(self, segment: Segment) -> None:
        """An open segment is durable further than the index knows."""
        self._unnoted[segment] = None

    def forget(self, segment: Segment) -> None:
        """The index need not know how far a segment is durable: it has it whole, or not any more."""
        self._unnoted.pop(segment, None)

    def note_soon(self, *, quiet: bool) -> bool:
        """Time has passed: unless there is better to do (`quiet`), write down how far segments are durable.

        Returns whether there is anything to plan now.
        """
        self._note_now = quiet and bool(self._unnoted)
        return self._note_now or self._failed is not None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do, except what only time will bring."""
        return not (self._drops or self._streamlet_drops or self._remove or self._collect or self._removing)

    # -- jobs ------------------------------------------------------------------------------------------------------

    def plan(self, now_ms: int) -> RemoveJob | None:
        """What to do next, if anything; it must be performed and then given to `finished`."""
        if self._removing:
            return None
        if self._failed is not None:
            if now_ms < self._retry_ms:
                return None
            job, self._failed = self._failed, None
            self._removing = True
            return job
        job = RemoveJob([], [], [], [])
        while self._remove and len(job.physical_ids) < REMOVALS_MAX:
            changes, physical_ids, done = self._remove.pop(0)
            job.changes += changes
            job.physical_ids += physical_ids
            job.done.append(done)
        for entry in [entry for entry in self._collect if entry not in self._locked]:
            if len(job.physical_ids) >= REMOVALS_MAX:
                break
            self._locked.add(entry)
            job.entries.append(entry)
            job.done += self._collect.pop(entry)
            self._collect_entry(entry, job)
        if self._note_now:
            self._note(job)
        for stream_id in list(self._drops):
            self._plan_drop(stream_id, job)
        for stream_id, streamlet_id in list(self._streamlet_drops):
            self._plan_streamlet_drop(stream_id, streamlet_id, job)
        if not (job.done or job.changes or job.physical_ids):
            return None
        job.changes += [put_removal(physical_id) for physical_id in job.physical_ids]
        self._removing = True
        return job

    def _plan_drop(self, stream_id: int, job: RemoveJob) -> None:
        """All that the index has of a stream, once nobody is about to add to it."""
        if any(entry.log_id.stream_id == stream_id for entry in self._locked):
            return
        job.done += self._drops.pop(stream_id)
        job.changes = [(key, value) for key, value in job.changes if stream_of(key) != stream_id]
        segments = self._index.segments_of_stream(stream_id)
        job.physical_ids += [record.physical_id for _, record in segments if not record.to_come]
        job.changes += [(key, None) for key in self._index.keys_of_stream(stream_id)]

    def _plan_streamlet_drop(self, stream_id: int, streamlet_id: int, job: RemoveJob) -> None:
        """All that the index has of a streamlet, likewise."""
        streamlet = stream_id, streamlet_id
        if any(entry.log_id[:2] == streamlet for entry in self._locked):
            return
        job.done += self._streamlet_drops.pop(streamlet)
        job.changes = [(key, value) for key, value in job.changes if streamlet_of(key) != streamlet]
        for address, record in self._index.segments_of_streamlet(stream_id, streamlet_id):
            job.gone.append(address)
            job.physical_ids += () if record.to_come else [record.physical_id]
        job.changes += [(key, None) for key in self._index.keys_of_streamlet(stream_id, streamlet_id)]

    def _note(self, job: RemoveJob) -> None:
        """Write down how far open segments are durable.

        Chunks say that of those before them, so only for the last commit is there no other evidence: done when there is
        nothing else to do.
        """
        self._note_now = False
        for segment in [segment for segment in self._unnoted if segment.entry not in self._locked]:
            del self._unnoted[segment]
            self._locked.add(segment.entry)
            job.entries.append(segment.entry)
            job.changes.append(
                put_segment(segment.address, segment.record()._replace(length=segment.stored, open=True))
            )

    def _collect_entry(self, entry: Entry, job: RemoveJob) -> None:
        """Everything of an entry that is before its start. Memory is freed when the index has it, and not before."""
        start = entry.start
        lengths: list[int] = []
        for address, record in self._index.segments(entry.log_id):
            key = (address.group_id, address.segment_id)
            if key > entry.last_stored or Position(*key, record.length) > start:
                break
            job.changes.append(delete_segment(address))
            job.physical_ids += () if record.to_come else [record.physical_id]
            job.stored.append((entry, key, record.length))
            lengths.append(record.length)
            if len(lengths) == REMOVALS_MAX:
                self._collect[entry] = []  # the rest goes with the next job: the loop has other things to do
                break
        tail: list[Segment] = []
        for segment in entry.tail:
            if entry in self._collect or not segment.closed or Position(*segment.key, segment.head) > start:
                break
            tail.append(segment)
            job.changes += [put_producer(*entry.log_id[:2], *item) for item in segment.producers.items()]
            job.changes.append(delete_segment(segment.address))  # of an open file, if there is one
            job.physical_ids += files_of(segment)
            lengths.append(segment.head)
        job.tail += tail
        after = entry.record_with(tail) if tail else entry.record()
        after = after._replace(
            stored_bytes=after.stored_bytes - sum(lengths), stored_segments=after.stored_segments - len(lengths)
        )
        job.changes.append(put_entry(entry.log_id, after))

    def finished(self, job: RemoveJob, now_ms: int) -> None:
        """The job was performed: take note, tell who waits."""
        self._removing = False
        error: KeraError | None = None
        if job.error is None:
            self._locked.difference_update(job.entries)
            self._unsettled.difference_update(job.physical_ids)
            self._on_removed(job)
        else:
            self._totals.disk_errors += 1
            log.error("cannot remove segments; it is tried again", error=str(job.error), retry_ms=RETRY_MS)
            error = DiskFailed(f"cannot change the index: {job.error}", path=str(job.error.filename))
            # Its entries stay locked: what is to be written of them has been decided.
            self._failed = replace(job, done=[], error=None)
            self._retry_ms = now_ms + RETRY_MS
        for done in job.done:
            done(error)


def files_of(segment: Segment) -> list[int]:
    """All files that a segment has, or had before they failed."""
    return [physical_id for physical_id in (segment.physical_id, *segment.abandoned) if physical_id]
