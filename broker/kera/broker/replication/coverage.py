"""The closed virtual segments, the parts of the log that they cover, and which have too few replicas. Pure.

The index records a closed virtual segment: from then on, a restart knows that the data it covers is on backups. A
virtual segment is *retired*, and its replicas freed, when the log has none of its data any more. It is *deficient*
while it has fewer than R replicas. Then new virtual segments cover the data that is left of it, and it is retired when
the index has those.

Until then all its replicas are kept, even bad ones: one may be the last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
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
    """The closed virtual segments, and the parts of the log that they cover; frees replicas that are not needed."""

    def __init__(
        self,
        note: Note,
        totals: ReplicationTotals,
        effects: Callable[[Effect], None],
        exists: Callable[[SegmentAddress], bool],
    ) -> None:
        """`effects`: takes requests to backups; `exists`: whether the log has any data of a segment."""
        self.spare_before = 0
        """Replicas of virtual segments before this id are not freed, because other brokers may recover from them."""
        self.draining: set[int] = set()
        """Backups whose replicas no longer count: they are copied elsewhere, and then freed."""
        self._adopted: set[int] = set()
        """The open streams. The virtual segments of all other streams stay untouched."""
        self.segments: dict[int, VirtualSegment] = {}
        """All closed virtual segments, by id."""
        self._of_stream: dict[int, dict[int, VirtualSegment]] = defaultdict(dict)
        """The closed virtual segments by stream and id."""
        self.deficient: dict[VirtualSegment, None] = {}
        """The virtual segments with fewer than R replicas."""
        self.replacing: list[tuple[VirtualSegment, set[VirtualSegment]]] = []
        """Virtual segments whose data was covered again, each with the virtual segments that cover it now; when the
        index has those, the old one is retired."""
        self._note = note
        self._totals = totals
        self._effect = effects
        self._exists = exists
        self._covering: dict[SegmentAddress, list[VirtualSegment]] = defaultdict(list)
        self._unwritten: dict[VirtualSegment, None] = {}
        """Closed virtual segments that the index does not have, because writing them to disk failed."""

    # -- closing and retiring --------------------------------------------------------------------------------------

    def begin(self, segments: Iterable[VirtualSegment], *, spare_before: int) -> None:
        """Take the virtual segments of the index. They count once their stream is opened (`adopt`)."""
        self.spare_before = spare_before
        for segment in segments:
            segment.written = True
            self._add(segment)

    def _add(self, segment: VirtualSegment) -> None:
        self.segments[segment.virtual_segment_id] = segment
        self._of_stream[segment.stream_id][segment.virtual_segment_id] = segment

    def keep_streams(self, stream_ids: set[int]) -> None:
        """Retire the virtual segments of all streams but these, which may be opened later."""
        for segment in [each for each in self.segments.values() if each.stream_id not in stream_ids]:
            self._retire(segment, seen=False)

    def knows(self, stream_id: int) -> bool:
        """Whether any virtual segment of a stream is known."""
        return bool(self._of_stream.get(stream_id))

    def adopt(self, stream_id: int) -> None:
        """Count the virtual segments of a stream from now on, as far as their data is still in the log."""
        self._adopted.add(stream_id)
        for segment in list(self._of_stream[stream_id].values()):
            self._begin_covering(segment)

    def closed(self, segment: VirtualSegment) -> None:
        """Add a virtual segment that has closed, and write it to the index."""
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
        """Write the virtual segments to the index that could not be written before."""
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
        """Note that the log has no data of a segment any more."""
        for segment in self._covering.pop(address, ()):
            segment.live -= 1
            if not segment.live:
                self._retire(segment)

    def drop_stream(self, stream_id: int) -> None:
        """Forget a dropped stream, whose records in the index are removed elsewhere."""
        for segment in list(self._of_stream[stream_id].values()):
            self._forget(segment)
        self._of_stream.pop(stream_id, None)
        self._adopted.discard(stream_id)

    def _retire(self, segment: VirtualSegment, *, seen: bool = True) -> None:
        """Retire a virtual segment; not `seen`: this launch never had its data, and others may recover from it."""
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

    # -- covered parts ---------------------------------------------------------------------------------------------

    def uncovered(self, address: SegmentAddress, length: int) -> list[Extent]:
        """Return the parts of the first `length` bytes of a segment that no closed virtual segment covers."""
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
        """Return the closed virtual segments that have data of a segment."""
        return self._covering.get(address, ())

    def has_all_replicas(self, address: SegmentAddress) -> bool:
        """Whether all virtual segments with data of a segment have all their replicas, and are in the index."""
        return all(each.written and each not in self.deficient for each in self._covering.get(address, ()))

    def covers(self, address: SegmentAddress, length: int) -> bool:
        """Whether the first `length` bytes of a segment have all their replicas, recorded in the index."""
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
        """Set the backups that are drained: their replicas are copied elsewhere."""
        for backup_id in backup_ids - self.draining:
            for segment in self.segments.values():
                self._without(segment, backup_id)
        self.draining = set(backup_ids)

    def without(self, backup_id: int, *, has: Callable[[int], bool] = lambda _: False) -> None:
        """Note that a backup has no replicas any more, except of virtual segments that it `has`."""
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
        """Note that a backup reports a replica of a closed virtual segment. Return whether it counts."""
        if _is_whole(replica, segment):
            counts = self.heal(segment, backup_id)
            if counts and not replica.closed:
                self._effect(Close(None, segment, backup_id))
            return counts
        self._without(segment, backup_id)
        if len(segment.backups) == segment.wanted:
            self._effect(Free(backup_id, (segment.virtual_segment_id,)))
        elif replica.length > segment.head and not replica.closed:
            self._effect(Close(None, segment, backup_id))  # it was disconnected when the virtual segment closed
        elif backup_id not in segment.left:
            segment.left.append(backup_id)  # better than nothing, until there is a good one
        return False

    def heal(self, segment: VirtualSegment, backup_id: int) -> bool:
        """Count a whole replica of a backup. False if it does not count; it is freed if there are enough others."""
        if backup_id in segment.backups:
            return True
        if backup_id in self.draining and segment in self.deficient:
            if backup_id not in segment.left:
                segment.left.append(backup_id)  # kept until it is copied elsewhere
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

    def next_deficient(
        self,
        usable: int,
        priority_of: Callable[[int], int] = lambda _: 0,
        besides: Container[object] = (),
    ) -> VirtualSegment | None:
        """Return the virtual segment to repair next, if `usable` backups are enough for it; None if there is none.

        It is none of `besides`.

        Virtual segments without any replica come first, then those of streams with a higher priority, then those with
        the fewest replicas, then the oldest.
        """
        replacing = {old for old, _ in self.replacing}
        waiting = [
            each for each in self.deficient if each not in replacing and each not in besides and each.wanted <= usable
        ]
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
        """Note that `new` covers the remaining data of `old`, which is retired when the index has all of `new`."""
        self.replacing.append((old, new))
        self._retire_replaced()

    def _retire_replaced(self) -> None:
        """Retire virtual segments that are replaced; a failed replacement is dropped, so its repair is repeated."""
        done: list[VirtualSegment] = []
        still: list[tuple[VirtualSegment, set[VirtualSegment]]] = []
        for old, new in self.replacing:
            if old.virtual_segment_id not in self.segments:
                continue
            if any(each in self.deficient for each in new):
                continue  # the replacement is deficient, too
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
