"""A streamlet: Q entries, each a log of groups; appending with deduplication, and reading (thesis 6.2.1).

Appending decides, in this order: is the chunk the next of its producer (sequence), does it fit, where does it go. Until
all three are answered nothing has changed, so a refused chunk leaves no trace.

Reading takes positions and gives ranges of segments, whole chunks only and only behind the durable head. No bytes are
touched: what the ranges are turned into (bytes on a socket, references into the arena) is the service's business.

Invariants: group ids grow by one over all entries of the streamlet; per producer, stored sequences have no gap and no
repeat; ordinals of records have no gap within an entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kera.broker.arena import Arena
from kera.broker.segment import Group, Segment
from kera.core.chunk import ChunkHeader, Placement
from kera.core.errors import (
    DataLost,
    InvalidCursor,
    OutOfSequence,
    ProducerFenced,
    RecordTooLarge,
    UnknownGroup,
    invariant,
)
from kera.core.ids import EARLIEST, Position


class Appended(NamedTuple):
    """Where a chunk is."""

    entry: int
    group_id: int
    segment_id: int
    position: int
    first_record: int
    duplicate: bool


class Range(NamedTuple):
    """Whole chunks of one segment, all behind its durable head."""

    segment: Segment
    start: int
    end: int


class ReadPlan(NamedTuple):
    """What a read returns, and where the next one goes on."""

    ranges: list[Range]
    next: Position


class _ProducerState:
    __slots__ = ("next_sequence", "producer_epoch")

    def __init__(self, producer_epoch: int) -> None:
        self.producer_epoch = producer_epoch
        self.next_sequence = 0


class Entry:
    """One append lane: groups in order, the last of which may be active."""

    __slots__ = ("groups", "index", "next_record", "waiters")

    def __init__(self, index: int) -> None:
        self.index = index
        self.groups: list[Group] = []
        """Ascending ids; with gaps, since the entries of a streamlet share the sequence of ids."""
        self.next_record = 0
        """Ordinal of the next record."""
        self.waiters: set[Waiter] = set()
        """Readers to wake when the durable head moves."""

    @property
    def start(self) -> Position:
        """Position of the first byte that is there; `EARLIEST` when nothing ever was."""
        return Position(self.groups[0].group_id, 1, 0) if self.groups else EARLIEST

    @property
    def end(self) -> Position:
        """The durable head; `EARLIEST` when nothing ever was."""
        for group in reversed(self.groups):
            for segment in reversed(group.segments):
                if segment.durable_head or (segment.segment_id == 1 and group is self.groups[0]):
                    return Position(group.group_id, segment.segment_id, segment.durable_head)
        return EARLIEST

    def segments(self) -> Iterator[tuple[Group, Segment]]:
        """All segments, newest first."""
        for group in reversed(self.groups):
            for segment in reversed(group.segments):
                yield group, segment


class Waiter:
    """A reader that waits for any of several entries."""

    def wake(self) -> None:
        """Called, possibly often, when a durable head has moved or the entry is gone."""
        raise NotImplementedError  # abstract: the service's waiter holds a future


class Streamlet:
    """One partition of a stream on this broker."""

    def __init__(
        self,
        streamlet_id: int,
        *,
        entries: int,
        group_segments: int,
        broker_epoch: int,
        first_group_id: int,
        arena: Arena,
    ) -> None:
        self.streamlet_id = streamlet_id
        self.broker_epoch = broker_epoch
        self.entries = [Entry(index) for index in range(entries)]
        self.groups: dict[int, Group] = {}
        self.first_group_id = first_group_id
        """Groups before this one are from an earlier launch and gone."""
        self.given_groups: dict[str, int] = {}
        """Last group given to each application (thesis table 6.1, getNextGroups)."""
        self._next_group_id = first_group_id
        self._group_segments = group_segments
        self._arena = arena
        self._producers: dict[int, _ProducerState] = {}

    # -- appending ---------------------------------------------------------------------------------------------

    def append(self, chunk: memoryview, header: ChunkHeader) -> Appended:
        """Append a verified chunk of this streamlet; a repeat returns where it is already.

        Raises `OutOfSequence` (with `expected_sequence`), `ProducerFenced`, `RecordTooLarge`, `ArenaFull`; then nothing
        has changed.
        """
        entry = self.entries[header.producer_id % len(self.entries)]
        state = self._producers.get(header.producer_id)
        if state is None or header.producer_epoch > state.producer_epoch:
            state = _ProducerState(header.producer_epoch)  # kept only if the chunk is
        elif header.producer_epoch < state.producer_epoch:
            raise ProducerFenced(
                f"producer {header.producer_id} epoch {header.producer_epoch} was fenced by {state.producer_epoch}",
                producer_id=header.producer_id,
                producer_epoch=state.producer_epoch,
            )
        if header.sequence < state.next_sequence:
            return self._find_duplicate(entry, header)
        if header.sequence > state.next_sequence:
            raise OutOfSequence(
                f"producer {header.producer_id} sent sequence {header.sequence} to streamlet {self.streamlet_id},"
                f" expected {state.next_sequence}",
                producer_id=header.producer_id,
                streamlet_id=self.streamlet_id,
                sequence=header.sequence,
                expected_sequence=state.next_sequence,
            )
        group, segment = self._room(entry, len(chunk))
        first_record = entry.next_record
        placement = Placement(group.group_id, segment.segment_id, entry.index, first_record, self.broker_epoch)
        position = segment.append(chunk, header, placement)
        entry.next_record = first_record + header.record_count
        state.next_sequence = header.sequence + 1
        self._producers[header.producer_id] = state
        return Appended(entry.index, group.group_id, segment.segment_id, position, first_record, duplicate=False)

    def publish(self, appended: Appended) -> None:
        """Let readers see everything up to the end of `appended`, which has reached its level.

        Chunks of one entry are published in the order in which they were appended.
        """
        entry = self.entries[appended.entry]
        segment = self.groups[appended.group_id].segments[appended.segment_id - 1]
        segment.advance_durable_head(max(segment.durable_head, segment.chunk_end_after(appended.position)))
        for waiter in entry.waiters:
            waiter.wake()

    def _room(self, entry: Entry, chunk_bytes: int) -> tuple[Group, Segment]:
        """The group and segment that take the next chunk of `entry`, opened if need be."""
        if chunk_bytes > self._arena.slot_bytes:
            raise RecordTooLarge(
                f"chunk of {chunk_bytes} bytes is larger than a segment ({self._arena.slot_bytes} bytes)",
                chunk_bytes=chunk_bytes,
                limit=self._arena.slot_bytes,
            )
        group = entry.groups[-1] if entry.groups and not entry.groups[-1].closed else None
        if group is not None and group.segments[-1].free_bytes >= chunk_bytes:
            return group, group.segments[-1]
        slot = self._arena.allocate()  # before anything is closed: it may raise
        if group is not None and len(group.segments) >= self._group_segments:
            group.close()
            group = None
        if group is None:
            group = Group(self._next_group_id, entry.index)
            self._next_group_id += 1
            self.groups[group.group_id] = group
            entry.groups.append(group)
        return group, group.add_segment(slot)

    def _find_duplicate(self, entry: Entry, header: ChunkHeader) -> Appended:
        """Where the chunk with this producer and sequence is. Repeats are rare: look instead of remembering."""
        for group, segment in entry.segments():
            for end_index in range(len(segment.chunk_ends) - 1, -1, -1):
                offset = segment.chunk_ends[end_index - 1] if end_index else 0
                stored = segment.header_at(offset)
                if stored.producer_id == header.producer_id and stored.sequence == header.sequence:
                    return Appended(
                        entry.index, group.group_id, segment.segment_id, offset, stored.first_record, duplicate=True
                    )
        # It was acknowledged and has been removed since: still a repeat, with no place left.
        return Appended(entry.index, 0, 0, 0, 0, duplicate=True)

    # -- reading -----------------------------------------------------------------------------------------------

    def read(
        self, entry_index: int, start: Position, end: Position | None, bytes_max: int, *, strict: bool = False
    ) -> ReadPlan:
        """Whole chunks from `start` on, up to `end` or the durable head, of at most `bytes_max` bytes.

        One chunk that is larger than `bytes_max` is returned all the same, alone: otherwise no reader would get past.
        Not so if `strict`, for a reader who gets something else. Raises `InvalidCursor` or `DataLost`.
        """
        if not 0 <= entry_index < len(self.entries):
            raise InvalidCursor(
                f"streamlet {self.streamlet_id} has {len(self.entries)} entries, not an entry {entry_index}",
                entry=entry_index,
            )
        entry = self.entries[entry_index]
        if start.group_id == 0:
            start = entry.start
            if start == EARLIEST:
                return ReadPlan([], EARLIEST)
        group = self._group_of(entry, start)
        segment = self._segment_of(group, start)
        offset = start.offset
        ranges: list[Range] = []
        budget = bytes_max
        while True:
            limit = self._limit(group, segment, end)
            if offset < limit:
                stop = segment.boundary_within(offset, budget, limit)
                if stop == offset and not ranges and not strict:
                    stop = segment.chunk_end_after(offset)
                if stop > offset:
                    ranges.append(Range(segment, offset, stop))
                    budget -= stop - offset
                    offset = stop
            if not segment.closed or offset < segment.head:
                break  # nothing more to read yet, the budget is used up, or `end` is here
            following = _following(entry, group, segment)
            if following is None or (end is not None and Position(group.group_id, segment.segment_id, offset) >= end):
                break
            (group, segment), offset = following, 0
        return ReadPlan(ranges, Position(group.group_id, segment.segment_id, offset))

    def _limit(self, group: Group, segment: Segment, end: Position | None) -> int:
        """Up to where a reader who stops at `end` may read `segment`. Raises `InvalidCursor`."""
        here = (group.group_id, segment.segment_id)
        if end is None or here < end[:2] or (here == end[:2] and end.offset >= segment.durable_head):
            return segment.durable_head
        if here > end[:2]:
            return 0
        if not segment.is_boundary(end.offset):
            raise self._no_boundary(end)
        return end.offset

    def lag_records(self, entry_index: int, position: Position) -> int:
        """Records between `position` and the durable head."""
        entry = self.entries[entry_index]
        end = entry.end
        if position >= end or end == EARLIEST:
            return 0
        return self._ordinal(entry, end) - self._ordinal(entry, max(position, entry.start))

    def first_record(self, entry_index: int) -> int:
        """Ordinal of the oldest record that is there."""
        entry = self.entries[entry_index]
        return self._ordinal(entry, entry.start) if entry.groups else entry.next_record

    def end_record(self, entry_index: int) -> int:
        """Ordinal one past the last record that readers can see."""
        entry = self.entries[entry_index]
        return self._ordinal(entry, entry.end) if entry.groups else entry.next_record

    def _ordinal(self, entry: Entry, position: Position) -> int:
        """Ordinal of the first record at or after `position`."""
        segment = self.groups[position.group_id].segments[position.segment_id - 1]
        if position.offset < segment.head:
            return segment.header_at(position.offset).first_record
        group = self.groups[position.group_id]
        at = _index_of(entry.groups, group.group_id)
        following = group.segments[position.segment_id :] + [
            later for groups in entry.groups[at + 1 :] for later in groups.segments
        ]
        return following[0].header_at(0).first_record if following else entry.next_record

    def group(self, group_id: int) -> Group:
        """The group with this id. Raises `DataLost` or `UnknownGroup`."""
        group = self.groups.get(group_id)
        if group is None:
            if group_id < self.first_group_id:
                raise self._lost(Position(group_id, 1, 0))
            raise UnknownGroup(
                f"streamlet {self.streamlet_id} has no group {group_id}",
                streamlet_id=self.streamlet_id,
                group_id=group_id,
            )
        return group

    def available_groups(self) -> tuple[int, int]:
        """First and last group id; (0, 0) when there is none."""
        return (min(self.groups), self._next_group_id - 1) if self.groups else (0, 0)

    def next_groups(self, application_id: str, groups_max: int) -> list[Group]:
        """The next groups that this application was not given yet, at most `groups_max`, in order."""
        last = self.given_groups.get(application_id, 0)
        groups = [self.groups[group_id] for group_id in sorted(self.groups) if group_id > last][:groups_max]
        if groups:
            self.given_groups[application_id] = groups[-1].group_id
        return groups

    def drop(self) -> None:
        """Free all memory and wake all readers; the streamlet is not used any more."""
        for group in self.groups.values():
            group.retire()
        self.groups.clear()
        for entry in self.entries:
            entry.groups.clear()
            for waiter in list(entry.waiters):
                waiter.wake()

    def _group_of(self, entry: Entry, position: Position) -> Group:
        group = self.groups.get(position.group_id)
        if group is None and position.group_id < self.first_group_id:
            raise self._lost(position, entry)
        if group is None or group.entry != entry.index:
            raise InvalidCursor(
                f"entry {entry.index} of streamlet {self.streamlet_id} has no group {position.group_id}",
                streamlet_id=self.streamlet_id,
                entry=entry.index,
                position=list(position),
            )
        return group

    def _segment_of(self, group: Group, position: Position) -> Segment:
        if 1 <= position.segment_id <= len(group.segments):
            segment = group.segments[position.segment_id - 1]
            if position.offset <= segment.durable_head and segment.is_boundary(position.offset):
                return segment
        raise self._no_boundary(position)

    def _no_boundary(self, position: Position) -> InvalidCursor:
        return InvalidCursor(
            f"{tuple(position)} is no chunk boundary behind the durable head of streamlet {self.streamlet_id}",
            streamlet_id=self.streamlet_id,
            position=list(position),
        )

    def _lost(self, position: Position, entry: Entry | None = None) -> DataLost:
        # The first group of an entry may be a later one, and only there can a reader of the entry go on.
        available = entry.start if entry is not None and entry.groups else Position(self.first_group_id, 1, 0)
        return DataLost(
            f"streamlet {self.streamlet_id}: what was from {tuple(position)} up to {tuple(available)} is gone"
            " (the broker was started again); read on from the earliest position",
            streamlet_id=self.streamlet_id,
            lost_from=list(position),
            available_from=list(available),
        )


def _following(entry: Entry, group: Group, segment: Segment) -> tuple[Group, Segment] | None:
    """The segment that follows `segment`, with its group."""
    if segment.segment_id < len(group.segments):
        return group, group.segments[segment.segment_id]
    at = _index_of(entry.groups, group.group_id) + 1
    return (entry.groups[at], entry.groups[at].segments[0]) if at < len(entry.groups) else None


def _index_of(groups: list[Group], group_id: int) -> int:
    low, high = 0, len(groups)
    while low < high:
        middle = (low + high) // 2
        if groups[middle].group_id < group_id:
            low = middle + 1
        else:
            high = middle
    invariant(low < len(groups) and groups[low].group_id == group_id, "a group is missing from its entry")
    return low
