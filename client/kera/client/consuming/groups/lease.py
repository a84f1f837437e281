"""A lease: a group of segments that the coordinator has assigned to this member of a consumer group, and its progress.

The coordinator may assign a part of a group, which ends before the group does. And it may ask for the rest of a group
that is being read: then the lease is *cut* at the end of a chunk, behind all delivered chunks. It ends there once the
coordinator has agreed.

    given ──► fetched ahead ──► its chunks are delivered ──► closed, and all of it processed: finished
                     │                  └── asked back: when what was delivered is processed, released
                     └── lost: other members have it, since this member was silent or stuck for too long

A chunk is *delivered* when the caller gets it, and *processed* when the caller asks for the next one; or, with
``commit_interval_ms`` 0, when the caller calls `commit`. The member *reports* processed chunks to the coordinator from
time to time. They are *committed* when the coordinator has answered: no member reads them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kera.client.cluster.fetch import Fetched
from kera.client.cluster.intervals import start_of_group
from kera.client.consuming.fetching.ranges import Range
from kera.client.types import fill_cursor, position_of
from kera.core.base.ids import EntryId, Position
from kera.core.errors import CorruptChunk, DataLost
from kera.core.format.chunk import iterate_chunks
from kera.v1 import consumer_group_pb2

Gap = tuple[int, int]
"""Ordinals of removed records: the first one, and the one behind the last."""


class Cut(NamedTuple):
    """A place in a group where a chunk ends."""

    position: Position
    record: int
    """Ordinal of the record there."""


def bytes_behind(fetched: Fetched, position: Position) -> int:
    """Return the number of fetched bytes behind a position."""
    if fetched.next <= position:
        return 0
    begins_before = fetched.start < position and fetched.next[:2] == position[:2]
    return fetched.next.offset - position.offset if begins_before else fetched.size_bytes


def cut_behind(fetched: Fetched, position: Position, bytes_min: int) -> Cut | None:
    """Return the first end of a chunk with at least `bytes_min` fetched bytes between it and `position`, in the group.

    A consumer that is asked for the rest of a group keeps its part up to such a place. Only headers are read.
    None: there is no such place, or the bytes are not reliable.
    """
    try:
        found = next((cut for cut, behind in _places(fetched, position) if behind >= bytes_min), None)
    except CorruptChunk:
        return None
    return found if fetched.slot is None or fetched.slot.intact else None


def _places(fetched: Fetched, position: Position) -> Iterator[tuple[Cut, int]]:
    """Yield the ends of chunks behind a position of the same group, with the number of bytes in between."""
    start, passed = fetched.start, 0
    for buffer in fetched.buffers:
        for header, _ in iterate_chunks(memoryview(buffer)):
            if header.group_id != position.group_id:
                return
            if header.segment_id != start.segment_id:
                start = Position(header.group_id, header.segment_id, 0)
            start = start._replace(offset=start.offset + header.chunk_bytes)
            if start > position:
                passed += header.chunk_bytes
                yield Cut(start, header.first_record + header.record_count), passed


class LeaseKey(NamedTuple):
    """Identifies a lease of a group: the group may be assigned again later, with another lease."""

    entry: EntryId
    group_id: int
    lease: int

    @classmethod
    def of(cls, message: consumer_group_pb2.GroupStep | consumer_group_pb2.GroupLease) -> LeaseKey:
        """Return the key of the lease that a message is about."""
        cursor = message.next
        return cls(EntryId(cursor.stream_id, cursor.streamlet_id, cursor.entry), cursor.group_id, message.lease)


class Reach(NamedTuple):
    """A point of progress in a group."""

    next: Position
    record: int | None
    """Ordinal of the record at that position; None: not known."""
    gaps: tuple[Gap, ...] = ()
    """Gaps before the group that were reported to the caller."""

    @classmethod
    def of_step(cls, step: consumer_group_pb2.GroupStep) -> Reach:
        """Return the progress that was reported to the coordinator in `step`."""
        gaps = tuple((gap.first_record, gap.end_record) for gap in step.told)
        return cls(position_of(step.next), step.next_record if step.HasField("next_record") else None, gaps)


class Lease:
    """A group of segments that a consumer holds, with the chunks that it delivered and processed so far."""

    def __init__(self, key: LeaseKey, message: consumer_group_pb2.GroupLease, fetched: Range) -> None:
        self.key = key
        self.range = fetched
        """The range that is being fetched."""
        self.former: list[Range] = []
        """Earlier ranges of the lease; all needed data of them have arrived."""
        self.delivered = Reach(
            position_of(message.next), message.next_record if message.HasField("next_record") else None
        )
        """End of the data delivered to the caller."""
        self.processed = self.delivered
        """End of the data that the caller has processed."""
        self.reported = self.delivered
        """End of the data that the coordinator knows to be processed."""
        self.end_record = message.end_record if message.HasField("end_record") else None
        """Ordinal of the end of the group; None: not known."""
        self.gaps: list[Gap] = []
        """Gaps before the group that are still to be reported to the caller."""
        self.part = message.part
        """Number of the part within its group."""
        self.end = position_of(message.end) if message.HasField("end") else None
        """End of the part; None: the end of the group."""
        self.cut: Cut | None = None
        """The proposed end; the coordinator has not agreed to it yet."""
        self.split_left_bytes = 0
        """Number of bytes that are still to come before it is cut; 0: it will not be cut."""
        self.opened: Fetched | None = None
        """The fetched data that are being delivered."""
        self.opened_range = fetched
        """The range that these data belong to."""
        self.given = self.delivered.next
        """End of the data opened for the caller, who may not have received all of them yet."""
        self.ended = False
        """Whether it is closed, and delivered completely."""
        self.asked_back = False
        """Whether the coordinator wants it back: no more is delivered. Final, because fetched data are dropped."""
        self.lost = False
        """Whether other members have it."""

    @property
    def usable(self) -> bool:
        """Whether more of it may be delivered."""
        return not (self.asked_back or self.lost)

    @property
    def finished(self) -> bool:
        """Whether all of it is processed."""
        return self.ended and self.cut is None and self.processed == self.delivered

    def deliver(self, position: Position, record: int) -> None:
        """Note that all before `position` is delivered; `record` is the ordinal of the record there."""
        self.delivered = self.delivered._replace(next=position, record=record)

    def ends_elsewhere(self, message: consumer_group_pb2.GroupLease) -> bool:
        """Return whether the coordinator has split it at another place than this consumer knows, or asks for.

        A request that was sent again can be carried out twice: refused the first time, and accepted when this consumer
        has gone on already. Other consumers may be reading the rest by then.
        """
        end = self.end if self.cut is None else self.cut.position
        return message.HasField("end") and position_of(message.end) != end

    def open(self, fetched: Fetched, of: Range) -> bool:
        """Begin to deliver the fetched data of a range; False: they lie behind a cut, and are dropped."""
        if of.cut_at is not None and fetched.start >= of.cut_at:
            return False
        self.opened, self.opened_range = fetched, of
        return True

    def go_on_with(self, following: Range) -> None:
        """Continue a lease that does not end where it was cut: `following` begins there."""
        self.former.append(self.range)
        self.range, self.ended = following, False

    def split_behind(self, split_bytes: int, waiting: Iterable[Fetched]) -> None:
        """Prepare to cut it, as other members want the rest: keep the next `split_bytes`; 0: keep all.

        `waiting` is the part of them that is fetched already. If fewer bytes are left until the cut, nothing changes:
        another request does not postpone the cut.
        """
        if not split_bytes or self.cut is not None or self.end is not None or self.ended:
            self.split_left_bytes = 0
            return
        if 0 < self.split_left_bytes <= split_bytes:
            return
        self.split_left_bytes = split_bytes
        if self.opened is not None and self.opened_range is self.range:
            self.came(self.opened)
        for fetched in waiting:
            self.came(fetched)

    def came(self, fetched: Fetched) -> None:
        """Cut it if the newly fetched data are enough."""
        if not self.split_left_bytes:
            return
        size_bytes = bytes_behind(fetched, self.given)
        if size_bytes < self.split_left_bytes:
            self.split_left_bytes -= size_bytes
            return
        self.cut = cut_behind(fetched, self.given, self.split_left_bytes)
        if self.cut is not None:
            self.range.cut_at, self.split_left_bytes = self.cut.position, 0

    def step(self) -> consumer_group_pb2.GroupStep:
        """Return a report of its progress for the coordinator."""
        step = consumer_group_pb2.GroupStep(
            lease=self.key.lease, finished=self.finished, next_record=self.processed.record, part=self.part
        )
        if self.cut is not None:
            fill_cursor(step.split, self.key.entry, self.cut.position)
            step.split_record = self.cut.record
        fill_cursor(step.next, self.key.entry, self.processed.next)
        for first, end in self.processed.gaps:
            step.told.add(first_record=first, end_record=end)
        return step

    def pass_gap(self, stream: str, gap: DataLost) -> DataLost | None:
        """Go on behind removed records of the group. Returns the error for the caller, if there is one.

        Each group reports its own part of a gap, as far as ordinals show it. If the rest of a lease is gone, the lease
        ends: its position cannot move past the gap, so only finishing it keeps the gap from being reported to the next
        consumer.
        """
        available = Position(*gap.attributes["available_from"])
        record = gap.attributes.get("available_record")
        record = record if isinstance(record, int) else None
        known, end, clipped = self.delivered.record, self.end_record, False
        if available.group_id != self.key.group_id or (self.end is not None and available > self.end):
            available, self.ended = self.delivered.next if self.end is None else self.end, True
            if record is not None and end is not None and record > end:  # the coordinator notices the gap behind it
                record, clipped = end, True
                gap = self._rest_gone(stream, gap, end)
        self.delivered = self.delivered._replace(next=available, record=record)
        return None if clipped and record == known else gap

    def _rest_gone(self, stream: str, gap: DataLost, end: int) -> DataLost:
        (_, streamlet_id, entry), group_id, _ = self.key
        reason = gap.attributes.get("reason")
        return DataLost(
            f"stream {stream!r}, streamlet {streamlet_id}, entry {entry}: the rest of group {group_id} from"
            f" {tuple(self.delivered.next)} on is gone{f': {reason}' if reason else ''}",
            **{
                **gap.attributes,
                "available_from": list(self.end or start_of_group(group_id + 1)),
                "available_record": end,
            },
        )

    def deliver_gaps(self, stream: str) -> DataLost:
        """Return the error about records before the group that retention removed before any member found them."""
        gaps, self.gaps = self.gaps, []
        self.delivered = self.delivered._replace(gaps=(*self.delivered.gaps, *gaps))
        return self._gone_before(stream, gaps)

    def _gone_before(self, stream: str, gaps: Sequence[Gap]) -> DataLost:
        (_, streamlet_id, entry), group_id, _ = self.key
        spans = ", ".join(f"{first} up to {end}" for first, end in gaps if end > first)
        count = sum(end - first for first, end in gaps)
        exact = all(end > first for first, end in gaps)
        what = f"{count} records ({spans})" if exact else "an unknown number of records"
        return DataLost(
            f"stream {stream!r}, streamlet {streamlet_id}, entry {entry}: {what} before group {group_id} are gone;"
            " their groups were removed before any consumer found them",
            stream=stream,
            streamlet_id=streamlet_id,
            entry=entry,
            lost_records=[list(each) for each in gaps],
            records=count if exact else None,
            available_from=list(self.delivered.next),
        )
