"""How the ranges of entries are cut into partitions: at the ends of brokers' parts, of groups or of segments.

Invariants:

* partitions cover each range exactly once, in order. Each ends where the next one begins, so that its reader notices
  records that are lost in between;
* no partition of a batch spans two brokers, so that a task can read it locally;
* the partitions of a micro-batch depend on its two ends, the options and the segments, which never change. They depend
  neither on the machine nor on the present brokers. A sink that uses partition numbers (as ours does) gets the same
  rows under the same number when the micro-batch runs again;
* records that are missing between two segments count among the records that a partition has to yield.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kera.core.base.ids import EntryId, Position
from kera.core.errors import NotAccepted
from kera.spark_connector.planning.now import Now, find_bounds
from kera.spark_connector.planning.offsets import EntryName, EntryOffset, Offsets

if TYPE_CHECKING:
    from kera.client import EntryBounds, SegmentBounds

CUT_BYTES_MIN = 32 << 20
"""Without options, partitions are not cut smaller than this, because each task has a cost."""
CUT_BYTES_STABLE = 128 << 20
"""Approximate maximum size of a micro-batch's partition without options, if groups end often enough."""
SIDE_MIN = 4
"""The end of a group is the preferred place to cut if each side gets at least 1 / SIDE_MIN of the bytes."""


class EntryRange(NamedTuple):
    """The range to read of one entry."""

    entry: EntryName
    start: EntryOffset
    end: EntryOffset
    length_bytes: int
    """Estimated from the bounds of the entry, exact within one segment; 0: not known."""

    @property
    def records(self) -> int:
        """The number of records; 0 if the ordinals restarted in between, as after the loss of a broker."""
        return max(self.end.record - self.start.record, 0)


@dataclass(frozen=True)
class Cutting:
    """How many partitions to make."""

    partitions_min: int | None = None
    """``minPartitions``: cut the largest parts first, until the number is reached or nothing can be cut."""
    records_max: int | None = None
    """``maxRecordsPerPartition``: an upper bound, as far as segments allow."""
    parallelism: int = 1
    """For a batch without the two options: a good number of partitions, such as Spark's default parallelism."""
    stable: bool = False
    """Whether to cut in the same way whenever the data are planned, as for a micro-batch."""

    @property
    def by_default(self) -> bool:
        """Whether neither option is given."""
        return self.partitions_min is None and self.records_max is None


@dataclass(frozen=True)
class Piece:
    """A range of one entry, read by one task. Small, and pickled with the task."""

    stream: str
    entry: EntryId
    start: Position
    end: Position
    first_record: int
    """Ordinal of the first record to yield. Earlier records of the chunk that begins exactly at `start` are left out;
    there are some if a micro-batch of real-time mode ended within that chunk."""
    records: int
    """The number of records to yield."""
    length_bytes: int
    """Bytes of the piece's chunks, estimated unless the segments were looked up; 0: not known."""
    typed: bool
    """Whether the stream has a schema with columns."""
    broker_id: int
    """The broker that had the piece when it was planned; 0: not known."""
    node_id: str
    """That broker's node; empty: not known."""
    fail_on_data_loss: bool
    stop: EntryOffset | None = None
    """Where the piece ends within its last chunk: the chunk's start, and its first record that is not yielded. As for
    `first_record`, the reason is a micro-batch of real-time mode, which another trigger repeats. None: the piece ends
    with the chunk."""
    epoch: int | None = None
    """The epoch of all records; None: rows have no epoch."""


def ranges(start: Offsets, end: Offsets, now: Now) -> list[EntryRange]:
    """Return the ranges of the entries that have records between `start` and `end`, in order, one per entry.

    A start may be within a chunk, an end must not be (see `real_time.rounded`). Raises `NotAccepted` for such an end if
    the start is in the same chunk; otherwise it cannot be detected.
    """
    before = start.places()
    found = []
    for entry, stop in end.entries():
        begin = before.get(entry)
        if begin is None or begin >= stop:
            continue
        if begin.position == stop.position:
            raise _ends_within_a_chunk(entry, stop)
        found.append(EntryRange(entry, begin, stop, _estimated_bytes(begin, stop, find_bounds(now, entry))))
    return found


