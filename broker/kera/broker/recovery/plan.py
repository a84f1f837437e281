"""Plans a recovered streamlet from the data on backups and the data that is here: segments, ends, producers. Pure.

    headers of chunks ──StreamletMerge──► chunks that count, by segment ──plan()──► StreamletPlan
    what the index has ──────────────────────────────────────────────────┘

Chunks keep their places: they name their group and segment, and their position in the segment follows from the chunks
before them. If chunks are missing, the following chunks of the segment are placed behind a hole, at the first position
where they may have been; readers see holes as any damage. Missing chunks between segments are a `Gap`.

Missing chunks count as lost if they may have been acknowledged: between other chunks, or before the end of an interval.
Chunks missing before all others are lost only if the stream keeps all data: otherwise the entry's start has moved since
it was last reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from kera.broker.log.digests import digests_of, join
from kera.broker.log.intervals import Interval
from kera.broker.records import (
    TO_COME,
    Digests,
    EntryRecord,
    Gap,
    ProducerRecord,
    SegmentAddress,
    SegmentRecord,
    UnsureTail,
)
from kera.broker.recovery.layout import lay_out, positions_of
from kera.broker.recovery.merge import Merge, MergedRun, Origin
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.format.header_table import (
    Headers,
    chunk_bytes,
    column,
    differs_from_before,
    end_records,
)
from kera.core.format.punctuation import FLAG as PUNCTUATION
from kera.core.format.punctuation import NO_TIME


@dataclass(frozen=True, slots=True)
class EntryStart:
    """The last known start of an entry."""

    position: Position
    first_record: int


@dataclass(frozen=True, slots=True)
class Known:
    """The facts about a streamlet before its chunks are known."""

    stream_id: int
    streamlet_id: int
    entries: int
    intervals: tuple[Interval, ...]
    """The intervals that this broker will have."""
    starts: Mapping[int, EntryStart] = field(default_factory=dict)
    """The starts of entries, by entry."""
    next_records: tuple[int, ...] = ()
    """The least end ordinals, by entry: each entry ends there or later."""
    next_group_id: int = 1
    producers: Mapping[int, ProducerRecord] = field(default_factory=dict)
    digests: Mapping[int, Digests] = field(default_factory=dict)
    """Digests of the producers' last chunks."""
    keeps_all: bool = True
    """Whether no data is ever removed from the stream."""
    may_lose: bool = False
    """Whether readers may have seen data that no backup ever had, because the stream's level does not wait for it."""
    replication: int = 0
    """Number of backups that have acknowledged data; 0: the number does not matter here."""
    lost_groups: int = 0
    """With `may_lose`: the maximum number of groups that may have been used and are unknown."""

    def entry(self, index: int) -> EntryId:
        """Return the id of an entry."""
        return EntryId(self.stream_id, self.streamlet_id, index)


@dataclass(slots=True)
class SegmentPlan:
    """A segment that backups have."""

    address: SegmentAddress
    chunks: Headers
    record: SegmentRecord
    """The record of the future segment."""
    records_lost: int
    """Number of records lost in holes, except before the first chunk."""

    @property
    def key(self) -> tuple[int, int]:
        """The group and segment id."""
        return self.address.group_id, self.address.segment_id


@dataclass(slots=True)
class EntryPlan:
    """The plan of an entry, including the data that the index has of it."""

    record: EntryRecord
    new: dict[SegmentAddress, SegmentRecord] = field(default_factory=dict)
    """Segments that the index does not have, or has less data of."""
    replaced: list[int] = field(default_factory=list)
    """Files of segments that backups have more data of, or that are before the entry's start."""
    gone: list[SegmentAddress] = field(default_factory=list)
    """Segments in the index that are before the start of the entry."""
    gaps: tuple[Gap, ...] = ()
    """The new gaps."""
    unsure: UnsureTail | None = None


