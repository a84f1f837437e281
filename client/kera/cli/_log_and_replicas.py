"""Compares a broker's log, and the replicas in its index, with the data that backups have on disk.

The index lists each closed virtual segment, with the backups that had all of it when it was closed. From that follows:

* A broker that stops in an orderly way closes all virtual segments, and backups write all their data when they stop.
  So for each virtual segment that covers a part of the log, the backups have a replica, or the replica is lost.
* After a crash, a replica may be missing that its backup had in memory only; no level below ``persisted`` promises
  more. A backup may also free a replica before the index forgets it: one whose part of the log was removed, or one that
  was made again on another backup.
* When other brokers have taken over the log, backups free its replicas, but this index still lists them.
* The index does not list virtual segments that are still open: only a comparison of chunks finds their replicas.
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
        """`index`: a copy of the intact part of the broker's index. `files`: the checked files of all given backups.

        `others`: the indexes of the other given brokers.
        """
        self._root = data_dir / "log"
        self._index = index
        self._broker_id = broker_id
        self._files = files
        self._others = others
        self._clean = index.meta().get("clean") is True
        """Whether the broker stopped in an orderly way."""
        self._there = {backup_id for each in files for backup_id in each.backup_ids}
        self._recorded = [each for each in virtual_segments(index) if self._left(each) or not each.extents]
        self._complete = all(self._there.issuperset(each.backups) for each in self._recorded)
        """Whether the files include those of all backups that the index names."""

    def check(self) -> Iterator[Defect]:
        """Yield everything that is missing or differs."""
        yield from self._check_records()
        yield from self._check_chunks()

    def _left(self, segment: VirtualSegment) -> list[Extent]:
        """Return the extents that retention has not removed: they are in files, or were in memory before a crash."""
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
        """`elsewhere`: whether whole replicas of other virtual segments cover all of it, or other brokers have it."""
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
                continue  # the check of the broker's directory has reported it
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
    """Return the backups whose replica has the length and checksum of the virtual segment in the index."""
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