def _ends_within_a_chunk(entry: EntryName, end: EntryOffset) -> NotAccepted:
    return NotAccepted(
        f"{entry}: the micro-batch ends within the chunk at {tuple(end.position)}, at record {end.record}, as those of"
        " real-time mode may; but that chunk is not there any more",
        **entry._asdict(),
    )


def _estimated_bytes(start: EntryOffset, end: EntryOffset, there: EntryBounds | None) -> int:
    if start.position[:2] == end.position[:2]:
        return end.position.offset - start.position.offset
    if there is None or (start.position <= there.start and end.position >= there.end):
        return there.length_bytes if there else 0
    records = max(end.record - start.record, 1)
    return there.length_bytes * records // max(there.next_record - there.first_record, records)


def to_ask(ranges: Sequence[EntryRange], now: Now, cutting: Cutting) -> list[EntryRange]:
    """Return the ranges whose segments `cut` needs (`Client.segments` between their positions); often none.

    These are ranges that several brokers share, whose ordinals restart, or that are large enough to be cut.
    """
    part_bytes = _part_bytes(ranges, cutting)

    def large(there: EntryRange) -> bool:
        if there.start.position[:2] == there.end.position[:2]:
            return False
        if cutting.by_default:  # a range's size is an estimate, so a stable cut must not depend on it
            several_groups = there.start.position.group_id < there.end.position.group_id
            return several_groups and (cutting.stable or _parts(there.length_bytes, part_bytes) > 1)
        too_few = cutting.partitions_min is not None and len(ranges) < cutting.partitions_min
        return too_few or (cutting.records_max is not None and there.records > cutting.records_max)

    def anew(there: EntryRange) -> bool:
        return there.end.record < there.start.record

    def spread(there: EntryRange) -> bool:
        return not cutting.stable and len(_brokers(there, now)) > 1

    return [there for there in ranges if large(there) or anew(there) or spread(there)]


def cut(
    ranges: Sequence[EntryRange],
    now: Now,
    segments: Mapping[EntryName, Sequence[SegmentBounds]],
    cutting: Cutting,
    *,
    fail_on_data_loss: bool,
) -> list[Piece]:
    """Return `ranges` as partitions, cut where a broker's part, a group or a segment ends, in order of their entries.

    `segments`: for the ranges of `to_ask`, from start to end; a range without segments is not cut. Without
    `partitions_min` and `records_max`, ranges are cut only at ends of groups, and only if they are much larger than
    their part of `parallelism` (for a micro-batch: than `CUT_BYTES_STABLE`). With these options, ends of groups are
    preferred, and ends of segments are used where necessary.
    """
    parts = [
        part
        for there in ranges
        for part in _at_brokers(there, now, segments.get(there.entry, ()), together=cutting.stable)
    ]
    if cutting.by_default:
        part_bytes = _part_bytes(ranges, cutting)
        parts = [small for part in parts for small in _in_groups(part, part_bytes)]
    if cutting.records_max is not None:
        records_max = cutting.records_max
        parts = [small for part in parts for small in _bounded(part, records_max)]
    if cutting.partitions_min is not None:
        parts = _until(parts, cutting.partitions_min)
    return [part.piece(now, fail_on_data_loss=fail_on_data_loss) for part in parts]


class _Atom(NamedTuple):
    """A unit that is never cut: usually a segment, or its part within the range."""

    start: Position
    end: Position
    first_record: int
    records: int
    length_bytes: int


