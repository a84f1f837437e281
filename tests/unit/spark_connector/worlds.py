"""Streams as planning sees them, without a cluster: entries made of segments, and the brokers' answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from kera.client import Assignment, EntryBounds, Interval, SegmentBounds
from kera.core.base.ids import Position
from kera.spark_connector.planning import Now, StreamNow
from kera.spark_connector.planning.offsets import EntryName, EntryOffset, Offsets, StreamOffsets

SCHEMA = pa.schema([("n", pa.int64())])
RECORD_BYTES = 64


def at(record: int, group: int = 1) -> EntryOffset:
    """A place in an entry with one segment per group."""
    return EntryOffset(Position(group, 1, record * RECORD_BYTES), record)


def entry(records: int, *, first: int = 0, group: int = 1) -> EntryBounds:
    """An entry with `records` records in one segment."""
    start, end = at(first, group), at(first + records, group)
    return EntryBounds(start.position, end.position, start.record, end.record, records * RECORD_BYTES)


def stream_now(
    bounds: Mapping[int, Sequence[EntryBounds]],
    name: str = "flights",
    stream_id: int = 7,
    assignments: Mapping[int, Assignment] | None = None,
    nodes: Mapping[int, str] | None = None,
) -> StreamNow:
    return StreamNow(name, stream_id, True, SCHEMA, bounds, assignments or {}, nodes or {})


def now_of(*streams: StreamNow) -> Now:
    return {stream.name: stream for stream in streams}


def offsets(*rows: tuple[EntryOffset, ...], name: str = "flights", stream_id: int = 7) -> Offsets:
    """One row of places per streamlet."""
    return Offsets({name: StreamOffsets(stream_id, dict(enumerate(rows)))})


class Log:
    """An entry as a list of segments: (group, broker, records of each chunk)."""

    def __init__(self, segments: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        self.layout = segments
        self.segments: list[SegmentBounds] = []
        self.boundaries: list[EntryOffset] = []
        """Each chunk boundary, under one of its names."""
        record = 0
        numbers: dict[int, int] = {}
        for group, broker_id, chunks in segments:
            numbers[group] = numbers.get(group, 0) + 1
            start = EntryOffset(Position(group, numbers[group], 0), record)
            offset = 0
            self.boundaries.append(start)
            for records in chunks:
                record += records
                offset += records * RECORD_BYTES
                self.boundaries.append(EntryOffset(Position(group, numbers[group], offset), record))
            self.segments.append(
                SegmentBounds(
                    start.position,
                    Position(group, numbers[group], offset),
                    start.record,
                    record,
                    offset,
                    broker_id,
                    resident=True,
                )
            )

    def between(self, start: EntryOffset, end: EntryOffset) -> list[SegmentBounds]:
        """The segments of a range, clipped to it, as `Client.segments` gives them."""
        return list(self._between(start, end))

    def _between(self, start: EntryOffset, end: EntryOffset) -> Iterator[SegmentBounds]:
        for segment in self.segments:
            first = max(EntryOffset(segment.start, segment.first_record), start)
            last = min(EntryOffset(segment.end, segment.next_record), end)
            if first < last and first.record < last.record:
                yield segment._replace(
                    start=first.position,
                    end=last.position,
                    first_record=first.record,
                    next_record=last.record,
                    length_bytes=last.position.offset - first.position.offset,
                )

    @property
    def bounds(self) -> EntryBounds:
        first, last = self.segments[0], self.segments[-1]
        length_bytes = sum(segment.length_bytes for segment in self.segments)
        return EntryBounds(first.start, last.end, first.first_record, last.next_record, length_bytes)

    @property
    def assignment(self) -> Assignment:
        intervals: list[Interval] = []
        for segment in self.segments:
            if not intervals or intervals[-1].broker_id != segment.broker_id:
                intervals.append(Interval(segment.start.group_id, segment.broker_id))
        return assigned(intervals[-1].broker_id, *intervals)

    def records_of(self, start: Position, end: Position) -> list[int]:
        """The ordinals that a reader gets between the two."""
        return [
            record
            for before, after in zip(self.boundaries, self.boundaries[1:], strict=False)
            if before.position[:2] == after.position[:2] and start <= before.position and after.position <= end
            for record in range(before.record, after.record)
        ]


def assigned(broker_id: int, *intervals: Interval) -> Assignment:
    return Assignment(broker_id, 1, 1, intervals)


def named(streamlet: int = 0, entry: int = 0, stream: str = "flights") -> EntryName:
    return EntryName(stream, streamlet, entry)
