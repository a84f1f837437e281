"""An entry: an append-only chain of segments in a streamlet, of which the older ones are on disk.

    start                    last_stored                                  end (durable head)
      │                           │                                           │
      ▼                           ▼                                           ▼
      ├── on disk and in the index ──┼── tail: in memory, not (all) on disk ──┤
             some of it in memory, too                the last one may be open

The older part is always on disk: segments go into the index in the order of the log. So if the memory is lost, the log
up to some point is left, without a hole. The lost positions behind that point are a gap, which the entry remembers, and
which no other data ever gets.

Invariants: segments of the tail are newer than all stored ones, and in memory; only the last one may be open; ordinals
of records have no gap.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from kera.broker.log.progress import EntryProgress
from kera.broker.log.segment import Segment, SegmentState
from kera.broker.log.watermarks import watermark_before
from kera.broker.records import (
    NO_SEGMENT,
    Digests,
    EntryRecord,
    Gap,
    Graft,
    Key,
    SegmentAddress,
    SegmentLookup,
    SegmentRecord,
    UnsureTail,
)
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.errors import Recovering
from kera.core.format.punctuation import NO_TIME
from kera.core.push import DEFAULT_DOMAIN


class EntryListener:
    """A reader that waits for any of several entries."""

    __slots__ = ()

    def wake(self) -> None:
        """Called, possibly often, when a durable head has moved or the entry was dropped."""
        raise NotImplementedError  # abstract: the service's waiter holds a future


class Entry(EntryProgress):
    """The log of one entry: a chain of segments without a hole, with the older ones on disk and the tail in memory."""

    __slots__ = (
        "by_replicas",
        "committed",
        "gaps",
        "index",
        "last_stored",
        "log_id",
        "memory_domain",
        "memory_priority",
        "readers",
        "removed_watermark_us",
        "resident",
        "segment_index",
        "start",
        "start_record",
        "stored_bytes",
        "stored_end",
        "stored_record",
        "stored_segments",
        "stored_watermark_us",
        "unsure",
    )

    def __init__(self, log_id: EntryId, segment_index: SegmentLookup, record: EntryRecord | None = None) -> None:
        record = record or EntryRecord()
        self.log_id = log_id
        self.index = log_id.entry
        self.segment_index = segment_index
        self.start = record.start
        """Position of the first byte that is left; `EARLIEST` if the entry never had data."""
        self.start_record = record.start_record
        self.next_record = max(record.next_record, record.start_record)
        self.stored_record = self.next_record
        """Ordinal behind the stored part."""
        self.stored_bytes = record.stored_bytes
        self.stored_segments = record.stored_segments
        self.stored_watermark_us = record.watermark_us
        """The greatest time in the stored part, or less, see `EntryRecord`."""
        self.removed_watermark_us = record.removed_watermark_us
        """The greatest time of the removed data, or more."""
        self.promised_us = NO_TIME
        self.last_stored: Key = (record.last_group_id, record.last_segment_id)
        self.stored_end = EARLIEST
        """The end of the stored part."""
        self.gaps = list(record.gaps)
        self.by_replicas = False
        """Whether the durable head follows the backups, and only data before it goes to disk."""
        self.unsure: UnsureTail | None = None
        """The unsure tail, if the entry has one."""
        self.memory_priority = 0
        """Memory evicts stored data of entries with a lower priority first."""
        self.memory_domain = DEFAULT_DOMAIN
        """The domain in whose memory the entry's segments are."""
        self.tail = []
        self.resident: dict[Key, Segment] = {}
        """Segments that are in memory or being loaded: the tail, and stored segments."""
        self.waiters = set()
        self.readers: dict[int, Key] = {}
        """The segment that each connected reader reads next."""
        self.committed: dict[str, Position] = {}
        """The cursors that consumer groups have committed."""
        if self.last_stored != NO_SEGMENT:
            last = segment_index.segment(self.address(self.last_stored))
            self.stored_end = Position(*self.last_stored, last.length if last is not None else 0)
            if last is not None:
                self.stored_watermark_us = max(self.stored_watermark_us, last.max_timestamp_us)

    def address(self, key: Key) -> SegmentAddress:
        """Return the full address of one of the entry's segments."""
        return SegmentAddress(*self.log_id, *key)

    # -- what is there -----------------------------------------------------------------------------------------

    @property
    def head(self) -> Segment | None:
        """The open segment."""
        tail = self.tail
        if tail and not tail[-1].closed:
            return tail[-1]
        return None

    @property
    def end(self) -> Position:
        """The durable head, or the start of an unsure tail; `EARLIEST` if the entry never had data."""
        if self.unsure is not None:
            return max(self.start, self.unsure.position)
        return written_end(self)

    @property
    def length_bytes(self) -> int:
        """Size of the part that readers can see."""
        start = self.start
        skipped = start.offset if self.exists((start.group_id, start.segment_id)) else 0
        return self.stored_bytes + sum(segment.durable_head for segment in self.tail) - skipped

    def exists(self, key: Key) -> bool:
        """Whether the entry has this segment, in memory or on disk."""
        return key in self.resident or (
            key <= self.last_stored and self.segment_index.segment(self.address(key)) is not None
        )

    def find(self, key: Key) -> Segment | SegmentRecord | None:
        """Return a segment in memory, or the record of a segment on disk; None if there is neither."""
        segment = self.resident.get(key)
        if segment is not None:
            return segment
        return self.segment_index.segment(self.address(key)) if key <= self.last_stored else None

    def following(self, key: Key) -> tuple[Key, Segment | SegmentRecord] | None:
        """Return the first segment behind `key`; the segment of `key` itself need not exist."""
        if key < self.last_stored:
            found = self.segment_index.following(self.address(key))
            if found is not None:
                address, record = found
                following = (address.group_id, address.segment_id)
                if following <= self.last_stored:
                    return following, self.resident.get(following, record)
        at = bisect_right(self.tail, key, key=_key)
        return (self.tail[at].key, self.tail[at]) if at < len(self.tail) else None

    def first(self) -> tuple[Key, Segment | SegmentRecord] | None:
        """Return the first segment that has data left."""
        key = (self.start.group_id, self.start.segment_id)
        found = self.find(key)
        if found is not None and self.start.offset < length_of(found):
            return key, found
        return self.following(key)

    def segments(self, after: Key = NO_SEGMENT) -> Iterator[tuple[Key, Segment | SegmentRecord]]:
        """Iterate over the segments behind `after` that have data left, in order."""
        found = self.first() if after == NO_SEGMENT else self.following(after)
        while found is not None:
            yield found
            found = self.following(found[0])

    def group_segments(self, group_id: int, after_segment_id: int = 0) -> Iterator[tuple[Key, Segment | SegmentRecord]]:
        """Iterate over a group's segments behind `after_segment_id` that have data left; each is looked up anew."""
        before_start = (self.start.group_id, self.start.segment_id - 1)
        for key, segment in self.segments(max((group_id, after_segment_id), before_start)):
            if key[0] != group_id:
                break
            yield key, segment

    def next_group(self, after: int) -> int | None:
        """Return the first group behind `after` that has data left."""
        start_group = self.start.group_id
        found = self.first() if after < start_group else self.following((after + 1, 0))
        return found[0][0] if found is not None else None

    def gap_at(self, position: Position) -> Gap | None:
        """Return the gap that contains `position`."""
        return next((gap for gap in self.gaps if gap.has(position)), None)

    def loss_before_start(self) -> Gap | None:
        """Return the gap at the entry's start, if any: a reader from the earliest position has missed its records."""
        return next((gap for gap in self.gaps if gap.start < self.start <= gap.end and not gap.unseen), None)

    def distance(self, key: Key) -> tuple[int, int] | None:
        """Return how far the nearest reader is before a segment, in groups and segments; None if no reader is."""
        behind = [reader for reader in self.readers.values() if reader <= key]
        if not behind:
            return None
        nearest = max(behind)
        return key[0] - nearest[0], key[1] - nearest[1]

    # -- changes -----------------------------------------------------------------------------------------------

    def add(self, segment: Segment) -> None:
        """Add a new segment at the end."""
        self.tail.append(segment)
        self.resident[segment.key] = segment
        if self.start == EARLIEST:
            self.start, self.start_record = Position(*segment.key, 0), segment.first_record

    def record(self) -> EntryRecord:
        """Return the entry's record for the index."""
        return EntryRecord(
            self.start,
            self.start_record,
            self.stored_record,
            self.stored_bytes,
            self.stored_segments,
            *self.last_stored,
            tuple(self.gaps),
            self.stored_watermark_us,
            self.removed_watermark_us,
        )

    def record_with(self, segments: list[Segment]) -> EntryRecord:
        """Return the record for the index once `segments`, the oldest of the tail, are stored."""
        last = segments[-1]
        return self.record()._replace(
            next_record=last.first_record + last.record_count,
            stored_bytes=self.stored_bytes + sum(segment.head for segment in segments),
            stored_segments=self.stored_segments + len(segments),
            last_group_id=last.address.group_id,
            last_segment_id=last.address.segment_id,
            watermark_us=max(self.stored_watermark_us, *(segment.max_timestamp_us for segment in segments)),
        )

    def grafted(self, graft: Graft) -> EntryRecord:
        """Return the record for the index once a graft is stored. The graft lies before the whole tail."""
        record = self.record()
        if _starts_with(self, graft):
            record = record._replace(start=graft.start, start_record=graft.start_record)
        if graft.last > self.last_stored:
            record = record._replace(
                next_record=graft.next_record, last_group_id=graft.last[0], last_segment_id=graft.last[1]
            )
        return record._replace(
            stored_bytes=record.stored_bytes + graft.bytes,
            stored_segments=record.stored_segments + graft.segments,
            gaps=tuple(sorted({*record.gaps, *graft.gaps})),
            watermark_us=max(record.watermark_us, graft.watermark_us),
        )

    def graft(self, graft: Graft) -> None:
        """Add a graft, which the index has stored."""
        record = self.grafted(graft)
        self.start, self.start_record, self.stored_record = record.start, record.start_record, record.next_record
        self.stored_bytes, self.stored_segments = record.stored_bytes, record.stored_segments
        self.gaps = list(record.gaps)
        self.stored_watermark_us = record.watermark_us
        if graft.last > self.last_stored:
            self.last_stored, self.stored_end = graft.last, graft.end
        self.go_on_from(graft.next_record)

    def recovering(self, key: Key) -> bool:
        """Whether a segment still has to come from backups."""
        found = self.find(key)
        return isinstance(found, SegmentRecord) and found.to_come

    def stored(self, segment: Segment) -> None:
        """Move the oldest segment of the tail, which is on disk and in the index now, to the stored part."""
        self.tail.pop(0)
        self.last_stored = segment.key
        self.stored_end = Position(*segment.key, segment.head)
        self.stored_record = segment.first_record + segment.record_count
        self.stored_bytes += segment.head
        self.stored_segments += 1
        self.stored_watermark_us = max(self.stored_watermark_us, segment.max_timestamp_us)
        segment.in_index = True
        segment.producers = {}

    def removed(self, length: int) -> None:
        """Subtract a stored segment of `length` bytes, which was removed from the index."""
        self.stored_bytes -= length
        self.stored_segments -= 1

    def move_start(self, position: Position, record: int) -> None:
        """Move the start to a position with the ordinal `record`: the records before it are removed."""
        self.removed_watermark_us = max(self.removed_watermark_us, watermark_before(self, position))
        self.start, self.start_record = position, record

    def go_on_from(self, record: int) -> None:
        """Let the next record have this ordinal, or a later one."""
        self.next_record = max(self.next_record, record)

    def wake(self) -> None:
        """Let waiting readers look again."""
        if self.waiters:
            for waiter in list(self.waiters):
                waiter.wake()


