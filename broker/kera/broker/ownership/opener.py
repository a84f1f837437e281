"""Opens a streamlet with the data that is here, and changes the assignment of an open one.

A new owner has the state to continue from if it has always owned the streamlet, if its predecessor has handed the state
over (``kera.broker.ownership.handover``), or if a recovery has found it out from backups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from kera.broker.log.entry import Entry, length_of
from kera.broker.log.intervals import Holding, Interval
from kera.broker.log.streamlet import ProducerLimits, Streamlet
from kera.broker.ownership.handover import HandedOver, handed_over, producers_of, put_handed_over
from kera.broker.ownership.moved_starts import MovedStarts
from kera.broker.ownership.producer_fences import ProducerFences
from kera.broker.ownership.stream import Stream
from kera.broker.records import Gap
from kera.broker.storage.index_format import no_producer
from kera.broker.storage.persistence import PersistenceManager
from kera.broker.storage.restart import Restart, behind
from kera.broker.storage.unsure import delete_unsure
from kera.core.base.done import nothing
from kera.core.base.ids import Position
from kera.v1 import common_pb2


class StreamletOpener:
    """Opens streamlets with the data that this broker holds, and changes the assignment of open ones."""

    def __init__(
        self,
        memory: PersistenceManager,
        restart: Restart,
        fences: ProducerFences,
        moved_starts: MovedStarts,
        producer_limits: ProducerLimits,
    ) -> None:
        """`moved_starts`: gets the entries whose start may have moved without a report to the coordinator."""
        self._memory = memory
        self._restart = restart
        self._fences = fences
        self._moved_starts = moved_starts
        self._producer_limits = producer_limits

    def as_inherited(self, stream_id: int, assignment: common_pb2.StreamletAssignment, held: Holding) -> Holding:
        """Return `held`, or only its older intervals if the state to continue from is not here.

        The state is here if it was handed over, or is taken over from backups. A rebuilt index does not know about the
        handover, and counts as having the state; producers begin new epochs, as for everything else that it forgot.
        """
        last = held.intervals[-1]
        before = handed_over(self._restart.index, stream_id, assignment.streamlet_id)
        if before.first_group_id >= last.first_group_id:
            return held
        if assignment.sources or self._restart.found.repaired:
            change = put_handed_over(stream_id, assignment.streamlet_id, last.first_group_id, last.first_records)
            self._memory.index_writer.note([change], nothing)
            return held
        return Holding(held.intervals[:-1], owned=False, broker_epoch=held.broker_epoch)

    def change(
        self, streamlet: Streamlet, held: Holding, state: common_pb2.StreamletState | None, *, taken_over: bool
    ) -> None:
        """Change the assignment of an open streamlet to `held`, which may be the same as before.

        `state`: the state that was handed over; `taken_over`: the last owner was lost, and the index has its state.
        """
        if state is not None and not streamlet.owned:
            streamlet.learn(producers_of(state))
            # The last owner may have left no interval, because it wrote nothing, but have sent readers to its group.
            streamlet.next_group_id = max(streamlet.next_group_id, state.next_group_id)
        if taken_over and held.owned and not streamlet.owned:
            index, ref = self._restart.index, (streamlet.stream_id, streamlet.streamlet_id)
            origin = index.origin(*ref)
            streamlet.learn(index.producers(*ref))
            streamlet.next_group_id = max(streamlet.next_group_id, origin.next_group_id if origin is not None else 0)
        before, owned_before = streamlet.intervals, streamlet.owned
        streamlet.hold(held)
        if not owned_before and not taken_over:
            streamlet.go_on_from(state)
        if before != held.intervals and not taken_over:  # otherwise the data in between is here, or still comes
            for entry in streamlet.entries.made:
                self._start_behind(entry, removed_between(entry.index, before, held.intervals))

    def _start_behind(self, entry: Entry, start: tuple[Position, int] | None) -> None:
        """Move an entry's start behind records that were removed, here or elsewhere; None: there are none."""
        if start is not None and start[0] > entry.start:
            entry.move_start(*start)
            self._moved_starts.note([entry])
            self._memory.removals.collect(entry)

    def _settle(self, entries: Iterable[Entry]) -> None:
        """End the unsure tails of entries: all their data has its replicas, even if no launch has recorded that."""
        for entry in entries:
            if entry.unsure is not None:
                entry.unsure = None
                self._memory.index_writer.note([delete_unsure(entry.log_id)], nothing)

    def open(
        self,
        stream: Stream,
        info: common_pb2.StreamInfo,
        assignment: common_pb2.StreamletAssignment,
        held: Holding,
        *,
        handed_over_now: common_pb2.StreamletState | None,
        created: bool = False,
    ) -> Streamlet:
        """Open a streamlet, and add it to its stream.

        `handed_over_now`: the state that was handed over just now; no group of the last interval was ever used then.
        `created`: no broker has had the streamlet before.
        """
        fresh = handed_over_now is not None
        last = held.intervals[-1]
        first_group_id = max(assignment.first_group_id if held.owned else 0, last.first_group_id, 1)
        persisted = stream.by_disk and stream.durability == common_pb2.DURABILITY_PERSISTED
        restored = self._restart.restore(
            stream.stream_id,
            assignment.streamlet_id,
            info.config.entries,
            last.end_group_id if last.closed else first_group_id,
            persisted=persisted,
            fresh=fresh,
        )
        before = HandedOver()
        if held.owned:
            before = handed_over(self._restart.index, stream.stream_id, assignment.streamlet_id)
        for index, record in enumerate(before.first_records[: info.config.entries]):
            entry = restored.entries[index]
            entry.go_on_from(record)
        # An order is not fresh if this broker has used later groups since, as after a restore of old metadata.
        fresh = fresh and restored.next_group_id <= before.first_group_id + 1
        before_it = until(held.intervals, before) if fresh else held.intervals
        for entry in restored.entries.made:
            entry.gaps = still_missing(entry, before_it, persisted=persisted)
        streamlet = Streamlet(
            stream.stream_id,
            assignment.streamlet_id,
            entries=restored.entries,
            group_segments=info.config.group_segments,
            next_group_id=before.first_group_id if fresh else max(restored.next_group_id, before.first_group_id),
            producers=restored.producers,
            memory=self._memory,
            held=held,
            first_epochs=self._fences.first_epochs,
            producer_limits=self._producer_limits,
        )
        streamlet.go_on_from(common_pb2.StreamletState() if created else handed_over_now)
        forgotten = streamlet.forget_producers()
        if forgotten:
            ref = (stream.stream_id, assignment.streamlet_id)
            changes = [change for producer_id in forgotten for change in no_producer(*ref, producer_id)]
            self._memory.index_writer.note(changes, nothing)
        for entry in restored.moved:
            self._memory.removals.collect(entry)
        if not assignment.sources:
            self._settle(restored.entries.made)
        for entry in streamlet.entries.made:
            if len(held.intervals) == 1 and not assignment.sources:
                self._start_behind(entry, missing_before(entry))
            if entry.start_record > held.intervals[0].first_record(entry.index):
                self._moved_starts.note([entry])  # it may have moved without a report
        for segment in restored.segments:
            self._memory.adopt(segment)
            if stream.by_disk and stream.durability > common_pb2.DURABILITY_LEADER:
                self._memory.commits.persist([(segment, segment.head)], nothing)
        stream.add(streamlet)
        self._memory.close_elsewhere(restored.segments)
        return streamlet