@dataclass(slots=True)
class StreamletPlan:
    """The plan of a streamlet."""

    entries: list[EntryPlan]
    producers: dict[int, ProducerRecord]
    next_group_id: int
    records_lost: int
    bytes_new: int
    chunks_cut: int
    digests: dict[int, Digests]
    """Digests of producers' chunks, besides those in the index."""


class StreamletMerge:
    """Merges the chunks that backups have of a streamlet; they come in any order, each perhaps more than once."""

    def __init__(
        self,
        known: Known,
        present: Mapping[int, Sequence[tuple[SegmentAddress, SegmentRecord]]],
        entries: Sequence[EntryRecord | None] = (),
    ) -> None:
        """`present`: the segments in the index, by entry, in order; `entries`: the index's records of the entries."""
        self.known = known
        self.present = present
        self._known_starts = dict(known.starts)
        self._told_starts = dict(known.starts)
        for index, old in enumerate(entries):
            # An entry's start here is newer than the start that was reported.
            if old is not None and any(interval.has(old.start.group_id) for interval in known.intervals):
                start = self._known_starts.get(index)
                if old.start != EARLIEST and (start is None or old.start > start.position):
                    self._known_starts[index] = EntryStart(old.start, old.start_record)
        self.groups_max = 0
        self._firsts = [interval.first_group_id for interval in known.intervals]
        self._merges = [Merge(self._starts(interval), self._ends(interval)) for interval in known.intervals]

    def remove(self, starts: Mapping[int, EntryStart]) -> None:
        """Note that records before these starts, by entry, were removed after the facts were collected."""
        for index, start in starts.items():
            for mine in (self._known_starts, self._told_starts):
                known = mine.get(index)
                if known is None or known.position < start.position:
                    mine[index] = start

    def _starts(self, interval: Interval) -> dict[EntryId, int]:
        """Return the ordinals at which an interval's chunks begin to count: earlier data is here, or not needed."""
        starts = {}
        for index in range(self.known.entries):
            first = interval.first_record(index)
            start = self._known_starts.get(index)
            if start is not None and start.position.group_id < interval.end_group_id:
                first = max(first, start.first_record)
            for address, record in self.present.get(index, ()):
                if (
                    not record.to_come
                    and not record.open
                    and interval.has(address.group_id)
                    and record.first_record <= first
                ):
                    first = max(first, record.first_record + record.record_count)
            starts[self.known.entry(index)] = first
        return starts

    def _ends(self, interval: Interval) -> dict[EntryId, int]:
        """Return the ordinals at which entries ended once, according to the handover."""
        ends = interval.end_records if interval.closed else self.known.next_records
        return {self.known.entry(index): end for index, end in enumerate(ends[: self.known.entries])}

    def add(self, headers: Headers, *, closed: bool, source: int = 0, sure: bool = True) -> None:
        """See `Merge.add`. Chunks of groups outside the known intervals do not count."""
        groups = headers["group_id"]
        for interval, merge in zip(self.known.intervals, self._merges, strict=True):
            mine = groups >= (0 if interval.leads else interval.first_group_id)
            if interval.closed:
                mine &= groups < interval.end_group_id
            self.groups_max = max(self.groups_max, int(groups[mine].max(initial=0)))
            mine &= headers["entry"] < self.known.entries
            merge.add(headers[mine], closed=closed, source=source, sure=sure)

    def origins(self) -> set[Origin]:
        """See `Merge.origins`."""
        return {origin for merge in self._merges for origin in merge.origins()}

    def chunks(self) -> dict[SegmentAddress, Headers]:
        """Return all chunks, by segment, in the order of ordinals."""
        return {address: chunks for merge in self._merges for address, chunks in merge.segments().items()}

    def plan(self, entries: Sequence[EntryRecord | None], producers: Mapping[int, ProducerRecord]) -> StreamletPlan:
        """Return the plan of the streamlet; `entries` and `producers`: the index's records of it."""
        known = self.known
        found = [merge.finish() for merge in self._merges]
        segments: dict[int, list[SegmentPlan]] = {index: [] for index in range(known.entries)}
        chunks_cut = sum(len(cut.chunks) for each in found for cut in each.cuts)
        result = StreamletPlan([], dict(producers), 0, 0, 0, chunks_cut, dict(known.digests))
        for producer_id, state in known.producers.items():
            result.producers[producer_id] = max(result.producers.get(producer_id, state), state)
        for interval, each in zip(known.intervals, found, strict=True):
            for chunks in each.removed:
                _note_producers(chunks, result)
            starts = self._starts(interval) if known.keeps_all else {}
            for plan in _segments(each.runs, starts):
                _note_producers(plan.chunks, result)
                start = self._known_starts.get(plan.address.entry)
                if start is not None and plan.key < start.position[:2]:
                    continue  # retention has removed it; backups kept it because of other chunks
                segments[plan.address.entry].append(plan)
        groups = [self.groups_max, known.next_group_id - 1, *(first - 1 for first in self._firsts)]
        groups += [address.group_id for items in self.present.values() for address, _ in items]
        groups += [start.position.group_id - 1 for start in self._known_starts.values()]
        result.next_group_id = max(groups) + 1 + (known.lost_groups if known.may_lose else 0)
        for index in range(known.entries):
            self._entry(index, segments[index], entries[index], result)
            sure = max((each.sure.get(known.entry(index), 0) for each in found), default=0)
            result.entries[-1].unsure = self._unsure(result.entries[-1], segments[index], index, sure)
        return result

    def _unsure(self, plan: EntryPlan, found: Sequence[SegmentPlan], index: int, sure: int) -> UnsureTail | None:
        """Return the tail that may have fewer replicas than promised; None if there is none.

        `sure`: the ordinal up to which all replicas were seen. Chunks extend that, because they name the durable head
        at their append. Data before a segment that was already here is not unsure, because readers have seen it.
        """
        known = self.known
        if known.may_lose or not known.replication:
            return None
        sure = max(sure, *(known.next_records[index : index + 1] or (0,)))
        for segment in found:
            chunks, positions = positions_of(segment.record, segment.chunks)
            durable = positions + chunk_bytes(chunks) <= int(segment.chunks["durable_head"].max())
            sure = max(sure, int(end_records(chunks[durable]).max(initial=0)))
        before: tuple[SegmentAddress, SegmentRecord] | None = None
        present = dict(self.present.get(index, ()))
        for segment in found:
            if segment.record.first_record + segment.record.record_count > sure:
                if segment.address not in plan.new or any(address > segment.address for address in present):
                    return None
                chunks, positions = positions_of(segment.record, segment.chunks)
                row = int(np.argmax(end_records(chunks) > sure))
                position = Position(*segment.key, int(positions[row]))
                if not row and before is not None:
                    position = _end(*before)
                return UnsureTail(position, int(column(chunks, "first_record")[row]))
            before = segment.address, segment.record
        return None

    def _entry(self, index: int, found: list[SegmentPlan], old: EntryRecord | None, result: StreamletPlan) -> None:
        """Combine the data of an entry that is here with the data on backups."""
        union: dict[SegmentAddress, SegmentRecord] = {
            address: record for address, record in self.present.get(index, ()) if not record.open
        }
        plan = EntryPlan(old or EntryRecord())
        lost = 0
        start = self._known_starts.get(index)
        for address in list(union):
            ours = any(each.has(address.group_id) for each in self.known.intervals)
            if start is not None and ours and address[3:] < start.position[:2]:
                plan.gone.append(address)  # the lost broker had removed it
                plan.replaced += () if union[address].to_come else [union[address].physical_id]
                del union[address]
        for segment in found:
            here = union.get(segment.address)
            if here is not None and here.length >= segment.record.length:
                continue
            if here is not None and not here.to_come:
                plan.replaced.append(here.physical_id)
            union[segment.address] = plan.new[segment.address] = segment.record
            lost += segment.records_lost
            result.bytes_new += segment.record.length
        ordered = sorted(union.items())
        gaps, missing = self._gaps(index, ordered, result.next_group_id)
        result.records_lost += lost + missing
        plan.gaps = tuple(gaps)
        plan.record = self._record(index, ordered, plan, old, result.next_group_id)
        result.entries.append(plan)

    def _gaps(
        self, index: int, ordered: list[tuple[SegmentAddress, SegmentRecord]], next_group_id: int
    ) -> tuple[list[Gap], int]:
        """Return the gaps in the intervals, outside of segments, and the number of their records, as far as known."""
        gaps: list[Gap] = []
        lost = 0
        told = self._told_starts.get(index)
        for interval in self.known.intervals:
            if told is not None and told.position.group_id >= interval.end_group_id:
                continue  # all of it was removed
            mine = [(address, record) for address, record in ordered if interval.has(address.group_id)]
            at, position = interval.first_record(index), interval.start
            start = self._known_starts.get(index)
            if start is not None and start.position.group_id < interval.end_group_id and start.first_record > at:
                at, position = start.first_record, start.position
            if mine and not self.known.keeps_all:
                at = max(at, mine[0][1].first_record)
            for address, record in mine:
                if record.first_record > at:
                    gaps.append(Gap(position, Position(address.group_id, address.segment_id, 0)))
                    lost += record.first_record - at
                at, position = max(at, record.first_record + record.record_count), _end(address, record)
            if interval.closed:
                if at < interval.end_record(index) and (mine or self.known.keeps_all):
                    gaps.append(Gap(position, interval.following))
                    lost += interval.end_record(index) - at
            elif self.known.may_lose and mine:
                gaps.append(Gap(position, Position(next_group_id, 1, 0)))
        return gaps, lost

    def _record(
        self,
        index: int,
        ordered: list[tuple[SegmentAddress, SegmentRecord]],
        plan: EntryPlan,
        old: EntryRecord | None,
        next_group_id: int,
    ) -> EntryRecord:
        known = self.known
        last_interval = known.intervals[-1]
        next_record = known.next_records[index] if index < len(known.next_records) else 0
        next_record = max(next_record, last_interval.end_record(index), last_interval.first_record(index))
        if not ordered:
            start = self._known_starts.get(index)
            position, first = (start.position, start.first_record) if start is not None else (EARLIEST, 0)
            if old is not None and old.start > position and not known.may_lose:
                position, first = old.start, old.start_record
            next_record = max(next_record, first, old.next_record if old is not None else 0)
            if known.may_lose and not last_interval.closed:
                position = Position(next_group_id, 1, 0)
            first = next_record if position != EARLIEST else 0
            return EntryRecord(position, first, next_record)
        (first_address, first_segment), (last_address, last_segment) = ordered[0], ordered[-1]
        start = self._known_starts.get(index)
        first_key = (first_address.group_id, first_address.segment_id)
        if old is not None and old.stored_segments and first_address not in plan.new and old.start[:2] >= first_key:
            position, first = old.start, old.start_record
        elif start is not None and start.position[:2] == first_key:
            position, first = start.position, start.first_record
        else:
            position, first = Position(*first_key, 0), first_segment.first_record
        older = () if old is None else old.gaps
        old_watermark = NO_TIME if old is None else old.watermark_us
        gaps = [*plan.gaps, *(gap for gap in older if _still(gap, ordered, may_lose=known.may_lose))]
        return EntryRecord(
            start=position,
            start_record=first,
            next_record=max(
                next_record,
                last_segment.first_record + last_segment.record_count,
                start.first_record if start is not None else 0,
            ),
            stored_bytes=sum(record.length for _, record in ordered),
            stored_segments=len(ordered),
            last_group_id=last_address.group_id,
            last_segment_id=last_address.segment_id,
            gaps=tuple(sorted(set(gaps))),
            watermark_us=max(old_watermark, *(record.max_timestamp_us for _, record in ordered)),
            removed_watermark_us=NO_TIME if old is None else old.removed_watermark_us,
        )


