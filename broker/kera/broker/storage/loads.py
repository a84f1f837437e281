"""What comes back from disk: segments that readers want, and the following ones ahead of them. Part of the persistence
manager; pure.

A segment that has yet to come from backups is awaited, but not for ever; who recovers is told that it is wanted.

A segment that was loaded is kept until its reader has come for it, but not for ever. What is read ahead is bounded by a
share of the memory; what a reader waits for is not, as it takes the place of something else.
"""

from __future__ import annotations

from collections.abc import Callable

from kera.broker.log.arena import Arena
from kera.broker.log.entry import Entry
from kera.broker.log.segment import Segment
from kera.broker.records import Key, SegmentRecord
from kera.broker.storage.jobs import LoadJob, Totals
from kera.core.done import Done
from kera.core.errors import DiskFailed, KeraError, Recovering
from kera.core.telemetry import get_logger

log = get_logger("kera.persistence")

LOADS_IN_FLIGHT_MAX = 2
READ_AHEAD_SEGMENTS = 2
LOADED_SHARE_MAX = 4
"""At most one slot in so many is for segments that were loaded and not yet read."""
WANTED_MS = 5_000
"""How long a loaded segment waits for its reader before it can be evicted like any other."""
WANTED_MS_MIN = 500
"""The same when another reader waits for its slot, and no other can be had."""
AWAITED_MS = 4_000
"""How long a reader waits for a segment that has yet to come from backups."""


