"""The progress of streamlets that were taken over: the data that still has to come, to be covered, and the reasons.

to come ──installed()──► here, waits until others are ──cover()──► is covered anew, see ``replication.repair``
        ──look()──► covered: the streamlet is restored when all of it is
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kera.broker.records import SegmentAddress, SegmentRecord
from kera.broker.recovery.scan import Launches, Ref
from kera.broker.replication.manager import Replication
from kera.broker.storage.index import SegmentIndex

WAITS_MAX = 20
"""Maximum number of reported reasons for which a streamlet waits."""
CHECKED_MAX = 2_000
"""Maximum number of segments that one `look` checks for coverage."""
UNEXPECTED = "an unexpected error of the broker, see its log"


def of_disk(error: OSError) -> str:
    """Return the text for an error of the broker's disk."""
    return f"the broker's disk: {error}"


@dataclass(slots=True)
class RebuildProgress:
    """The progress of a streamlet's recovery."""

    sources: frozenset[Launches]
    records_lost: int = 0
    begun: bool = False
    """Whether the data that has to come is known."""
    bytes_total: int = 0
    bytes_to_come: int = 0
    to_come: set[SegmentAddress] = field(default_factory=set)
    uncovered: dict[SegmentAddress, int] = field(default_factory=dict)
    """Segments that virtual segments of this broker do not cover, with their lengths."""
    bytes_uncovered: int = 0
    cannot_begin: str = ""
    """Why the places of its chunks are unknown; empty: they are known."""
    waits_for: list[str] = field(default_factory=list)

    @property
    def readable(self) -> bool:
        """Whether all of it is here."""
        return self.begun and not self.to_come

    @property
    def restored(self) -> bool:
        """Whether all of it is here, and has its replicas."""
        return self.readable and not self.uncovered


@dataclass(slots=True)
class RecoveryTotals:
    """Totals since the start."""

    bytes_recovered: int = 0
    bytes_restored: int = 0
    segments_recovered: int = 0
    segments_to_come: int = 0
    """The present number of segments that still have to come."""
    chunks_lost: int = 0
    replicas_failed: int = 0


class ProgressBook:
    """Counts, for each streamlet under recovery, the bytes that are missing, installed and covered by new replicas."""

    def __init__(
        self, index: SegmentIndex, replication: Replication, *, exists: Callable[[SegmentAddress], bool]
    ) -> None:
        """`exists`: whether the log still has a segment."""
        self.totals = RecoveryTotals()
        self.streamlets: dict[Ref, RebuildProgress] = {}
        self._index = index
        self._replication = replication
        self._exists = exists
        self._uncovered: list[tuple[SegmentAddress, int]] = []
        """Segments that have come, with their lengths, and that `cover` will cover."""

    def begin(self, ref: Ref, sources: frozenset[Launches], records_lost: int) -> RebuildProgress:
        """Begin to track a taken over streamlet that was opened."""
        progress = self.streamlets[ref] = RebuildProgress(sources, records_lost)
        return progress

    def measure(
        self, progress: RebuildProgress, found: Iterable[tuple[SegmentAddress, SegmentRecord]]
    ) -> dict[SegmentAddress, SegmentRecord]:
        """Measure the progress of a streamlet with these segments; return the segments that have to come."""
        records = {}
        for address, record in found:
            if record.open or not self._exists(address):
                continue
            progress.bytes_total += record.length
            if record.to_come:
                records[address] = record
                progress.bytes_to_come += record.length
            if not self._replication.coverage.covers(address, record.length):
                progress.uncovered[address] = record.length
                progress.bytes_uncovered += record.length
        progress.to_come.update(records)
        progress.begun = True
        self._count()
        return records

    def end(self, ref: Ref) -> None:
        """Forget a streamlet that is restored, or was dropped."""
        self.streamlets.pop(ref, None)
        self._count()

    def forget(self, address: SegmentAddress, length: int) -> None:
        """Note that a segment has come, or was removed."""
        progress = self.streamlets.get(address[:2])
        if progress is not None and address in progress.to_come:
            progress.to_come.discard(address)
            progress.bytes_to_come -= length
        self._count()

    def _count(self) -> None:
        self.totals.segments_to_come = sum(len(progress.to_come) for progress in self.streamlets.values())

    def installed(self, address: SegmentAddress, length: int, *, waited_for: bool) -> None:
        """Count a segment that has come; `waited_for`: readers wait for its replicas, so it is covered first."""
        self.totals.segments_recovered += 1
        self.totals.bytes_recovered += length
        if waited_for:
            self._replication.backlog.add(address, length, first=True)
        else:
            self._uncovered.append((address, length))

    def cover(self) -> None:
        """Queue the segments that have come for replication."""
        covered, self._uncovered = self._uncovered, []
        for address, length in covered:
            self._replication.backlog.add(address, length)

    def note_waits(self, waits: Mapping[Ref, list[str]], of_all: str) -> None:
        """Set the reasons for which streamlets wait; `of_all`: a reason of all streamlets with data to come."""
        for ref, progress in self.streamlets.items():
            general = [progress.cannot_begin, of_all] if progress.to_come else []
            progress.waits_for = [*filter(None, general), *waits.get(ref, [])][:WAITS_MAX]

    def look(self) -> None:
        """Check which segments are covered by now, at most `CHECKED_MAX`."""
        left = CHECKED_MAX
        coverage = self._replication.coverage
        for ref, progress in self.streamlets.items():
            for address in list(progress.uncovered)[:left]:
                left -= 1
                length = progress.uncovered[address]
                if address in progress.to_come:
                    progress.uncovered[address] = progress.uncovered.pop(address)  # its turn comes again
                elif not self._exists(address) or coverage.covers(address, length) or self._all_but_holes(address):
                    del progress.uncovered[address]
                    progress.bytes_uncovered -= length
                    self.totals.bytes_restored += length
            if progress.readable and progress.uncovered and self._rests:
                self._replication.logs.close_open(ref[0])  # open ones may cover data that was in memory
            if left <= 0:
                return

    @property
    def _rests(self) -> bool:
        """Whether no data is left that virtual segments have to cover."""
        return self._replication.backlog.covered and not self._uncovered

    def _all_but_holes(self, address: SegmentAddress) -> bool:
        """Whether the uncovered rest of a segment is damaged, so it can never be covered."""
        if not self._rests or not self._replication.coverage.has_all_replicas(address):
            return False
        record = self._index.segment(address)
        return record is not None and not record.to_come and not record.crc32c
