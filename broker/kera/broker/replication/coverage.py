"""Which virtual segments are closed, what of the log they cover, and which have too few replicas. Pure.

A closed virtual segment is written down in the index: from then on a restart knows that what it covers is on backups.
It is *retired*, and its replicas freed, when nothing of what it covers is left in the log. It is *deficient* while it
has fewer than R replicas; then what is left of it is covered by new ones, and when those are written down, it is
retired.

Until then each replica of it is kept, whatever is wrong with it: it may be the last one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kera.broker.records import Change, SegmentAddress
from kera.broker.replication.virtual_index import delete_virtual_segment, put_virtual_segment
from kera.broker.replication.virtual_log import Close, Effect
from kera.broker.replication.virtual_segment import Extent, Free, ReplicationTotals, VirtualSegment
from kera.core.base.done import Done, nothing
from kera.core.errors import KeraError
from kera.v1 import backup_pb2


class Note(Protocol):
    """Writes to the index: see `IndexWriter.note`."""

    def __call__(self, changes: list[Change], done: Done) -> None:
        """Write `changes`, then call `done`."""
        ...


class Coverage:
    """The closed virtual segments and the parts of the log that they cover. Replicas stay while a part needs them."""

    def __init__(
        self,
        note: Note,
        totals: ReplicationTotals,
        effects: Callable[[Effect], None],
        exists: Callable[[SegmentAddress], bool],
    ) -> None:
        """`effects`: takes what has to be done at backups; `exists`: whether anything of a segment is in the log."""
        self.spare_before = 0
        """Virtual segments before this one may be what others recover from: they are not freed."""
        self.draining: set[int] = set()
        """Backups whose replicas count no more: they are made anew elsewhere, and freed then."""
        self._adopted: set[int] = set()
        """Streams that are open: of others it is not known what is left of them, so nothing is done about them."""
        self.segments: dict[int, VirtualSegment] = {}
        """All that are closed, by id."""
        self._of_stream: dict[int, dict[int, VirtualSegment]] = defaultdict(dict)
        """The same, by stream."""
        self.deficient: dict[VirtualSegment, None] = {}
        """With fewer than R replicas."""
        self.replacing: list[tuple[VirtualSegment, set[VirtualSegment]]] = []
        """Virtual segments whose data were covered again → those that cover them; when these are written down, the old
        one is retired."""
        self._note = note
        self._totals = totals
        self._effect = effects
        self._exists = exists
        self._covering: dict[SegmentAddress, list[VirtualSegment]] = defaultdict(list)
        self._unwritten: dict[VirtualSegment, None] = {}
        """Closed, and to be written down again: the disk did not take it."""

    # -- what comes and goes ---------------------------------------------------------------------------------------

    def begin(self, segments: Iterable[VirtualSegment], *, spare_before: int) -> None:
        """Take the virtual segments of the index. They count when their stream is opened (`adopt`)."""
        self.spare_before = spare_before
        for segment in segments:
            segment.written = True
            self._add(segment)

    def _add(self, segment: VirtualSegment) -> None:
        self.segments[segment.virtual_segment_id] = segment
        self._of_stream[segment.stream_id][segment.virtual_segment_id] = segment

    def keep_streams(self, stream_ids: set[int]) -> None:
        """Retire what the index has of other streams than these; of streams that are never opened it stays as it is."""
        for segment in [each for each in self.segments.values() if each.stream_id not in stream_ids]:
            self._retire(segment, seen=False)

    def knows(self, stream_id: int) -> bool:
        """Whether any virtual segment of a stream is known."""
        return bool(self._of_stream.get(stream_id))

    def adopt(self, stream_id: int) -> None:
        """Count the virtual segments of a stream from now on, as far as their data are still in the log."""
        self._adopted.add(stream_id)
        for segment in list(self._of_stream[stream_id].values()):
            self._begin_covering(segment)

    def closed(self, segment: VirtualSegment) -> None:
        """A virtual segment has closed: write it down."""
        self._totals.virtual_segments_closed += 1
        self._add(segment)
        self._write_down(segment)
        self._begin_covering(segment)

    def _write_down(self, segment: VirtualSegment) -> None:
        def written(error: KeraError | None) -> None:
            if segment.virtual_segment_id not in self.segments:
                return
            if error is not None:
                self._unwritten[segment] = None
                return
            segment.written = True
            self._retire_replaced()

        self._note([put_virtual_segment(segment)], written)

    def write_again(self) -> None:
        """Write down what the disk did not take before."""
        unwritten, self._unwritten = self._unwritten, {}
        for segment in unwritten:
            self._write_down(segment)

    def _begin_covering(self, segment: VirtualSegment) -> None:
        segment.live = 0
        for address in segment.addresses():
            if self._exists(address):
                self._covering[address].append(segment)
                segment.live += 1
        if not segment.live:
            self._retire(segment, seen=False)
        elif len(segment.backups) < segment.wanted:
            self.deficient[segment] = None
        for backup_id in self.draining:
            self._without(segment, backup_id)

    def gone(self, address: SegmentAddress) -> None:
        """Nothing of a segment is left in the log."""
        for segment in self._covering.pop(address, ()):
            segment.live -= 1
            if not segment.live:
                self._retire(segment)

    def drop_stream(self, stream_id: int) -> None:
        """The stream is gone, and its records in the index with it."""
        for segment in list(self._of_stream[stream_id].values()):
            self._forget(segment)
        self._of_stream.pop(stream_id, None)
        self._adopted.discard(stream_id)

    def _retire(self, segment: VirtualSegment, *, seen: bool = True) -> None:
        """Not `seen`: nothing of it was ever here in this launch, and somebody may be recovering from it."""
        self._totals.virtual_segments_retired += 1
        self._note([delete_virtual_segment(segment)], nothing)
        self._forget(segment, free=seen or segment.virtual_segment_id >= self.spare_before)

    def _forget(self, segment: VirtualSegment, *, free: bool = True) -> None:
        del self.segments[segment.virtual_segment_id]
        del self._of_stream[segment.stream_id][segment.virtual_segment_id]
        self.deficient.pop(segment, None)
        self._unwritten.pop(segment, None)
        for _, new in self.replacing:
            new.discard(segment)
        for address in segment.addresses():
            covering = self._covering.get(address)
            if covering is not None and segment in covering:
                covering.remove(segment)
                if not covering:
                    del self._covering[address]
        for effect in segment.freed() if free else ():
            self._effect(effect)
        self._retire_replaced()

    # -- what is covered -------------------------------------------------------------------------------------------

    def uncovered(self, address: SegmentAddress, length: int) -> list[Extent]:
        """The parts of the first `length` bytes of a segment that no closed virtual segment covers."""
        covering = self._covering.get(address, ())
        covered = sorted(extent[1:] for each in covering for extent in each.extents if extent.address == address)
        found: list[Extent] = []
        at = 0
        for start, end in covered:
            if start > at:
                found.append(Extent(address, at, start))
            at = max(at, end)
        if at < length:
            found.append(Extent(address, at, length))
        return found

    def covering(self, address: SegmentAddress) -> Sequence[VirtualSegment]:
        """The closed virtual segments that have something of a segment."""
        return self._covering.get(address, ())

    def has_all_replicas(self, address: SegmentAddress) -> bool:
        """Whether all that covers something of a segment has all its replicas, and a restart knows."""
        return all(each.written and each not in self.deficient for each in self._covering.get(address, ()))

    def covers(self, address: SegmentAddress, length: int) -> bool:
        """Whether the first `length` bytes of a segment have all their replicas, and a restart knows."""
        covering = [each for each in self._covering.get(address, ()) if each.written and each not in self.deficient]
        covered = sorted(extent[1:] for each in covering for extent in each.extents if extent.address == address)
        at = 0
        for start, end in covered:
            if start > at:
                return False
            at = max(at, end)
        return at >= length

    # -- replicas --------------------------------------------------------------------------------------------------

    def drain(self, backup_ids: set[int]) -> None:
        """Have what is on these backups, and on no others, made anew elsewhere."""
        for backup_id in backup_ids - self.draining:
            for segment in self.segments.values():
                self._without(segment, backup_id)
        self.draining = set(backup_ids)

    def without(self, backup_id: int, *, has: Callable[[int], bool] = lambda _: False) -> None:
        """A backup has no replica (any more) of the virtual segments that it should have; except those it `has`."""
        for segment in self.segments.values():
            if not has(segment.virtual_segment_id):
                self._without(segment, backup_id)

    def _without(self, segment: VirtualSegment, backup_id: int) -> None:
        if backup_id in segment.backups:
            segment.backups.remove(backup_id)
            segment.left.append(backup_id)
            if segment.stream_id in self._adopted:
                self.deficient[segment] = None

    def has(self, backup_id: int, segment: VirtualSegment, replica: backup_pb2.ReplicaInfo) -> bool:
        """A backup tells of a replica of a closed virtual segment. Returns whether it counts now."""
        if _is_whole(replica, segment):
            counts = self.heal(segment, backup_id)
            if counts and not replica.closed:
                self._effect(Close(None, segment, backup_id))
            return counts
        self._without(segment, backup_id)
        if len(segment.backups) == segment.wanted:
            self._effect(Free(backup_id, (segment.virtual_segment_id,)))
        elif replica.length > segment.head and not replica.closed:
            self._effect(Close(None, segment, backup_id))  # it was cut off, and missed the end
        elif backup_id not in segment.left:
            segment.left.append(backup_id)  # better than nothing, until there is something better
        return False

    def heal(self, segment: VirtualSegment, backup_id: int) -> bool:
        """A backup has a whole replica; False, and it goes, if there are enough."""
        if backup_id in segment.backups:
            return True
        if backup_id in self.draining and segment in self.deficient:
            if backup_id not in segment.left:
                segment.left.append(backup_id)  # kept until it is made anew elsewhere
            return False
        if segment.virtual_segment_id not in self.segments or len(segment.backups) == segment.wanted:
            self._effect(Free(backup_id, (segment.virtual_segment_id,)))
            return False
        if backup_id in segment.left:
            segment.left.remove(backup_id)
        segment.backups.append(backup_id)
        if len(segment.backups) == segment.wanted:
            self.deficient.pop(segment, None)
            self._retire_replaced()
        return True

    # -- repair ----------------------------------------------------------------------------------------------------

    def next_deficient(self, usable: int, priority_of: Callable[[int], int] = lambda _: 0) -> VirtualSegment | None:
        """The virtual segment to repair next, if `usable` backups are enough: with the fewest replicas, then the
        oldest.

        Those of streams of which there is no replica left come first, and then those with a higher priority.
        """
        replacing = {old for old, _ in self.replacing}
        waiting = [each for each in self.deficient if each not in replacing and each.wanted <= usable]
        return min(
            waiting,
            key=lambda each: (
                bool(each.backups),
                -priority_of(each.stream_id),
                len(each.backups),
                each.virtual_segment_id,
            ),
            default=None,
        )

    def replaced(self, old: VirtualSegment, new: set[VirtualSegment]) -> None:
        """Note that the rest of `old` is covered by `new`, too: it is retired when those are written down."""
        self.replacing.append((old, new))
        self._retire_replaced()

    def _retire_replaced(self) -> None:
        """Retire what is replaced for good; what cannot be replaced so has its turn again."""
        done: list[VirtualSegment] = []
        still: list[tuple[VirtualSegment, set[VirtualSegment]]] = []
        for old, new in self.replacing:
            if old.virtual_segment_id not in self.segments:
                continue
            if any(each in self.deficient for each in new):
                continue  # what was to replace it is no better
            if all(each.written for each in new):
                done.append(old)
            else:
                still.append((old, new))
        self.replacing = still
        for old in done:
            self._totals.virtual_segments_repaired += 1
            self._retire(old)


def _is_whole(replica: backup_pb2.ReplicaInfo, segment: VirtualSegment) -> bool:
    same = replica.length == segment.head and replica.checksum == segment.checksum
    return same and not replica.chunks_damaged
