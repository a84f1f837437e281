"""Loads segments from disk: those that readers want, and the following ones ahead of them. Part of the persistence
manager; pure.

A segment that still has to come from backups is awaited for a limited time; the event `awaited` tells the recovery that
a reader wants it.

A share of the memory bounds the segments that are read ahead. Segments that a reader waits for are not bounded, because
they replace others.
"""

from __future__ import annotations

import contextlib
from typing import Any

from kera.broker.log.arena import Slot
from kera.broker.log.entry import Entry
from kera.broker.log.segment import Segment
from kera.broker.records import Key, SegmentRecord
from kera.broker.storage.books import Books
from kera.broker.storage.jobs import LoadJob
from kera.broker.storage.slots import SegmentSlots
from kera.core.base.done import Done
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger
from kera.core.errors import ArenaFull, DiskFailed, KeraError, Recovering, Unavailable

log = get_logger("kera.persistence")

LOADS_IN_FLIGHT_MAX = 2
READ_AHEAD_SEGMENTS = 2
AWAITED_MS = 4_000
"""How long a reader waits for a segment that still has to come from backups."""


class Loads:
    """Plans the loads of segments from disk: those that readers wait for, and a bounded number ahead of them."""

    def __init__(self, slots: SegmentSlots, books: Books) -> None:
        self._slots = slots
        self._books = books
        self._wanted: dict[tuple[Entry, Key], None] = {}
        """The wanted segments, in the order of the requests."""
        self._waiters: dict[tuple[Entry, Key], list[Done]] = {}
        """The callbacks of the requests that wait for each wanted segment; empty if all have given up."""
        self._read_on: set[tuple[Entry, Key]] = set()
        """Wanted segments whose readers will want the following ones, too."""
        self._awaited: dict[tuple[Entry, Key], int] = {}
        """Wanted segments that still have to come from backups, each with the time when its waiters get an error."""
        self._in_flight: dict[Segment, list[Done]] = {}
        """Segments that are being loaded, with their waiters."""
        self._now_ms = 0
        self._failing = Repeated(log)

    def __bool__(self) -> bool:
        """Whether segments have to be loaded."""
        return bool(self._wanted)

    @property
    def in_flight(self) -> int:
        """The number of segments that are being loaded."""
        return len(self._in_flight)

    def load(self, entry: Entry, key: Key, done: Done | None = None, *, ahead: bool = True) -> None:
        """Load a segment into memory, and the following ones; call `done` when it is there, or with an error.

        `ahead`: the waiter will read on, so the following segments are loaded, too. Otherwise they would take memory
        for nothing.
        """
        segment = entry.resident.get(key)
        if segment is not None:
            if not segment.loading:
                if done is not None:
                    done(None)
                return
            if done is not None:
                self._in_flight[segment].append(done)
            return
        if done is not None:
            self._waiters.setdefault((entry, key), []).append(done)
            if ahead:
                self._read_on.add((entry, key))
        self._wanted[entry, key] = None
        self._books.events.disk_work()

    def forget(self, entry: Entry, key: Key, done: Done) -> None:
        """Forget a `done` that nobody waits for any more. The segment is still loaded, for the next attempt."""
        segment = entry.resident.get(key)
        loading = self._in_flight.get(segment) if segment is not None else None
        for waiters in (self._waiters.get((entry, key)), loading):
            if waiters is not None:
                with contextlib.suppress(ValueError):
                    waiters.remove(done)

    def not_loaded(self, entry: Entry, key: Key) -> Unavailable:
        """Return the error for a segment that was not loaded in time."""
        if entry.recovering(key):
            return Recovering(
                f"segment {key} is being recovered from backups, after its broker was lost; try again",
                log=list(entry.log_id),
            )
        why = "all of it is in use; try again when some is written to disk or released by its readers"
        attributes: dict[str, Any] = {"log": list(entry.log_id)}
        if self._books.disk.error is not None:
            cause = self._books.disk.full(self._books.disk.error)
            why, attributes = cause.message, {**cause.attributes, **attributes}
        return Unavailable(f"segment {key} is on disk, and there was no room in memory to load it: {why}", **attributes)

    def expire(self, now_ms: int) -> None:
        """Fail the waiters whose segments have not come from backups in time."""
        self._now_ms = now_ms
        for entry, key in [wanted for wanted, until in self._awaited.items() if now_ms >= until]:
            del self._awaited[entry, key]
            self._tell(
                entry,
                key,
                Recovering(f"segment {key} is being recovered from backups; try again", log=list(entry.log_id)),
            )

    def arrived(self, entry: Entry, key: Key) -> None:
        """Load a segment, if it is wanted, that has come from backups and is on disk now."""
        if self._awaited.pop((entry, key), None) is not None:
            self._wanted[entry, key] = None

    def cancel(self, entry: Entry) -> None:
        """Cancel the loads of an entry that was dropped, and wake their waiters."""
        for wanted in [wanted for wanted in self._wanted if wanted[0] is entry]:
            del self._wanted[wanted]
            self._tell(*wanted)
        for wanted in [wanted for wanted in self._awaited if wanted[0] is entry]:
            del self._awaited[wanted]
            self._tell(*wanted)

    def _tell(self, entry: Entry, key: Key, error: KeraError | None = None) -> None:
        """Call all waiters of a segment, with the error if there is one."""
        self._read_on.discard((entry, key))
        for waiter in self._waiters.pop((entry, key), []):
            waiter(error)

    # -- jobs ------------------------------------------------------------------------------------------------------

    def plan(self) -> list[LoadJob]:
        """Return the loads to do now; each job must be performed and then given to `finished`."""
        jobs: list[LoadJob] = []
        slots, put_off = self._slots, 0
        while len(self._wanted) > put_off and len(self._in_flight) < LOADS_IN_FLIGHT_MAX:
            entry, key = wanted = next(iter(self._wanted))
            record = entry.find(key)
            if not isinstance(record, SegmentRecord):
                del self._wanted[wanted]
                self._tell(entry, key)  # it is in memory, or was removed: the reader looks again
            elif record.to_come:
                del self._wanted[wanted]
                if wanted in self._waiters:
                    self._awaited.setdefault(wanted, self._now_ms + AWAITED_MS)
                    self._books.events.awaited(entry, key)
            elif wanted not in self._waiters and not slots.may_read_ahead:
                del self._wanted[wanted]  # enough was read ahead
            elif slots.have_free() or (slots.hurry(self._now_ms) and slots.have_free()):
                try:
                    slot = slots.begin_load(entry.memory_domain)
                except ArenaFull:  # of this memory domain: others go first
                    del self._wanted[wanted]
                    self._wanted[wanted] = None
                    put_off += 1
                    continue
                del self._wanted[wanted]
                jobs.append(self._begin(entry, key, record, slot))
            else:
                break
        return jobs

    def _begin(self, entry: Entry, key: Key, record: SegmentRecord, slot: Slot) -> LoadJob:
        segment = Segment.stub(entry, entry.address(key), slot, record)
        entry.resident[key] = segment
        self._in_flight[segment] = self._waiters.pop((entry, key), [])
        if (entry, key) in self._read_on:
            self._read_on.remove((entry, key))
            self._read_ahead(entry, key)
        segment.slot.pin()
        return LoadJob(segment)

    def _read_ahead(self, entry: Entry, key: Key) -> None:
        for _ in range(READ_AHEAD_SEGMENTS):
            following = entry.following(key)
            if following is None or not isinstance(following[1], SegmentRecord):
                return
            key = following[0]
            self._wanted[entry, key] = None

    def finished(self, job: LoadJob, now_ms: int) -> None:
        """Record the result of a performed load, and call its waiters."""
        segment = job.segment
        waiters = self._in_flight.pop(segment)
        segment.loading = False
        segment.slot.unpin()
        error = job.failure
        if job.error is not None:
            self._books.totals.disk_errors += 1
            error = DiskFailed(
                f"cannot read segment {segment.address} from disk: {job.error}", path=str(job.error.filename)
            )
            self._failing.goes_on(
                "cannot read a segment", level="error", address=list(segment.address), error=str(job.error)
            )
        elif error is None and not segment.dropped:
            self._failing.over("segments can be read again")
            segment.loaded(job.chunk_ends, job.holes)
            self._books.totals.chunks_damaged += len(job.holes)
            self._books.totals.segments_loaded += 1
            self._books.totals.bytes_loaded += segment.head
        self._slots.end_load(segment, now_ms, loaded=error is None and not segment.dropped)
        for waiter in waiters:
            waiter(error)
