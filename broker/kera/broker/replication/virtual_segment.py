"""The parts of virtual logs: runs of chunks, the batches that they go in, and the virtual segments where those lie.

Plain data, changed by ``kera.broker.replication.virtual_log`` (and, once a virtual segment is closed, by
``kera.broker.replication.coverage``).
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
"""How long a batch that cannot be sent gathers."""


@dataclass(slots=True)
class Free:
    """Delete replicas."""

    backup_id: int
    virtual_segment_ids: tuple[int, ...]


class SegmentRun:
    """A reference to chunks that follow each other in a segment, which stays in memory meanwhile."""

    __slots__ = ("end", "segment", "start")

    def __init__(self, segment: Segment, start: int, end: int) -> None:
        self.segment = segment
        self.start = start
        self.end = end
        segment.slot.pin()


class Batch:
    """Data that are, or will be, replicated with one request."""

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
        """To the disks of the backups."""
        self.waiters: list[Done] = []
        self.born_ms = now_ms
        self.noted: Any = None
        """The note of a plug-in about this batch (``kera.broker.replication.hooks``)."""
        self.sent = False
        """At least once: nothing is added any more."""
        self.place: VirtualSegment | None = None
        """Where it is on its way to; None: it has to be sent (again)."""
        self.offset = 0
        self.checksum = 0
        """Checksum of the virtual segment before this batch."""
        self.checksum_after = 0
        self.missing: set[int] = set()
        """The backups that have yet to acknowledge it."""
        self.completed = False
        """It is on R backups, and so is everything before it."""
        self.over = False
        """It is completed, or given up."""

    def takes(self, run: SegmentRun | None, start: int, size: int, now_ms: int, bytes_max: int) -> bool:
        """Whether more chunks can go with it; `run`: what it has of their segment.

        One that has waited for long takes none: who waits for it loses patience at the same time.
        """
        fits = self.length + size <= bytes_max and now_ms - self.born_ms < GATHER_MS_MAX
        return not self.sent and fits and (run is None or run.end == start)

    @property
    def complete(self) -> bool:
        """Whether all backups have it."""
        return self.place is not None and not self.missing

    def views(self) -> list[memoryview]:
        """The chunks, where they are."""
        return [run.segment.slot.view[run.start : run.end] for run in self.runs.values()]

    def checksum_from(self, checksum: int) -> int:
        """`checksum`, taken on over the chunks of this batch."""
        for run in self.runs.values():
            ends = run.segment.chunk_ends
            of_run = ends[bisect_right(ends, run.start) : bisect_right(ends, run.end)]
            checksum = chained_checksums(run.segment.slot.view, run.start, of_run, checksum)
        return checksum

    def finish(self, error: KeraError | None) -> None:
        """Tell who waits; they are told once."""
        waiters, self.waiters = self.waiters, []
        for done in waiters:
            done(error)


class Extent(NamedTuple):
    """Part of a segment that a virtual segment has."""

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
        """That have a replica each; fewer than `wanted` after a failure."""
        self.wanted = len(backups)
        self.head = 0
        """Where the next batch goes: bytes from its start, which are those of its replicas."""
        self.checksum = 0
        """Over the checksums of its chunks."""
        self.extents: list[Extent] = []
        """The complete extents; for a closed virtual segment, all that it has."""
        self.left: list[int] = []
        """Backups that are not among `backups` any more, and still have something of it: freed when it is retired."""
        self._newest: dict[SegmentAddress, int] = {}
        """Where in `extents` the newest part of a segment is, as long as more may come."""
        self.pending = 0
        """Batches that have a place in it and are not complete."""
        self.closing: set[int] | None = None
        """Once it is complete: the backups that have yet to close their replicas."""
        self.ended = False
        """Nothing more comes to it."""
        self.touched_ms = now_ms
        self.live = 0
        """Segments of which anything is left in the log, once it is closed."""
        self.written = False
        """The index has it."""

    def cover(self, run: SegmentRun) -> None:
        """A run is complete."""
        address = run.segment.address
        newest = self._newest.get(address)
        if newest is not None and self.extents[newest].end == run.start:
            self.extents[newest] = Extent(address, self.extents[newest].start, run.end)
        else:
            self._newest[address] = len(self.extents)
            self.extents.append(Extent(address, run.start, run.end))

    def close(self) -> None:
        """It is closed: nothing comes any more."""
        self._newest = {}

    def freed(self) -> list[Free]:
        """The requests to backups when it is removed."""
        return [Free(backup_id, (self.virtual_segment_id,)) for backup_id in (*self.backups, *self.left)]

    def addresses(self) -> set[SegmentAddress]:
        """The segments that it has something of."""
        return {extent.address for extent in self.extents}


@dataclass(slots=True)
class ReplicationTotals:
    """Totals since the start, over all virtual logs."""

    batches: int = 0
    """That all their backups have."""
    bytes: int = 0
    """In them."""
    batches_sent_again: int = 0
    virtual_segments_opened: int = 0
    virtual_segments_closed: int = 0
    virtual_segments_sealed: int = 0
    """Because a backup failed."""
    virtual_segments_repaired: int = 0
    virtual_segments_retired: int = 0
    bytes_repaired: int = 0
    backups_failed: int = 0
    backups_full: int = 0
