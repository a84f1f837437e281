"""How far streamlets are that were taken over: what of them is to come, what has yet to be covered, what is waited for.

to come ──installed()──► here, waits until others are ──cover()──► is covered anew, see ``replication.repair``
        ──look()──► covered: restored, when that is so of all of the streamlet
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kera.broker.records import SegmentAddress, SegmentRecord
from kera.broker.recovery.scan import Launches, Ref
from kera.broker.replication.manager import Replication
from kera.broker.storage.index import SegmentIndex

WAITS_MAX = 20
"""Maximum of reported reasons for which a streamlet waits."""
CHECKED_MAX = 2_000
"""Segments of which a look at the progress finds out whether they are covered."""
UNEXPECTED = "an unexpected error of the broker, see its log"


def of_disk(error: OSError) -> str:
    """The text for an error of the broker's disk."""
    return f"the broker's disk: {error}"


@dataclass(slots=True)
class RebuildProgress:
    """How far a streamlet is."""

    sources: frozenset[Launches]
    records_lost: int = 0
    begun: bool = False
    """It is known what is to come."""
    bytes_total: int = 0
    bytes_to_come: int = 0
    to_come: set[SegmentAddress] = field(default_factory=set)
    uncovered: dict[SegmentAddress, int] = field(default_factory=dict)
    """Not covered by virtual segments of this broker, with their lengths."""
    bytes_uncovered: int = 0
    cannot_begin: str = ""
    """Why nobody can say where its chunks are, if so."""
    waits_for: list[str] = field(default_factory=list)

    @property
    def readable(self) -> bool:
        """All of it is here."""
        return self.begun and not self.to_come

    @property
    def restored(self) -> bool:
        """All of it is here, and has its replicas."""
        return self.readable and not self.uncovered


@dataclass(slots=True)
class RecoveryTotals:
    """Totals since the start."""

    bytes_recovered: int = 0
    bytes_restored: int = 0
    segments_recovered: int = 0
    segments_to_come: int = 0
    """As of now."""
    chunks_lost: int = 0
    replicas_failed: int = 0


class ProgressBook:
    """Counts, for each streamlet under recovery, the bytes that are missing, installed and covered by new replicas."""

    def __init__(
        self, index: SegmentIndex, replication: Replication, *, exists: Callable[[SegmentAddress], bool]
    ) -> None:
        """`exists`: whether a segment is in the log, and was not removed."""
        self.totals = RecoveryTotals()
        self.streamlets: dict[Ref, RebuildProgress] = {}
        self._index = index
        self._replication = replication
        self._exists = exists
        self._uncovered: list[tuple[SegmentAddress, int]] = []
        """Segments that have come, with their lengths, and wait to be covered until others have."""

    def begin(self, ref: Ref, sources: frozenset[Launches], records_lost: int) -> RebuildProgress:
        """A streamlet was opened that was taken over."""
        progress = self.streamlets[ref] = RebuildProgress(sources, records_lost)
        return progress

    def measure(
        self, progress: RebuildProgress, found: Iterable[tuple[SegmentAddress, SegmentRecord]]
    ) -> dict[SegmentAddress, SegmentRecord]:
        """See how far a streamlet is whose segments are these; returns those that are to come."""
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
        """The streamlet is restored, or gone."""
        self.streamlets.pop(ref, None)
        self._count()

    def forget(self, address: SegmentAddress, length: int) -> None:
        """A segment has come, or is gone."""
        progress = self.streamlets.get(address[:2])
        if progress is not None and address in progress.to_come:
            progress.to_come.discard(address)
            progress.bytes_to_come -= length
        self._count()

    def _count(self) -> None:
        self.totals.segments_to_come = sum(len(progress.to_come) for progress in self.streamlets.values())

    def installed(self, address: SegmentAddress, length: int, *, waited_for: bool) -> None:
        """A segment has come; `waited_for`: by those who are not told of what is in it until it has its replicas."""
        self.totals.segments_recovered += 1
        self.totals.bytes_recovered += length
        if waited_for:
            self._replication.backlog.add(address, length, first=True)
        else:
            self._uncovered.append((address, length))

    def cover(self) -> None:
        """Have covered what has come."""
        covered, self._uncovered = self._uncovered, []
        for address, length in covered:
            self._replication.backlog.add(address, length)

    def note_waits(self, waits: Mapping[Ref, list[str]], of_all: str) -> None:
        """Note the reasons for which streamlets wait, and (`of_all`) that of all whose data are not here."""
        for ref, progress in self.streamlets.items():
            general = [progress.cannot_begin, of_all] if progress.to_come else []
            progress.waits_for = [*filter(None, general), *waits.get(ref, [])][:WAITS_MAX]

    def look(self) -> None:
        """See what is covered by now; bounded."""
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
                self._replication.logs.close_open(ref[0])  # what was in memory already is covered by what is still open
            if left <= 0:
                return

    @property
    def _rests(self) -> bool:
        """Nothing is left to be covered by virtual segments."""
        return self._replication.backlog.covered and not self._uncovered

    def _all_but_holes(self, address: SegmentAddress) -> bool:
        """Whether what is not covered of a segment never can be: it is damaged."""
        if not self._rests or not self._replication.coverage.has_all_replicas(address):
            return False
        record = self._index.segment(address)
        return record is not None and not record.to_come and not record.crc32c
