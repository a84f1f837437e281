"""Real-time mode: one long-running task per entry, which reads on from a place without an end.

A micro-batch then ends wherever the tasks are when its time is up, also within a chunk. Such a place is the position
of the chunk, with the ordinal of the next record.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kera.core.errors import InvalidArgument
from kera.core.ids import EntryId, Position
from kera.spark_connector.offsets import EntryOffset, Lane, Offsets
from kera.spark_connector.planning.advancing import Advance
from kera.spark_connector.planning.now import Now


@dataclass(frozen=True)
class Tail:
    """Everything of one entry from a place on, read by one task."""

    stream: str
    entry: EntryId
    start: Position
    first_record: int
    """Ordinal of the first record that it has to give; see `Piece.first_record`."""
    typed: bool
    fail_on_data_loss: bool


def tails(start: Offsets, now: Now, *, fail_on_data_loss: bool) -> list[Tail]:
    """One per entry of `start` (of an `Advance`: what is there now), in order."""
    return [
        Tail(
            stream=lane.stream,
            entry=EntryId(now[lane.stream].stream_id, lane.streamlet, lane.entry),
            start=place.position,
            first_record=place.record,
            typed=now[lane.stream].typed,
            fail_on_data_loss=fail_on_data_loss,
        )
        for lane, place in start.lanes()
    ]


def moved(advance: Advance, places: Iterable[tuple[Lane, EntryOffset]]) -> Offsets:
    """Where the micro-batch ends that began at ``advance.start``, when its tasks have come to `places`; never before
    its start. Raises `InvalidArgument` for a place in an entry that was not read.
    """
    ends = advance.start.places()
    for lane, place in places:
        if lane not in ends:
            raise InvalidArgument(f"{lane} is not read by this micro-batch", **lane._asdict())
        ends[lane] = max(ends[lane], place)
    return Offsets.of(ends, advance.start.stream_ids())