class Loads:
    """See the head of this module."""

    def __init__(
        self,
        arena: Arena,
        totals: Totals,
        *,
        evict: Callable[[], bool],
        beyond_reserve: Callable[[], bool],
        on_loaded: Callable[[Segment], None],
    ) -> None:
        """`evict` frees a slot, if it can; `beyond_reserve`: whether there are more than readers may have to wait for;
        `on_loaded`: a segment is in memory that is on disk, too.
        """
        self._arena = arena
        self._totals = totals
        self._evict = evict
        self._beyond_reserve = beyond_reserve
        self._on_loaded = on_loaded
        self._wanted: dict[tuple[Entry, Key], None] = {}
        """In the order in which it was asked for."""
        self._waiters: dict[tuple[Entry, Key], list[Done]] = {}
        self._read_on: set[tuple[Entry, Key]] = set()
        """Whose waiters will want the following ones, too."""
        self._awaited: dict[tuple[Entry, Key], int] = {}
        """To come from backups → when those who wait for it are told that it takes longer."""
        self.on_awaited: Callable[[Entry, Key], None] = lambda _entry, _key: None
        """Called when a reader wants a segment that is not here yet."""
        self._now_ms = 0
        self._kept: dict[Segment, int] = {}
        """Loaded, not read yet → until when it is kept."""
        self.in_flight = 0

    def __bool__(self) -> bool:
        """Whether anything is to be loaded."""
        return bool(self._wanted)

    def __contains__(self, segment: Segment) -> bool:
        """Whether a segment is kept for a reader."""
        return segment in self._kept

    def load(self, entry: Entry, key: Key, done: Done | None, *, ahead: bool = True) -> None:
        """Bring a segment back into memory, and the following ones; `done` when it is there, or with an error.

        `ahead`: who waits for it will read on. What is read ahead for nobody would keep others out of the memory.
        """
        segment = entry.resident.get(key)
        if segment is not None:
            if not segment.loading:
                if done is not None:
                    done(None)
                return
            if done is not None:
                segment.on_loaded.append(done)
            return
        if done is not None:
            self._waiters.setdefault((entry, key), []).append(done)
            if ahead:
                self._read_on.add((entry, key))
        self._wanted[entry, key] = None

    def forget(self, segment: Segment) -> None:
        """Its reader has come, or it is gone: keep it no longer."""
        self._kept.pop(segment, None)

    def expire(self, now_ms: int) -> None:
        """Keep nothing for readers who do not come."""
        self._now_ms = now_ms
        for segment in [segment for segment, until in self._kept.items() if now_ms >= until]:
            del self._kept[segment]
        for entry, key in [wanted for wanted, until in self._awaited.items() if now_ms >= until]:
            del self._awaited[entry, key]
            self._tell(
                entry,
                key,
                Recovering(f"segment {key} is being recovered from backups; try again", log=list(entry.log_id)),
            )

    def arrived(self, entry: Entry, key: Key) -> None:
        """A segment that had yet to come from backups is on disk now."""
        if self._awaited.pop((entry, key), None) is not None:
            self._wanted[entry, key] = None

    def cancel(self, entry: Entry) -> None:
        """The entry is gone."""
        for wanted in [wanted for wanted in self._wanted if wanted[0] is entry]:
            del self._wanted[wanted]
            self._tell(*wanted)
        for wanted in [wanted for wanted in self._awaited if wanted[0] is entry]:
            del self._awaited[wanted]
            self._tell(*wanted)

    def _tell(self, entry: Entry, key: Key, error: KeraError | None = None) -> None:
        """Who waits for a segment shall look again, or is told why that is of no use."""
        self._read_on.discard((entry, key))
        for waiter in self._waiters.pop((entry, key), []):
            waiter(error)

    # -- jobs ------------------------------------------------------------------------------------------------------

    def plan(self) -> list[LoadJob]:
        """What to load now; each job must be performed and then given to `finished`."""
        jobs: list[LoadJob] = []
        kept_max = max(1, self._arena.slot_count // LOADED_SHARE_MAX)
        while self._wanted and self.in_flight < LOADS_IN_FLIGHT_MAX:
            entry, key = wanted = next(iter(self._wanted))
            record = entry.find(key)
            if not isinstance(record, SegmentRecord):
                del self._wanted[wanted]
                self._tell(entry, key)  # it is in memory, or gone: the reader looks again
            elif record.to_come:
                del self._wanted[wanted]
                if wanted in self._waiters:
                    self._awaited.setdefault(wanted, self._now_ms + AWAITED_MS)
                    self.on_awaited(entry, key)
            elif wanted not in self._waiters and (len(self._kept) >= kept_max or not self._beyond_reserve()):
                del self._wanted[wanted]  # enough was read ahead
            elif self._arena.free_slots or self._evict() or (self._hurry() and self._evict()):
                del self._wanted[wanted]
                jobs.append(self._begin(entry, key, record))
            else:
                break
        return jobs

    def _hurry(self) -> bool:
        """Others wait: keep nothing for readers who have not come at once. Returns whether there was something."""
        late = [segment for segment, until in self._kept.items() if self._now_ms >= until - WANTED_MS + WANTED_MS_MIN]
        for segment in late:
            del self._kept[segment]
        return bool(late)

    def _begin(self, entry: Entry, key: Key, record: SegmentRecord) -> LoadJob:
        segment = Segment.stub(entry, entry.address(key), self._arena.allocate(), record)
        entry.resident[key] = segment
        if (entry, key) in self._waiters:
            segment.on_loaded = self._waiters.pop((entry, key))
        if (entry, key) in self._read_on:
            self._read_on.remove((entry, key))
            self._read_ahead(entry, key)
        segment.slot.pin()
        self.in_flight += 1
        return LoadJob(segment)

    def _read_ahead(self, entry: Entry, key: Key) -> None:
        for _ in range(READ_AHEAD_SEGMENTS):
            following = entry.following(key)
            if following is None or not isinstance(following[1], SegmentRecord):
                return
            key = following[0]
            self._wanted[entry, key] = None

    def finished(self, job: LoadJob, now_ms: int) -> None:
        """The job was performed: take note, tell who waits."""
        segment = job.segment
        self.in_flight -= 1
        segment.loading = False
        waiters, segment.on_loaded = segment.on_loaded, []
        segment.slot.unpin()
        error: KeraError | None = None
        if segment.dropped or job.error is not None:
            if segment.entry.resident.get(segment.key) is segment:
                del segment.entry.resident[segment.key]
            segment.slot.retire()
            if job.error is not None:
                self._totals.disk_errors += 1
                error = DiskFailed(
                    f"cannot read segment {segment.address} from disk: {job.error}", path=str(job.error.filename)
                )
                log.error("cannot read a segment", address=list(segment.address), error=str(job.error))
        else:
            segment.loaded(job.chunk_ends, job.holes)
            self._totals.chunks_damaged += len(job.holes)
            self._totals.segments_loaded += 1
            self._totals.bytes_loaded += segment.head
            self._kept[segment] = now_ms + WANTED_MS
            self._on_loaded(segment)
        for waiter in waiters:
            waiter(error)
