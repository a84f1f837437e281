"""What planning has to know of the cluster: ``survey`` asks for it, once per planning step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kera.core.ids import Position
from kera.spark_connector.offsets import EntryOffset, Lane, Offsets, StreamOffsets

if TYPE_CHECKING:
    import pyarrow as pa


class Bounds(Protocol):
    """Where one entry starts and ends: `kera.client.EntryBounds`."""

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

    @property
    def length_bytes(self) -> int:
        """Bytes of chunks between the two."""

    @property
    def lost(self) -> tuple[Position, Position] | None:
        """Between which places something may have been lost with a broker's memory; ordinals may begin anew there."""


class SegmentBounds(Protocol):
    """A part of a range that is in one segment at one broker: `kera.client.SegmentBounds`."""

    @property
    def start(self) -> Position:
        """First byte."""

    @property
    def end(self) -> Position:
        """One past the last byte; in the same segment as `start`."""

    @property
    def first_record(self) -> int:
        """Ordinal of the record at `start`."""

    @property
    def next_record(self) -> int:
        """One more than the ordinal of its last record."""

    @property
    def length_bytes(self) -> int:
        """Bytes of its chunks."""

    @property
    def broker_id(self) -> int:
        """Where it is."""


class Interval(Protocol):
    """Groups of a streamlet that are at one broker, up to those of the next interval: `kera.client.Interval`."""

    @property
    def first_group_id(self) -> int:
        """The first of the groups."""

    @property
    def broker_id(self) -> int:
        """Where they are."""


class Assignment(Protocol):
    """Where a streamlet's groups are: `kera.client.Assignment`."""

    @property
    def broker_id(self) -> int:
        """The owner."""

    @property
    def intervals(self) -> Sequence[Interval]:
        """In the order of their groups, the last one the owner's; empty: all groups are at the owner."""


@dataclass(frozen=True)
class StreamNow:
    """A stream as it is now (asked of the coordinator and the brokers, not remembered)."""

    name: str
    stream_id: int
    typed: bool
    schema: pa.Schema
    bounds: Mapping[int, Sequence[Bounds]]
    """Per streamlet that is subscribed (`Subscription.streamlets`), one per entry."""
    assignments: Mapping[int, Assignment] = field(default_factory=dict)
    """Per streamlet: `StreamDescription.assignments`. Where one is missing its range has no known broker, and is not
    split between brokers."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """The node id of each broker, as far as known."""


Now = Mapping[str, StreamNow]
"""All streams that are subscribed and exist, under their names (`Subscription.select`)."""


def starts(now: Now) -> Offsets:
    """The first record that is there, in every entry."""
    return _everywhere(now, first_of)


def heads(now: Now) -> Offsets:
    """The durable head of every entry: also what `prepareForTriggerAvailableNow` keeps for `cap`."""
    return _everywhere(now, last_of)


def first_of(there: Bounds) -> EntryOffset:
    """The first record that is there."""
    return EntryOffset(there.start, there.first_record)


def last_of(there: Bounds) -> EntryOffset:
    """The durable head."""
    return EntryOffset(there.end, there.next_record)


def may_be_lost(there: Bounds, position: Position) -> bool:
    """Whether something behind `position` may have been lost with a broker's memory."""
    return there.lost is not None and there.lost[0] <= position < there.lost[1]


def _everywhere(now: Now, place_of: Callable[[Bounds], EntryOffset]) -> Offsets:
    return Offsets(
        {
            name: StreamOffsets(
                stream.stream_id,
                {streamlet: tuple(map(place_of, entries)) for streamlet, entries in sorted(stream.bounds.items())},
            )
            for name, stream in sorted(now.items())
        }
    )


def bounds_of(now: Now, lane: Lane) -> Bounds:
    """The bounds of a lane that is there."""
    return now[lane.stream].bounds[lane.streamlet][lane.entry]


def find_bounds(now: Now, lane: Lane) -> Bounds | None:
    """The bounds of a lane that may have gone."""
    entries = now[lane.stream].bounds.get(lane.streamlet, ()) if lane.stream in now else ()
    return entries[lane.entry] if lane.entry < len(entries) else None