class Entries:
    """The entries of a streamlet, by their index.

    A stream may have a million entries, and most are never written to. So the object of an entry without data is
    made on the first access. Iterating makes all of them; code that only needs entries with data goes through `made`.
    """

    __slots__ = (
        "_by_replicas",
        "_gone",
        "_memory_domain",
        "_memory_priority",
        "_ref",
        "_segment_index",
        "count",
        "first_promise_us",
        "made_by_index",
    )

    def __init__(
        self, stream_id: int, streamlet_id: int, count: int, segment_index: SegmentLookup, made: Iterable[Entry] = ()
    ) -> None:
        """`made`: the entries that have data here."""
        self._ref = stream_id, streamlet_id
        self.count = count
        self._segment_index = segment_index
        self.made_by_index = {entry.index: entry for entry in made}
        """The entries in `made`, by index."""
        self._by_replicas = False
        self._memory_priority = 0
        self._memory_domain = DEFAULT_DOMAIN
        self.first_promise_us = NO_TIME
        """The promise (see `promise`) of entries that are not made yet."""
        self._gone = False

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Entry:
        found = self.made_by_index.get(index)
        if found is None:
            if not 0 <= index < self.count:
                raise IndexError(f"there are {self.count} entries, not an entry {index}")
            found = self.made_by_index[index] = Entry(EntryId(*self._ref, index), self._segment_index)
            found.by_replicas = self._by_replicas
            found.memory_priority = self._memory_priority
            found.memory_domain = self._memory_domain
            found.promised_us = self.first_promise_us
        return found

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.made) if self._gone else map(self.__getitem__, range(self.count))

    def digests(self, producer_id: int) -> Digests | None:
        """Return the digests of a producer's last chunks that have left memory; None if none are known."""
        return self._segment_index.digests(*self._ref, producer_id)

    @property
    def made(self) -> list[Entry]:
        """The entries that had data here or were accessed, in order of their index: all others have no data."""
        return [self.made_by_index[index] for index in sorted(self.made_by_index)]

    def set_by_replicas(self, by_replicas: bool) -> None:  # noqa: FBT001 - what it sets is called so
        """Set `Entry.by_replicas` of all entries."""
        self._by_replicas = by_replicas
        for entry in self.made_by_index.values():
            entry.by_replicas = by_replicas

    def promise(self, promised_us: int) -> None:
        """Note the promise that no entry gets older data, including entries without data."""
        self.first_promise_us = max(self.first_promise_us, promised_us)
        for entry in self.made_by_index.values():
            entry.promised_us = max(entry.promised_us, promised_us)

    def set_memory_priority(self, priority: int) -> None:
        """Set `Entry.memory_priority` of all entries."""
        self._memory_priority = priority
        for entry in self.made_by_index.values():
            entry.memory_priority = priority

    def set_memory_domain(self, domain: str) -> None:
        """Set `Entry.memory_domain` of all entries."""
        self._memory_domain = domain
        for entry in self.made_by_index.values():
            entry.memory_domain = domain

    def drop(self) -> None:
        """Note that the streamlet is dropped: iterating makes no entries any more."""
        self._gone = True


