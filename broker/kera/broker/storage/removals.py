"""Removes data for good: by retention, truncation and deletion. Pure.

Data is removed from the index first (``kera.broker.storage.index_writer``) and then from the disk, so a crash leaves at
most files that the index has marked for removal. An entry that loses data is locked until the index has forgotten the
data, because each entry has at most one change of its records under way. That is quick. Removing large files is slow,
but no request waits for it: it happens a few files at a time, beside other work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kera.broker.log.digests import digests_in
from kera.broker.log.entry import Entry
from kera.broker.log.segment import Segment
from kera.broker.storage.books import Books
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.index_format import (
    delete_segment,
    put_digests,
    put_entry,
    put_producer,
    stream_of,
    streamlet_of,
)
from kera.broker.storage.jobs import RETRY_MS, IndexJob, RemoveJob
from kera.core.base.done import Done, nothing
from kera.core.base.ids import Position
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger

log = get_logger("kera.persistence")

REMOVALS_MAX = 512
"""Maximum number of segments of entries that the index forgets in one job."""
FILES_MAX = 16
"""Maximum number of files that one job removes."""


class Removals:
    """Plans removals from the index first and from the disk next, so a crash leaves at most files to remove."""

    def __init__(self, index: SegmentIndex, books: Books) -> None:
        self._index = index
        self._events = books.events
        self._locked = books.locked
        self._stream_drops: dict[int, list[Done]] = {}
        self._streamlet_drops: dict[tuple[int, int], list[Done]] = {}
        """Dropped streamlets of streams that remain."""
        self._collect: dict[Entry, list[Done]] = {}
        """Entries whose start has moved."""
        self._files: list[int] = []
        """Files to remove that the index does not know."""
        self._marked: deque[int] = deque()
        """Files that the index has marked for removal."""
        self._removing = False
        self._retry_ms = 0
        self._failing = Repeated(log)
        self._totals = books.totals

    def collect(self, entry: Entry, done: Done = nothing) -> None:
        """Remove the data before the entry's start; call `done` when it cannot come back."""
        self._collect.setdefault(entry, []).append(done)
        self._events.disk_work()

    def drop_stream(self, stream_id: int, done: Done = nothing) -> None:
        """Remove all records and files of a stream, whose streamlets were dropped."""
        self._stream_drops.setdefault(stream_id, []).append(done)
        self._events.disk_work()

    def drop_streamlet(self, stream_id: int, streamlet_id: int, done: Done = nothing) -> None:
        """Remove all records and files of one streamlet, which was dropped."""
        self._streamlet_drops.setdefault((stream_id, streamlet_id), []).append(done)
        self._events.disk_work()

    def remove_files(self, physical_ids: list[int]) -> None:
        """Remove files that the index does not know."""
        if physical_ids:
            self._files += physical_ids
            self._events.disk_work()

    def cancel(self, entry: Entry) -> None:
        """Cancel the collection of an entry whose streamlet was dropped."""
        for done in self._collect.pop(entry, ()):
            done(None)

    @property
    def waiting(self) -> bool:
        """Whether the index has to forget data."""
        return bool(self._files or self._stream_drops or self._streamlet_drops or self._collect)

    @property
    def removing(self) -> bool:
        """Whether files are being removed. After an error or the broker's end, the next start removes the rest."""
        return self._removing or (bool(self._marked) and not self._retry_ms)

    # -- jobs: files -----------------------------------------------------------------------------------------------

    def marked(self, physical_ids: Iterable[int]) -> None:
        """Queue files for removal that the index has marked."""
        self._marked += physical_ids

    def plan(self, now_ms: int) -> RemoveJob | None:
        """Return the next job that removes files, if any; it must be performed and then given to `finished`."""
        if self._removing or not self._marked or now_ms < self._retry_ms:
            return None
        self._removing = True
        return RemoveJob([self._marked.popleft() for _ in range(min(FILES_MAX, len(self._marked)))])

    def finished(self, job: RemoveJob, now_ms: int) -> None:
        """Record the result of a performed job; failed removals are tried again."""
        self._removing = False
        self._retry_ms = 0
        if job.error is None:
            self._failing.over("files can be removed again")
        else:
            self._totals.disk_errors += 1
            self._failing.goes_on(
                "cannot remove files; retrying", level="error", error=str(job.error), retry_ms=RETRY_MS
            )
            self._retry_ms = now_ms + RETRY_MS
            self._marked += job.physical_ids

    @property
    def failed(self) -> bool:
        """Whether a failed removal waits for its retry."""
        return self._retry_ms > 0

    # -- jobs: the index -------------------------------------------------------------------------------------------

    def add_to(self, job: IndexJob) -> None:
        """Add removals to a job: of entries without a change under way, and not too many at once."""
        job.physical_ids |= dict.fromkeys(self._files[:REMOVALS_MAX])
        del self._files[:REMOVALS_MAX]
        for entry in [entry for entry in self._collect if entry not in self._locked]:
            if len(job.physical_ids) >= REMOVALS_MAX:
                break
            self._locked.add(entry)
            job.entries.append(entry)
            job.done += self._collect.pop(entry)
            self._collect_entry(entry, job)
        for stream_id in list(self._stream_drops):
            self._plan_drop(stream_id, job)
        for stream_id, streamlet_id in list(self._streamlet_drops):
            self._plan_streamlet_drop(stream_id, streamlet_id, job)

    def _plan_drop(self, stream_id: int, job: IndexJob) -> None:
        """Add the removal of all records of a stream, unless changes of its entries are under way."""
        if any(entry.log_id.stream_id == stream_id for entry in self._locked):
            return
        job.done += self._stream_drops.pop(stream_id)
        job.changes = [(key, value) for key, value in job.changes if stream_of(key) != stream_id]
        segments = self._index.segments_of_stream(stream_id)
        job.physical_ids |= {record.physical_id: address for address, record in segments if not record.to_come}
        job.changes += [(key, None) for key in self._index.keys_of_stream(stream_id)]

    def _plan_streamlet_drop(self, stream_id: int, streamlet_id: int, job: IndexJob) -> None:
        """Add the removal of all records of a streamlet, unless changes of its entries are under way."""
        streamlet = stream_id, streamlet_id
        if any(entry.log_id[:2] == streamlet for entry in self._locked):
            return
        job.done += self._streamlet_drops.pop(streamlet)
        job.changes = [(key, value) for key, value in job.changes if streamlet_of(key) != streamlet]
        for address, record in self._index.segments_of_streamlet(stream_id, streamlet_id):
            job.gone.append(address)
            job.physical_ids |= {} if record.to_come else {record.physical_id: address}
        job.changes += [(key, None) for key in self._index.keys_of_streamlet(stream_id, streamlet_id)]

    def _collect_entry(self, entry: Entry, job: IndexJob) -> None:
        """Add the removal of an entry's segments before its start. Memory is freed only after the index has it."""
        start = entry.start
        lengths: list[int] = []
        for address, record in self._index.segments(entry.log_id):
            key = (address.group_id, address.segment_id)
            if key > entry.last_stored or Position(*key, record.length) > start:
                break
            job.changes.append(delete_segment(address))
            job.physical_ids |= {} if record.to_come else {record.physical_id: address}
            job.stored.append((entry, key, record.length))
            lengths.append(record.length)
            if len(lengths) == REMOVALS_MAX:
                self._collect[entry] = []  # the next job removes the rest, so the loop is not blocked
                break
        tail: list[Segment] = []
        for segment in entry.tail:
            if entry in self._collect or not segment.closed or Position(*segment.key, segment.head) > start:
                break
            tail.append(segment)
            job.changes += [put_producer(*entry.log_id[:2], *item) for item in segment.producers.items()]
            job.changes += put_digests(*entry.log_id[:2], digests_in(segment))
            job.changes.append(delete_segment(segment.address))  # of an open file, if there is one
            job.physical_ids |= dict.fromkeys(segment.files, segment.address)
            lengths.append(segment.head)
        job.tail += tail
        after = entry.record_with(tail) if tail else entry.record()
        after = after._replace(
            stored_bytes=after.stored_bytes - sum(lengths), stored_segments=after.stored_segments - len(lengths)
        )
        job.changes.append(put_entry(entry.log_id, after))
