"""The parts of virtual logs: runs of chunks, batches of runs, and virtual segments with batches.

Plain data; ``kera.broker.replication.virtual_log`` changes it, and ``kera.broker.replication.coverage`` once a virtual
segment is closed.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, NamedTuple

from kera.broker.log.segment import Segment
from kera.broker.records import SegmentAddress
from kera.core.base.done import Done
from kera.core.errors import KeraError
from kera.core.format.chunk import chained_checksums

GATHER_MS_MAX = 500
"""How long a batch that cannot be sent takes more chunks."""


@dataclass(slots=True)
class Free:
    """A request to delete replicas."""

    backup_id: int
    virtual_segment_ids: tuple[int, ...]


class SegmentRun:
    """A reference to consecutive chunks of a segment, which it keeps in memory."""

    __slots__ = ("end", "segment", "start")

    def __init__(self, segment: Segment, start: int, end: int) -> None:
        self.segment = segment
        self.start = start
        self.end = end
        segment.slot.pin()


class Batch:
    """Data that goes to each backup with one request."""

    __slots__ = (
        "born_ms",
        "checksum",
        "checksum_after",
        "completed",
        "length",
        "missing",
        "noted",
        "offset",
        "over",
        "persist",
        "place",
        "runs",
        "sent",
        "waiters",
    )

    def __init__(self, now_ms: int) -> None:
        self.runs: dict[Segment, SegmentRun] = {}
        self.length = 0
        self.persist = False
        """Whether the data has to reach the disks of the backups."""
        self.waiters: list[Done] = []
        self.born_ms = now_ms
        self.noted: Any = None
        """The note of a plug-in about this batch (``kera.broker.replication.hooks``)."""
        self.sent = False
        """Whether it was sent at least once, so it takes no more chunks."""
        self.place: VirtualSegment | None = None
        """The virtual segment that it was sent to; None: it has to be sent (again)."""
        self.offset = 0
        self.checksum = 0
        """Checksum of the virtual segment before this batch."""
        self.checksum_after = 0
        self.missing: set[int] = set()
        """The backups that have not acknowledged it yet."""
        self.completed = False
        """Whether it is on R backups, and so is everything before it."""
        self.over = False
        """Whether it is completed, or given up."""

    def takes(self, run: SegmentRun | None, start: int, size: int, now_ms: int, bytes_max: int) -> bool:
        """Whether the batch takes more chunks; `run`: its run of their segment.

        A batch that has waited for `GATHER_MS_MAX` takes none, because all its requests time out at the same time.
        """
        fits = self.length + size <= bytes_max and now_ms - self.born_ms < GATHER_MS_MAX
        return not self.sent and fits and (run is None or run.end == start)

    @property
    def complete(self) -> bool:
        """Whether all backups have it."""
        return self.place is not None and not self.missing

    def views(self) -> list[memoryview]:
        """Return views of the chunks in memory."""
        return [run.segment.slot.view[run.start : run.end] for run in self.runs.values()]

    def checksum_from(self, checksum: int) -> int:
        """Return `checksum`, continued over the chunks of this batch."""
        for run in self.runs.values():
            ends = run.segment.chunk_ends
            of_run = ends[bisect_right(ends, run.start) : bisect_right(ends, run.end)]
            checksum = chained_checksums(run.segment.slot.view, run.start, of_run, checksum)
        return checksum

    def finish(self, error: KeraError | None) -> None:
        """Call the waiters; each is called once."""
        waiters, self.waiters = self.waiters, []
        for done in waiters:
            done(error)


class Extent(NamedTuple):
    """A part of a segment."""

    address: SegmentAddress
    start: int
    end: int


class VirtualSegment:
    """References to consecutive chunks of a virtual log, and where their replicas are."""

    __slots__ = (
        "_newest",
        "backups",
        "checksum",
        "closing",
        "ended",
        "extents",
        "head",
        "left",
        "live",
        "log_id",
        "pending",
        "stream_id",
        "touched_ms",
        "virtual_segment_id",
        "wanted",
        "written",
    )

    def __init__(self, virtual_segment_id: int, stream_id: int, log_id: int, backups: list[int], now_ms: int) -> None:
        self.virtual_segment_id = virtual_segment_id
        self.stream_id = stream_id
        self.log_id = log_id
        self.backups = backups
        """The backups that have a replica; fewer than `wanted` after a failure."""
        self.wanted = len(backups)
        self.head = 0
        """Offset of the next batch in the virtual segment, and in its replicas."""
        self.checksum = 0
        """Checksum over the checksums of its chunks."""
        self.extents: list[Extent] = []
        """The complete extents; for a closed virtual segment, all of its data."""
        self.left: list[int] = []
        """Backups that are no longer among `backups`, but may have a part of it: freed when it is retired."""
        self._newest: dict[SegmentAddress, int] = {}
        """The index in `extents` of each segment's newest part, until this virtual segment is closed."""
        self.pending = 0
        """Number of its batches that are not complete."""
        self.closing: set[int] | None = None
        """The backups that have not closed their replicas yet; None before it is ended and complete."""
        self.ended = False
        """Whether it takes no more batches."""
        self.touched_ms = now_ms
        self.live = 0
        """For a closed virtual segment: the number of its segments that have data left in the log."""
        self.written = False
        """Whether the index has it."""

    def cover(self, run: SegmentRun) -> None:
        """Add a complete run to the extents."""
        address = run.segment.address
        newest = self._newest.get(address)
        if newest is not None and self.extents[newest].end == run.start:
            self.extents[newest] = Extent(address, self.extents[newest].start, run.end)
        else:
            self._newest[address] = len(self.extents)
            self.extents.append(Extent(address, run.start, run.end))

    def close(self) -> None:
        """Note that it is closed."""
        self._newest = {}

    def freed(self) -> list[Free]:
        """Return the requests to delete its replicas."""
        return [Free(backup_id, (self.virtual_segment_id,)) for backup_id in (*self.backups, *self.left)]

    def addresses(self) -> set[SegmentAddress]:
        """Return the segments that it has data of."""
        return {extent.address for extent in self.extents}


@dataclass(slots=True)
class ReplicationTotals:
    """Totals since the start, over all virtual logs."""

    batches: int = 0
    """Completed batches."""
    bytes: int = 0
    """Bytes in completed batches."""
    batches_sent_again: int = 0
    virtual_segments_opened: int = 0
    virtual_segments_closed: int = 0
    virtual_segments_sealed: int = 0
    """Virtual segments that were sealed because a backup failed, refused, or was drained."""
    virtual_segments_repaired: int = 0
    virtual_segments_retired: int = 0
    bytes_repaired: int = 0
    backups_failed: int = 0
    backups_full: int = 0