def state_of(segment: Segment) -> SegmentState:
    """Return the state of a segment in memory."""
    entry = segment.entry
    if segment.loading:
        return SegmentState.LOADING
    if not segment.closed:
        return SegmentState.HEAD
    if entry.readers and entry.distance(segment.key) is None:
        return SegmentState.PROCESSED
    return SegmentState.GROUP


def _starts_with(entry: Entry, graft: Graft) -> bool:
    """Whether an entry starts at the start of a graft from now on."""
    if graft.start == EARLIEST:
        return False
    if entry.start == EARLIEST:
        return True
    if graft.start < entry.start:
        return graft.segments > 0
    # If the entry has no data left, the records up to the graft were removed, too, unless a gap says they are lost.
    is_empty = not (entry.stored_segments or entry.tail)
    return is_empty and not any(gap.start < graft.start for gap in (*entry.gaps, *graft.gaps))


def written_end(entry: Entry) -> Position:
    """Return the durable head, even in an unsure tail: before a recovery, readers have seen the data up to it."""
    for segment in reversed(entry.tail):
        if segment.durable_head:
            return Position(*segment.key, segment.durable_head)
    return max(entry.start, entry.stored_end)  # a segment without durable data does not count: it may still be lost


def still_unsure(entry: Entry) -> Recovering:
    """Return the error for requests that need the entry's unsure tail."""
    _, streamlet_id, index = entry.log_id
    return Recovering(
        f"entry {index} of streamlet {streamlet_id} has just been recovered, and its last records may not be on as many"
        " backups as was promised; ask again when they are",
        streamlet_id=streamlet_id,
        entry=index,
    )


def _key(segment: Segment) -> Key:
    return segment.key


def length_of(found: Segment | SegmentRecord) -> int:
    """Return the bytes of chunks in a segment, in memory or on disk."""
    return found.head if isinstance(found, Segment) else found.length
