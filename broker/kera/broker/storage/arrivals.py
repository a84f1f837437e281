"""Segments from elsewhere: adds their index records, and then their files. Part of the persistence manager; pure.

    graft     entries get records of segments that this broker has not written, all in one change
    install   the file of such a segment is complete and durable: it gets its name, and its record the physical id

Only one job runs at a time. The entries that it touches are locked meanwhile, as for any change of their records. A
failed job is repeated before any other; repeating it is harmless.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from kera.broker.log.entry import Entry
from kera.broker.records import TO_COME, Change, Graft, Key, SegmentRecord
from kera.broker.storage.books import Books
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.index_format import put_entry, put_segment
from kera.broker.storage.jobs import RETRY_MS, ArriveJob
from kera.core.base.done import Done
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger

log = get_logger("kera.persistence")

INSTALLED_MAX = 64
"""Maximum number of segments in one job."""


class _Installation(NamedTuple):
    record: SegmentRecord
    done: Done
    replaces: int


class Arrivals:
    """Plans the index changes for segments from elsewhere: first their records, then their complete files."""

    def __init__(
        self,
        index: SegmentIndex,
        books: Books,
        *,
        on_arrived: Callable[[ArriveJob], None],
        writes: Callable[[], set[bytes]] = set,
    ) -> None:
        """`on_arrived`: updates memory after the index; `writes`: returns the keys that the index writer will write."""
        self._writes = writes
        self._index = index
        self._books = books
        self._locked = books.locked
        self._on_arrived = on_arrived
        self._grafts: list[tuple[dict[Entry, Graft], list[Change], Done]] = []
        self._install: dict[tuple[Entry, Key], _Installation] = {}
        self._failed: ArriveJob | None = None
        self._retry_ms = 0
        self._failing = Repeated(log)
        self._busy = False

    def graft(self, grafts: dict[Entry, Graft], changes: list[Change], done: Done) -> None:
        """Add segments to entries, with their records in `changes`; call `done` when memory and index have them."""
        self._grafts.append((grafts, changes, done))
        self._books.events.disk_work()

    def install(self, entry: Entry, key: Key, record: SegmentRecord, done: Done, *, replaces: int = TO_COME) -> None:
        """Install the complete file of a segment, with `record` as its record in the index.

        `replaces`: the physical id that the index has for it now.
        Calls `done` when the index has the record, or when the segment was removed, dropped or given another file.
        """
        self._install[entry, key] = _Installation(record, done, replaces)
        self._books.events.disk_work()

    def cancel(self, entry: Entry) -> None:
        """Cancel the installations of an entry that was dropped."""
        for item in [item for item in self._install if item[0] is entry]:
            self._install.pop(item).done(None)

    @property
    def idle(self) -> bool:
        """Whether no job is under way or queued; a failed job that waits for its retry does not count."""
        return not (self._grafts or self._install or self._busy)

    @property
    def waits(self) -> bool:
        """Whether a failed job waits for its retry."""
        return self._failed is not None

    def plan(self, now_ms: int) -> ArriveJob | None:
        """Return the next job, if any; it must be performed and then given to `finished`."""
        if self._busy or not (self._grafts or self._install or self._failed):
            return None
        if self._failed is not None:
            if now_ms < self._retry_ms:
                return None
            job, self._failed = self._failed, None
            self._busy = True
            return job
        job = ArriveJob([], {}, [], [], [])
        others = self._writes() if self._grafts else set()
        for item in [item for item in self._grafts if not self._locked.intersection(item[0])]:
            grafts, changes, done = item
            changes = changes + [put_entry(entry.log_id, entry.grafted(graft)) for entry, graft in grafts.items()]
            if self._locked.intersection(grafts) or others.intersection(key for key, _ in changes):
                continue  # its entries are in this job already, or the index writer would overwrite it with older data
            self._grafts.remove(item)
            job.changes += changes
            job.grafts += grafts.items()
            job.done.append(done)
            self._lock(job, *grafts)
        for entry, key in [item for item in self._install if item[0] not in self._locked or item[0] in job.entries]:
            if len(job.installed) == INSTALLED_MAX:
                break
            self._install_one(entry, key, job)
        if not job.done:
            return None
        job.meta = self._books.ids.meta
        self._busy = True
        return job

    def _lock(self, job: ArriveJob, *entries: Entry) -> None:
        new = [entry for entry in entries if entry not in job.entries]
        self._locked.update(new)
        job.entries += new

    def _install_one(self, entry: Entry, key: Key, job: ArriveJob) -> None:
        installation = self._install.pop((entry, key))
        address = entry.address(key)
        known = self._index.segment(address)
        if known is None or known.physical_id != installation.replaces:
            installation.done(None)
            return
        job.changes.append(put_segment(address, installation.record))
        job.physical_ids.append(installation.record.physical_id)
        job.installed.append((entry, key))
        job.done.append(installation.done)
        self._books.ids.expect(installation.record.physical_id)
        self._lock(job, entry)

    def finished(self, job: ArriveJob, now_ms: int) -> None:
        """Record the result of a performed job, and call its `done` functions if it has succeeded."""
        self._busy = False
        if job.error is not None:
            self._books.totals.disk_errors += 1
            self._failing.goes_on(
                "cannot take in segments; retrying", level="error", error=str(job.error), retry_ms=RETRY_MS
            )
            # Its entries stay locked, because the changes of their records are already decided.
            self._failed = replace(job, error=None)
            self._retry_ms = now_ms + RETRY_MS
            return
        self._failing.over("segments can be taken in again")
        self._locked.difference_update(job.entries)
        self._books.ids.indexed(job.physical_ids)
        for entry, graft in job.grafts:
            entry.graft(graft)
        self._on_arrived(job)
        for done in job.done:
            done(None)