def _end(address: SegmentAddress, record: SegmentRecord) -> Position:
    return Position(address.group_id, address.segment_id, record.length)


def _still(gap: Gap, ordered: Sequence[tuple[SegmentAddress, SegmentRecord]], *, may_lose: bool) -> bool:
    """Whether an older gap remains: no data is in it, and data is behind it.

    A start without memory takes everything behind the data on disk for lost. Backups may only have later data: nothing
    is missing if its ordinals follow those before the gap, or if there is no data before the gap. With `may_lose`, data
    that no backup ever had may be missing, so that does not count.
    """
    if not may_lose:
        before = [record for address, record in ordered if address[3:] <= gap.start[:2]]
        after = [record for address, record in ordered if address[3:] >= gap.end[:2]]
        if after and (not before or before[-1].first_record + before[-1].record_count == after[0].first_record):
            return False
    inside = any(
        gap.start[:2] < (address.group_id, address.segment_id) < gap.end[:2]
        or (gap.start[:2] == (address.group_id, address.segment_id) and record.length > gap.start.offset)
        for address, record in ordered
    )
    return not inside and (ordered[-1][0].group_id, ordered[-1][0].segment_id) >= gap.end[:2]


def _note_producers(chunks: Headers, result: StreamletPlan) -> None:
    """Add the progress of producers with these chunks, and the chunks' digests, to `result`."""
    join(result.digests, digests_of(chunks))
    chunks = chunks[chunks["flags"] & PUNCTUATION == 0]
    chunks = chunks[np.lexsort((chunks["sequence"], chunks["producer_epoch"], chunks["producer_id"]))]
    last = np.flatnonzero(np.roll(differs_from_before(chunks, "producer_id"), -1))
    fields = (chunks[name][last].tolist() for name in ("producer_id", "producer_epoch", "sequence"))
    for producer_id, epoch, sequence in zip(*fields, strict=True):
        state = ProducerRecord(epoch, sequence + 1)
        result.producers[producer_id] = max(result.producers.get(producer_id, state), state)