def removed_between(index: int, before: Sequence[Interval], after: Iterable[Interval]) -> tuple[Position, int] | None:
    """Return the position and record at which an entry continues behind data that another broker has removed.

    Returns None if no such data was removed. When an interval between two of this broker's intervals is empty, these
    become one, which includes its groups. Likewise, this broker's first interval includes the groups before it once it
    leads, and an interval includes empty ones behind it. The entry's data before such a place is removed, too.
    """
    found: list[tuple[Position, int]] = []
    for one in after:
        mine = [each for each in before if one.has(each.first_group_id)]
        if not mine:
            continue
        first, last = mine[0], mine[-1]
        if first.first_group_id == before[0].first_group_id and _has_more_before(one, first):
            found.append((first.start, first.first_record(index)))
        for each, following in pairwise(mine):
            if following.first_record(index) > each.end_record(index):
                found.append((following.start, following.first_record(index)))
        if last.closed and one.closed and one.end_record(index) > last.end_record(index):
            found.append((one.following, one.end_record(index)))
    return max(found, default=None)


def _has_more_before(one: Interval, before: Interval) -> bool:
    """Whether the interval `one` also has the groups right before its former version `before`."""
    return not before.has(before.first_group_id - 1) and one.has(before.first_group_id - 1)


def missing_before(entry: Entry) -> tuple[Position, int] | None:
    """Return the first position and record of a newly opened entry if records before it are missing; otherwise None."""
    first = entry.first()
    if first is None or entry.gaps or first[1].first_record <= entry.start_record:
        return None
    return Position(*first[0], 0), first[1].first_record


def until(intervals: Sequence[Interval], handed_over: HandedOver) -> tuple[Interval, ...]:
    """Return `intervals`, with the last one ending at the handover just now: no data behind that can be missing."""
    *older, last = intervals
    return *older, last._replace(end_group_id=handed_over.first_group_id, end_records=handed_over.first_records)


def still_missing(entry: Entry, intervals: Iterable[Interval], *, persisted: bool = False) -> list[Gap]:
    """Return the parts of an entry's gaps that are in intervals here, and may have had records.

    A start without memory takes everything behind the data on disk for lost. But a closed interval ends at the record
    with which the next one begins: if the data here ends with that record, none of the interval is missing, and the
    rest belongs to another broker. `persisted`: readers see only data on disk, so a reader at the start of an interval
    has missed nothing.
    """
    found: list[Gap] = []
    for gap in entry.gaps:
        for interval in intervals:
            begins = behind(interval.start) if persisted else interval.start
            start = gap.start if interval.leads else max(gap.start, begins)
            end = min(gap.end, interval.following) if interval.closed else gap.end
            whole = interval.closed and _records_before(entry, start, interval) >= interval.end_record(entry.index)
            if start < end and not whole:
                found.append(Gap(start, end))
    return found


def _records_before(entry: Entry, position: Position, interval: Interval) -> int:
    """Return the ordinal behind the data before `position`, if a segment ends there; otherwise the interval's first."""
    here = entry.find((position.group_id, position.segment_id))
    if here is not None and position.offset >= length_of(here):
        return here.first_record + here.record_count
    return interval.first_record(entry.index)
