"""The facts about the cluster that planning needs: ``survey`` asks for them, once per planning step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kera.core.base.ids import Position
from kera.spark_connector.planning.offsets import EntryName, EntryOffset, Offsets, StreamOffsets

if TYPE_CHECKING:
    import pyarrow as pa

    from kera.client import Assignment, EntryBounds


@dataclass(frozen=True)
class StreamNow:
    """A stream as it is now (asked of the coordinator and the brokers, not remembered)."""

    name: str
    stream_id: int
    typed: bool
    schema: pa.Schema
    bounds: Mapping[int, Sequence[EntryBounds]]
    """Per streamlet that is subscribed (`Subscription.streamlets`), one per entry."""
    assignments: Mapping[int, Assignment] = field(default_factory=dict)
    """Per streamlet: `StreamDescription.assignments`. Where one is missing its range has no known broker, and is not
    split between brokers."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """The node id of each broker, as far as known."""
    epoch_ms: int = 0
    """How long its epochs are; 0: it has none."""
    is_by_clock: bool = False
    """Whether its brokers are to promise that nothing older comes."""


Now = Mapping[str, StreamNow]
"""All streams that are subscribed and exist, under their names (`Subscription.select`)."""


def heads(now: Now) -> Offsets:
    """The durable head of every entry: also what `prepareForTriggerAvailableNow` keeps for `cap`."""
    return Offsets(
        {
            name: StreamOffsets(
                stream.stream_id,
                {streamlet: tuple(map(last_of, entries)) for streamlet, entries in sorted(stream.bounds.items())},
            )
            for name, stream in sorted(now.items())
        }
    )


def first_of(there: EntryBounds) -> EntryOffset:
    """The first record that is there."""
    return EntryOffset(there.start, there.first_record)


def last_of(there: EntryBounds) -> EntryOffset:
    """The durable head."""
    return EntryOffset(there.end, there.next_record)


def may_be_lost(there: EntryBounds, position: Position) -> bool:
    """Whether something behind `position` may have been lost with a broker's memory."""
    return there.lost is not None and there.lost[0] <= position < there.lost[1]


def bounds_of(now: Now, entry: EntryName) -> EntryBounds:
    """The bounds of an entry that is there."""
    return now[entry.stream].bounds[entry.streamlet][entry.entry]


def find_bounds(now: Now, entry: EntryName) -> EntryBounds | None:
    """The bounds of an entry that may have gone."""
    entries = now[entry.stream].bounds.get(entry.streamlet, ()) if entry.stream in now else ()
    return entries[entry.entry] if entry.entry < len(entries) else None