def _segments(runs: Iterable[MergedRun], starts: Mapping[EntryId, int]) -> list[SegmentPlan]:
    """Return the segments of runs, which are in the order of the log, one entry after the other.

    `starts`: the ordinals at which entries begin. Without one, the first chunk begins its segment, unless its durable
    head says otherwise.
    """
    plans: list[SegmentPlan] = []
    for address, its in groupby(runs, key=lambda run: run.address):
        pieces = [run.chunks for run in its]
        chunks = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        first_record = int(chunks["first_record"][0])
        before = plans[-1] if plans and plans[-1].address[:3] == address[:3] else None
        if before is None:
            start = starts.get(EntryId(*address[:3]), first_record)
            from_start = not chunks["durable_head"][0] and first_record <= start
        else:
            from_start = before.record.first_record + before.record.record_count == first_record
        plans.append(_segment(address, chunks, from_start=from_start))
    return plans


def _segment(address: SegmentAddress, chunks: Headers, *, from_start: bool) -> SegmentPlan:
    _, end = lay_out(chunks, from_start=from_start)
    first_record, end_record = int(chunks["first_record"][0]), int(end_records(chunks[-1:])[0])
    there = int(column(chunks, "record_count").sum())
    record = SegmentRecord(
        physical_id=TO_COME,
        length=end,
        open=False,
        chunk_count=len(chunks),
        crc32c=0,
        first_record=first_record,
        record_count=end_record - first_record,
        min_timestamp_us=int(chunks["min_timestamp_us"].min()),
        max_timestamp_us=int(chunks["max_timestamp_us"].max()),
        newest_us=int(chunks["created_us"].max()),
    )
    return SegmentPlan(address, chunks, record, record.record_count - there)