@dataclass(frozen=True)
class _Part:
    """A range or a part of one, at one broker."""

    entry: EntryName
    broker_id: int
    atoms: Sequence[_Atom]
    """At least one."""

    @property
    def records(self) -> int:
        return sum(atom.records for atom in self.atoms)

    @property
    def length_bytes(self) -> int:
        return sum(atom.length_bytes for atom in self.atoms)

    def split(self, places: Iterable[int]) -> list[_Part]:
        """Cut before the atoms with these indexes (from 1 and ascending)."""
        edges = itertools.pairwise([0, *places, len(self.atoms)])
        return [_Part(self.entry, self.broker_id, self._slice(first, after)) for first, after in edges]

    def _slice(self, first: int, after: int) -> Sequence[_Atom]:
        """Return the atoms from `first` until before `after`. The last one ends where the next atom begins."""
        atoms = list(self.atoms[first:after])
        if after < len(self.atoms):
            atoms[-1] = atoms[-1]._replace(end=self.atoms[after].start)
        return atoms

    def segment_ends(self) -> range:
        """Return the indexes of atoms before which the part may be cut."""
        return range(1, len(self.atoms))

    def group_ends(self) -> list[int]:
        """Return the indexes of atoms (from 1) that begin a group."""
        return [
            place
            for place in self.segment_ends()
            if self.atoms[place].start.group_id != self.atoms[place - 1].start.group_id
        ]

    def piece(self, now: Now, *, fail_on_data_loss: bool) -> Piece:
        stream = now[self.entry.stream]
        return Piece(
            stream=self.entry.stream,
            entry=EntryId(stream.stream_id, self.entry.streamlet, self.entry.entry),
            start=self.atoms[0].start,
            end=self.atoms[-1].end,
            first_record=self.atoms[0].first_record,
            records=self.records,
            length_bytes=self.length_bytes,
            typed=stream.typed,
            broker_id=self.broker_id,
            node_id=stream.nodes.get(self.broker_id, ""),
            fail_on_data_loss=fail_on_data_loss,
        )


def _brokers(there: EntryRange, now: Now) -> list[int]:
    """Return the brokers that have the groups of a range, in the groups' order; empty: not known."""
    assignment = now[there.entry.stream].assignments.get(there.entry.streamlet)
    if assignment is None:
        return []
    holders = [assignment.broker_id]
    for index, interval in enumerate(assignment.intervals):
        if index == 0 or interval.first_group_id <= there.start.position.group_id:
            holders = [interval.broker_id]
        elif interval.first_group_id <= there.end.position.group_id:
            holders.append(interval.broker_id)
    return [broker_id for broker_id, _ in itertools.groupby(holders)]


def _at_brokers(there: EntryRange, now: Now, segments: Sequence[SegmentBounds], *, together: bool) -> list[_Part]:
    """Split a range into one part per broker, or, if `together`, into one part; each has its atoms."""
    if not segments:
        start, end = there.start, there.end
        atom = _Atom(start.position, end.position, start.record, there.records, there.length_bytes)
        return [_Part(there.entry, next(iter(_brokers(there, now)), 0), [atom])]
    rows: list[tuple[int, list[_Atom]]] = []
    record = there.start.record
    """The ordinal that the next segment should begin with."""
    for segment, following in itertools.zip_longest(segments, segments[1:]):
        # Records that are missing before the first segment, after the last one or between two segments are counted to
        # an adjacent segment, so that its reader reports the loss. Ordinals that restarted, as after the loss of a
        # broker, are lower, and show no loss.
        missing = max(segment.first_record - record, 0) if not rows else 0
        after = following.first_record if following is not None else there.end.record
        begun = _given_before(there.start, segment) if not rows else 0
        atom = _Atom(
            segment.start,
            segment.end,
            segment.first_record,
            missing + max(after, segment.next_record) - segment.first_record - begun,
            segment.length_bytes,
        )
        if not rows or (rows[-1][0] != segment.broker_id and not together):
            rows.append((segment.broker_id, [atom]))
        elif record == segment.first_record:
            rows[-1][1].append(atom)
        else:  # no cut where records may be missing: the task that reads across the gap notices the loss
            rows[-1][1][-1] = _joined(rows[-1][1][-1], atom)
        record = segment.next_record
    # The range's ends keep their names from the checkpoint, because the end of a full segment has two names.
    first, last = rows[0][1], rows[-1][1]
    first[0] = first[0]._replace(start=there.start.position, first_record=there.start.record)
    last[-1] = last[-1]._replace(end=there.end.position)
    return [_Part(there.entry, broker_id, atoms) for broker_id, atoms in rows]


