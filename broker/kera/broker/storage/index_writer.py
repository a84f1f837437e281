"""Index changes that belong to no segment: made in order, and durable before their `Done` is called. Pure.

Removals (``kera.broker.storage.removals``) are part of the same changes, so that nothing is recorded about a stream
that was just dropped. The durable lengths of open segments are recorded only when there is nothing better to do: chunks
name the durable head before them, so only the last commit has no other evidence.

At most one `IndexJob` is under way. A failed job is repeated before any other, with its entries still locked, because
the changes of their records are already decided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kera.broker.log.entry import Entry
from kera.broker.log.segment import Segment
from kera.broker.records import Change
from kera.broker.storage.books import Books
from kera.broker.storage.index_format import put_cursor, put_removal, put_segment
from kera.broker.storage.jobs import RETRY_MS, IndexJob
from kera.broker.storage.removals import Removals
from kera.core.base.done import Done
from kera.core.base.ids import Position
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger
from kera.core.errors import DiskFailed, KeraError

log = get_logger("kera.persistence")


class IndexWriter:
    """Plans index changes that belong to no segment, one job at a time, and calls `Done` when they are durable."""

    def __init__(self, removals: Removals, books: Books, *, on_removed: Callable[[IndexJob], None]) -> None:
        """`on_removed`: updates memory after the index."""
        self._removals = removals
        self._books = books
        self._locked = books.locked
        self._on_removed = on_removed
        self._noted: list[tuple[list[Change], Done]] = []
        self._durable_further: dict[Segment, None] = {}
        """Open segments that are durable further than the index knows."""
        self._note_durable_heads = False
        self._job: IndexJob | None = None
        """The job under way."""
        self.failed: IndexJob | None = None
        """The job that has to be repeated."""
        self._retry_ms = 0
        """When the failed job may be repeated."""
        self._failing = Repeated(log)

    def note(self, changes: list[Change], done: Done) -> None:
        """Make changes that belong to no segment; call `done` when they are durable, or the first attempt has failed.

        A change that has failed is tried again, so it may still come to be.
        """
        self._noted.append((changes, done))
        self._books.events.disk_work()

    def commit_cursor(self, entry: Entry, consumer_group: str, position: Position, done: Done) -> None:
        """Record durably how far a consumer group has read."""

        def committed(error: KeraError | None) -> None:
            if error is None:
                entry.committed[consumer_group] = position
            done(error)

        self.note([put_cursor(entry.log_id, consumer_group, position)], committed)

    def durable_further(self, segment: Segment) -> None:
        """Note that an open segment is durable further than the index knows."""
        self._durable_further[segment] = None

    def forget(self, segment: Segment) -> None:
        """Do not record how far a segment is durable: the index has all of it, or it was removed."""
        self._durable_further.pop(segment, None)

    def has_work(self, *, quiet: bool) -> bool:
        """Whether there are changes to plan now; `quiet`: nothing else is to do, so durable lengths may be recorded."""
        self._note_durable_heads = quiet and bool(self._durable_further)
        return self._note_durable_heads or self.failed is not None

    @property
    def idle(self) -> bool:
        """Whether no change is under way or queued; durable lengths and retries, which take time, do not count."""
        return not (self._noted or self._job is not None or self._removals.waiting)

    # -- jobs ------------------------------------------------------------------------------------------------------

    def plan(self, now_ms: int) -> IndexJob | None:
        """Return the next job, if any; it must be performed and then given to `finished`."""
        if self._job is not None:
            return None
        if self.failed is not None:
            if now_ms < self._retry_ms:
                return None
            job, self.failed = self.failed, None
            self._job = job
            return job
        job = IndexJob([], {}, [], [])
        noted, self._noted = self._noted, []
        for changes, done in noted:
            job.changes += changes
            job.done.append(done)
        self._removals.add_to(job)
        if self._note_durable_heads:
            self._add_durable_heads(job)
        if not (job.done or job.changes or job.physical_ids):
            return None
        job.changes += [put_removal(*item) for item in job.physical_ids.items()]
        self._job = job
        return job

    def writes(self) -> set[bytes]:
        """Return the keys that are being written, or will be: other jobs must not write them before."""
        jobs = (job.changes for job in (self._job, self.failed) if job is not None)
        return {key for changes in (*jobs, *(changes for changes, _ in self._noted)) for key, _ in changes}

    def _add_durable_heads(self, job: IndexJob) -> None:
        self._note_durable_heads = False
        for segment in [segment for segment in self._durable_further if segment.entry not in self._locked]:
            del self._durable_further[segment]
            self._locked.add(segment.entry)
            job.entries.append(segment.entry)
            record = segment.record()._replace(length=segment.stored, open=True)
            job.changes.append(put_segment(segment.address, record))

    def finished(self, job: IndexJob, now_ms: int) -> None:
        """Record the result of a performed job, and call its `done` functions."""
        self._job = None
        error: KeraError | None = None
        if job.error is None:
            self._failing.over("the index can be changed again")
            self._locked.difference_update(job.entries)
            self._books.ids.indexed(job.physical_ids)
            self._on_removed(job)
        else:
            self._books.totals.disk_errors += 1
            self._failing.goes_on(
                "cannot change the index; retrying", level="error", error=str(job.error), retry_ms=RETRY_MS
            )
            error = DiskFailed(
                f"cannot change the index: {job.error}; the broker tries again, so the change may still come to be",
                path=str(job.error.filename),
            )
            self.failed = replace(job, done=[], error=None)
            self._retry_ms = now_ms + RETRY_MS
        for done in job.done:
            done(error)
