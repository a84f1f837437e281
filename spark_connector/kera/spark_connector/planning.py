"""Which records a query or a micro-batch takes, and how they are cut into partitions. Pure: no connection, no clock.

Events in (where a stream starts and ends now, what the checkpoint says), decisions out:

    options ──► resolve ──► start ─┐
    bounds  ──► ends ──────────────┴─► advance ──► end ──► shares (maxOffsetsPerTrigger) ──► partitions

Invariants:

* the end of a micro-batch is never before its start, in any entry;
* a micro-batch's partitions cover the records between start and end exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pyspark.sql.datasource import InputPartition

from kera.core.errors import InvalidArgument
from kera.core.ids import EntryId, Position
from kera.spark_connector.offsets import EntryOffset, Lane, Place, Places, StreamOffsets


class Bounds(Protocol):
    """Where one entry starts and ends: `kera.client.EntryBounds`, as far as planning needs it."""

    @property
    def start(self) -> Position:
        """First byte that is there."""

    @property
    def end(self) -> Position:
        """Durable head."""

    @property
    def first_record(self) -> int:
        """Ordinal of the record at `start`."""

    @property
    def next_record(self) -> int:
        """Ordinal of the next record to come, at `end`."""


StreamBounds = Mapping[int, Sequence[Bounds]]
"""Per streamlet, one per entry."""


@dataclass(repr=False)
class KeraPartition(InputPartition):
    """One range of one entry, read by one task."""

    stream: str
    entry: EntryId
    start: Position
    end: Position
    records: int
    """How many there are between the two."""
    typed: bool
    """Whether the stream has columns of its own."""


def starts(bounds: StreamBounds) -> dict[int, tuple[EntryOffset, ...]]:
    """The first record that is there, in every entry."""
    return {
        streamlet: tuple(EntryOffset(entry.start, entry.first_record) for entry in entries)
        for streamlet, entries in bounds.items()
    }


def ends(bounds: StreamBounds) -> dict[int, tuple[EntryOffset, ...]]:
    """The durable head of every entry."""
    return {
        streamlet: tuple(EntryOffset(entry.end, entry.next_record) for entry in entries)
        for streamlet, entries in bounds.items()
    }


def resolve(
    option: str, places: Places, bounds: StreamBounds, records: Mapping[tuple[Lane, Position], int]
) -> dict[int, tuple[EntryOffset, ...]]:
    """What `places` means now. `records` has the ordinals for the positions that the user gave.

    Raises `InvalidArgument` naming `option` when streamlets or entries do not match the stream's.
    """
    resolved: dict[int, tuple[EntryOffset, ...]] = {}
    for streamlet, row in by_lane(option, places, bounds).items():
        offsets = []
        for entry, place in enumerate(row):
            there = bounds[streamlet][entry]
            if place == "earliest":
                offsets.append(EntryOffset(there.start, there.first_record))
            elif place == "latest":
                offsets.append(EntryOffset(there.end, there.next_record))
            else:
                offsets.append(EntryOffset(place, records[(streamlet, entry), place]))
        resolved[streamlet] = tuple(offsets)
    return resolved


def by_lane(option: str, places: Places, bounds: StreamBounds) -> dict[int, list[Place]]:
    """`places` spelled out: one for each entry that the stream has."""
    if places.everywhere is not None:
        return {streamlet: [places.everywhere] * len(entries) for streamlet, entries in bounds.items()}
    named = places.streamlets or {}
    if set(named) != set(bounds):
        raise InvalidArgument(
            f"option {option}: must name each streamlet: the stream has {sorted(bounds)}, it names {sorted(named)}",
            option=option,
        )
    rows: dict[int, list[Place]] = {}
    for streamlet, entries in bounds.items():
        said = named[streamlet]
        # A Position is a tuple, too: a plain tuple is one place per entry.
        row = list(said) if isinstance(said, tuple) and not isinstance(said, Position) else [said] * len(entries)
        if len(row) != len(entries):
            raise InvalidArgument(
                f"option {option}: streamlet {streamlet} has {len(entries)} entries, {len(row)} places are given",
                option=option,
            )
        rows[streamlet] = row
    return rows


def advance(
    start: Mapping[int, tuple[EntryOffset, ...]], heads: Mapping[int, tuple[EntryOffset, ...]]
) -> dict[int, tuple[EntryOffset, ...]]:
    """`heads`, but nowhere behind `start`: an end never goes back, whatever a broker says after a restart.

    Where no record is new the start stays as it is, so that Spark, which compares text, sees that nothing is new: the
    end of a full segment and the start of the next one are the same place with two names.
    """
    merged = dict(start)
    for streamlet, entries in heads.items():
        before = start.get(streamlet, ())
        merged[streamlet] = tuple(
            _later(before[entry], head) if entry < len(before) else head for entry, head in enumerate(entries)
        )
    return merged


def _later(start: EntryOffset, head: EntryOffset) -> EntryOffset:
    return start if head.position <= start.position or head.record == start.record else head


def forwarded(start: StreamOffsets, bounds: StreamBounds) -> StreamOffsets:
    """`start`, with places before all that is there moved on to it, if no record is between.

    A checkpoint may name the end of groups that have been emptied and let go since: nothing is lost then, but no broker
    has the place any more. Where a record is missing the place stays, and reading from it says what is lost.
    """
    return replace(
        start,
        streamlets={
            streamlet: tuple(
                _on(offset, bounds[streamlet][entry]) if entry < len(bounds.get(streamlet, ())) else offset
                for entry, offset in enumerate(offsets)
            )
            for streamlet, offsets in start.streamlets.items()
        },
    )


def _on(offset: EntryOffset, there: Bounds) -> EntryOffset:
    gone = offset.position < there.start and offset.record == there.first_record
    return EntryOffset(there.start, offset.record) if gone else offset


def cap(
    heads: Mapping[int, tuple[EntryOffset, ...]], target: Mapping[int, tuple[EntryOffset, ...]]
) -> dict[int, tuple[EntryOffset, ...]]:
    """`heads`, but nowhere beyond `target`: what ``availableNow`` may read."""
    return {
        streamlet: tuple(min(pair) for pair in zip(entries, target.get(streamlet, entries), strict=True))
        for streamlet, entries in heads.items()
    }


def shares(start: StreamOffsets, end: StreamOffsets, records_max: int) -> dict[Lane, int]:
    """How many records each entry may give, so that all together stay within `records_max`.

    In proportion to what waits, so that no entry falls behind the others; at least 1 where anything waits. (Chunks are
    whole: an entry that may give any record gives at least one chunk, and the limit is met to within that.)
    """
    before = dict(start.lanes())
    waiting = {
        lane: max(offset.record - before[lane].record, int(offset.position > before[lane].position))
        for lane, offset in end.lanes()
        if lane in before
    }
    total = sum(waiting.values())
    if total <= records_max:
        return waiting
    return {lane: max(1, records * records_max // total) if records else 0 for lane, records in waiting.items()}


def partitions(start: StreamOffsets, end: StreamOffsets, *, typed: bool) -> list[KeraPartition]:
    """One partition per entry that has records between `start` and `end`."""
    before = dict(start.lanes())
    planned = []
    for (streamlet, entry), offset in end.lanes():
        begin = before.get((streamlet, entry))
        if begin is None or begin.position >= offset.position:
            continue
        planned.append(
            KeraPartition(
                stream=end.stream,
                entry=EntryId(end.stream_id, streamlet, entry),
                start=begin.position,
                end=offset.position,
                records=offset.record - begin.record,
                typed=typed,
            )
        )
    return planned