def _given_before(start: EntryOffset, segment: SegmentBounds) -> int:
    """Return how many records of the chunk at `start` an earlier micro-batch has read.

    `segment` is the first segment of the range.
    """
    within = segment.start == start.position and segment.first_record < start.record < segment.next_record
    return start.record - segment.first_record if within else 0


def _joined(one: _Atom, other: _Atom) -> _Atom:
    records, length_bytes = one.records + other.records, one.length_bytes + other.length_bytes
    return _Atom(one.start, other.end, one.first_record, records, length_bytes)


def _part_bytes(ranges: Sequence[EntryRange], cutting: Cutting) -> int:
    """Return the size in bytes that a partition should have if no option sets the number of partitions."""
    if cutting.stable:
        return CUT_BYTES_STABLE
    return max(sum(there.length_bytes for there in ranges) // max(cutting.parallelism, 1), CUT_BYTES_MIN)


def _parts(length_bytes: int, part_bytes: int) -> int:
    return (length_bytes + part_bytes // 2) // part_bytes


def _in_groups(part: _Part, part_bytes: int) -> list[_Part]:
    """Cut `part` at ends of groups into parts of about `part_bytes`."""
    count, places = _parts(part.length_bytes, part_bytes), part.group_ends()
    if count < 2 or not places:
        return [part]
    before = [0, *itertools.accumulate(atom.length_bytes for atom in part.atoms)]
    """Bytes before each atom."""
    wanted = [before[-1] * number // count for number in range(1, count)]
    return part.split(sorted({min(places, key=lambda place: abs(before[place] - at)) for at in wanted}))


def _bounded(part: _Part, records_max: int) -> list[_Part]:
    """Cut `part` into parts with at most `records_max` records, or with one segment. Keep groups whole if possible."""
    groups = part.split(part.group_ends())
    units = [
        unit
        for group in groups
        for unit in ([group] if group.records <= records_max else group.split(group.segment_ends()))
    ]
    places: list[int] = []
    place = records = 0
    for unit in units:
        if records and records + unit.records > records_max:
            places.append(place)
            records = 0
        place += len(unit.atoms)
        records += unit.records
    return part.split(places)


def _until(parts: list[_Part], partitions_min: int) -> list[_Part]:
    """Cut the largest of `parts` until there are `partitions_min` parts, or nothing can be cut."""
    whole = [part for part in parts if len(part.atoms) == 1]
    heap = [(-part.length_bytes, part.entry, part.atoms[0].start, part) for part in parts if len(part.atoms) > 1]
    heapq.heapify(heap)
    while heap and len(heap) + len(whole) < partitions_min:
        *_, largest = heapq.heappop(heap)
        for half in largest.split([_middle(largest)]):
            if len(half.atoms) > 1:
                heapq.heappush(heap, (-half.length_bytes, half.entry, half.atoms[0].start, half))
            else:
                whole.append(half)
    return sorted([*whole, *(part for *_, part in heap)], key=lambda part: (part.entry, part.atoms[0].start))


def _middle(part: _Part) -> int:
    """Return the best place to cut `part` in two."""
    before = [0, *itertools.accumulate(atom.length_bytes for atom in part.atoms)]
    total = before[-1]
    fair = [at for at in part.group_ends() if min(before[at], total - before[at]) * SIDE_MIN >= total]
    return min(fair or part.segment_ends(), key=lambda place: abs(2 * before[place] - total))
