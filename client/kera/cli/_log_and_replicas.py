"""Compares a broker's log, and what its index says of its replicas, with what backups have on disk.

The index has each virtual segment that was closed, with the backups that then had all of it. What that proves:

* A broker that stops by itself closes them all, and backups write all they have when they stop. So of each that covers
  anything of the log, the backups have a replica, or it is gone.
* After a crash, a replica may be missing that its backup had in memory only; no level below ``persisted`` promises
  more. One whose part of the log was removed may be freed before the index forgets it, and one that was made anew
  elsewhere, too.
* Where other brokers have taken over the log, replicas are freed, and this index is never told.
* What is not in a closed one is in none that the index knows: only its chunks tell whether they are somewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kera.backup.verify import BackupFiles, LogComparison, StoredReplica, by_replica
from kera.broker.log.scan import scan_segment
from kera.broker.ownership.stream_records import stream_record
from kera.broker.records import EntryRecord, SegmentAddress, place_of
from kera.broker.replication.virtual_index import virtual_segments
from kera.broker.replication.virtual_segment import Extent, VirtualSegment
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.segment_files import segment_path
from kera.broker.verify import read_segment
from kera.core.base.ids import EntryId
from kera.core.base.spelling import plural
from kera.server.verifying import Defect


class LogAndReplicas:
    """Compares the log of one broker with its replicas on backups."""

    def __init__(
        self,
        data_dir: Path,
        index: SegmentIndex,
        broker_id: int,
        files: Sequence[BackupFiles],
        others: Sequence[SegmentIndex] = (),
    ) -> None:
        """`index`: a copy of what is intact of the broker's. `files`: of all backups that are given, and checked.

        `others`: the indexes of other brokers.
        """
        self._root = data_dir / "log"
        self._index = index
        self._broker_id = broker_id
        self._files = files
        self._others = others
        self._clean = index.meta().get("clean") is True
        """The broker stopped by itself."""
        self._there = {backup_id for each in files for backup_id in each.backup_ids}
        self._recorded = [each for each in virtual_segments(index) if self._left(each) or not each.extents]
        self._complete = all(self._there.issuperset(each.backups) for each in self._recorded)
        """All backups that the index names are given."""

    def check(self) -> Iterator[Defect]:
        """All that is missing or differs."""
        yield from self._check_records()
        yield from self._check_chunks()

    def _left(self, segment: VirtualSegment) -> list[Extent]:
        """The parts of a virtual segment that retention has not removed: in files, or in the memory of a crash."""
        return [extent for extent in segment.extents if not self._was_removed(extent.address)]

    def _was_removed(self, address: SegmentAddress) -> bool:
        if self._index.segment(address) is not None:
            return False
        start = (self._index.entry(EntryId(*address[:3])) or EntryRecord()).start
        return address[3:] < start[:2]

    def _others_have(self, address: SegmentAddress) -> bool:
        found = (other.segment(address) for other in self._others)
        return any(record is not None and not record.to_come for record in found)

    # -- what the index says -------------------------------------------------------------------------------------------

    def _check_records(self) -> Iterator[Defect]:
        replicas = by_replica(self._files)
        found = {
            each.virtual_segment_id: [
                replica for _, replica in replicas.get((self._broker_id, each.virtual_segment_id), [])
            ]
            for each in self._recorded
        }
        covered: dict[SegmentAddress, list[tuple[int, int]]] = defaultdict(list)
        for each in self._recorded:
            if _good(each, found[each.virtual_segment_id]):
                for extent in each.extents:
                    covered[extent.address].append((extent.start, extent.end))
        for each in self._recorded:
            elsewhere = all(
                _is_covered(extent, covered[extent.address]) or self._others_have(extent.address)
                for extent in self._left(each)
            )
            yield from self._check_record(each, found[each.virtual_segment_id], elsewhere=elsewhere)

    def _check_record(
        self, wanted: VirtualSegment, versions: Sequence[StoredReplica], *, elsewhere: bool
    ) -> Iterator[Defect]:
        """`elsewhere`: whole replicas of others cover all of it, or other brokers have it."""
        good = _good(wanted, versions)
        missing = sorted(set(wanted.backups) & self._there - good)
        if not missing:
            return
        backups = ", ".join(str(backup_id) for backup_id in missing)
        text = f"virtual segment {wanted.virtual_segment_id:#x} should be on backup {backups}, and is not, or differs"
        lost = not good and self._there.issuperset(wanted.backups)
        if lost and elsewhere:
            text += "; other replicas, or other brokers, have all of it"
            lost = False
        elif lost and not self._clean and not any(replica.closed or replica.holes for replica in versions):
            text += "; no backup has it: the broker did not stop by itself, and they may have had it in memory only"
            lost = False
        elif lost:
            text += "; no backup has it, nor has another broker that is given"
        yield Defect("damage" if lost else "warning", self._root / "index" / "data.mdb", None, 0, text)

    # -- what the log has ----------------------------------------------------------------------------------------------

    def _check_chunks(self) -> Iterator[Defect]:
        comparison = LogComparison(self._files, self._broker_id)
        streams = comparison.streams | {each.stream_id for each in self._recorded}
        streams |= {stream_id for stream_id in self._index.stream_ids() if self._is_replicated(stream_id)}
        for address, record in self._index.all_segments():
            if address.stream_id not in streams:
                continue
            path = segment_path(self._root, record.physical_id)
            try:
                view = read_segment(path, None if record.open else record.length)
            except OSError:
                continue  # which was reported
            if record.open:
                scan = scan_segment(view, address=address, durable=record.length)
            else:
                scan = scan_segment(view, address=address, length=record.length)
            damaged = {hole.start for hole in scan.holes}
            alone = at = 0
            for end in scan.chunk_ends:
                if at not in damaged:
                    replicas, findings = comparison.check(view[at:end], path, at)
                    alone += not replicas
                    yield from findings
                at = end
            if alone and self._complete:
                text = f"{plural(alone, 'chunk')} of {place_of(address)}: no replica found"
                if not self._recorded:
                    text += "; the index does not say at which backups they were"
                yield Defect("warning", path, None, 0, text)

    def _is_replicated(self, stream_id: int) -> bool:
        info = stream_record(self._index, stream_id)
        return info is not None and info.config.replication > 0


def _good(wanted: VirtualSegment, versions: Iterable[StoredReplica]) -> set[int]:
    """The backups that have all of a virtual segment, as the index has it."""
    return {
        replica.header.backup_id
        for replica in versions
        if replica.closed and not replica.holes and (replica.length, replica.checksum) == (wanted.head, wanted.checksum)
    }


def _is_covered(extent: Extent, parts: Iterable[tuple[int, int]]) -> bool:
    at = extent.start
    for start, end in sorted(parts):
        if start > at:
            break
        at = max(at, end)
    return at >= extent.end
