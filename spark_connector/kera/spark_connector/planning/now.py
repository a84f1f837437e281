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
    """A stream as it is now (the coordinator and the brokers were asked; nothing is cached)."""

    name: str
    stream_id: int
    typed: bool
    schema: pa.Schema
    bounds: Mapping[int, Sequence[EntryBounds]]
    """Per streamlet that is subscribed (`Subscription.streamlets`), one per entry."""
    assignments: Mapping[int, Assignment] = field(default_factory=dict)
    """Per streamlet: `StreamDescription.assignments`. The range of a streamlet without an assignment has no known
    broker, and is not split between brokers."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """The known node ids, by broker."""
    epoch_ms: int = 0
    """The length of the stream's epochs; 0: it has no epochs."""
    is_by_clock: bool = False
    """Whether the stream's brokers promise by the clock that no older records follow."""


Now = Mapping[str, StreamNow]
"""All streams that are subscribed and exist, under their names (`Subscription.select`)."""


def heads(now: Now) -> Offsets:
    """Return the durable head of every entry; `prepareForTriggerAvailableNow` also keeps them for `cap`."""
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
    """Return the place of the first record."""
    return EntryOffset(there.start, there.first_record)


def last_of(there: EntryBounds) -> EntryOffset:
    """Return the durable head."""
    return EntryOffset(there.end, there.next_record)


def may_be_lost(there: EntryBounds, position: Position) -> bool:
    """Return whether records after `position` may have been lost with a broker's memory."""
    return there.lost is not None and there.lost[0] <= position < there.lost[1]


def bounds_of(now: Now, entry: EntryName) -> EntryBounds:
    """Return the bounds of an entry that exists."""
    return now[entry.stream].bounds[entry.streamlet][entry.entry]


def find_bounds(now: Now, entry: EntryName) -> EntryBounds | None:
    """Return the bounds of an entry; None: it no longer exists."""
    entries = now[entry.stream].bounds.get(entry.streamlet, ()) if entry.stream in now else ()
    return entries[entry.entry] if entry.entry < len(entries) else None
