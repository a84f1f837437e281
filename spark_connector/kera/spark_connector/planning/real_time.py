"""Real-time mode: one long-running task per entry, which reads on from a place without an end.

A micro-batch then ends wherever the tasks are when its time is up, also within a chunk. Such a place is the position
of the chunk, with the ordinal of the next record. A query that was killed just then, and goes on with another trigger,
has that micro-batch planned again: then its end is rounded to that of the chunk, and the piece that reads the chunk is
told where to stop.

    revise ─► rounded ─(locate)─► ranges, cut ─► stopped
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from kera.core.base.ids import EntryId, Position
from kera.core.errors import InvalidArgument
from kera.spark_connector.planning.advancing import Advance, Planned
from kera.spark_connector.planning.cutting import Piece
from kera.spark_connector.planning.now import Now
from kera.spark_connector.planning.offsets import EntryName, EntryOffset, Offsets


class Stop(NamedTuple):
    """Where a micro-batch ends within a chunk."""

    place: EntryOffset
    """Where the chunk starts, and the first record of it that is not of the micro-batch."""
    behind: EntryOffset
    """Where the chunk ends."""


Stops = Mapping[EntryName, Stop]


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
            stream=entry.stream,
            entry=EntryId(now[entry.stream].stream_id, entry.streamlet, entry.entry),
            start=place.position,
            first_record=place.record,
            typed=now[entry.stream].typed,
            fail_on_data_loss=fail_on_data_loss,
        )
        for entry, place in start.entries()
    ]


def moved(advance: Advance, places: Iterable[tuple[EntryName, EntryOffset]]) -> Offsets:
    """Where the micro-batch ends that began at ``advance.start``, when its tasks have come to `places`; never before
    its start. Raises `InvalidArgument` for a place in an entry that was not read.
    """
    ends = advance.start.places()
    for entry, place in places:
        if entry not in ends:
            raise InvalidArgument(f"{entry} is not read by this micro-batch", **entry._asdict())
        ends[entry] = max(ends[entry], place)
    return Offsets.of(ends, advance.start.stream_ids())


def rounded(planned: Planned, chunks: Mapping[EntryName, tuple[EntryOffset, EntryOffset]]) -> tuple[Planned, Stops]:
    """`planned` with ends that are ends of chunks, and where in these chunks it ends really.

    `chunks`: of the entries that have something to read, the chunk at the end of the micro-batch: its start and end.
    """
    stops: dict[EntryName, Stop] = {}
    ends = planned.end.places()
    for entry, (chunk, behind) in chunks.items():
        stop = ends[entry]
        if chunk.record < stop.record < behind.record:
            stops[entry] = Stop(stop, behind)
            ends[entry] = behind
    if not stops:
        return planned, stops
    return replace(planned, end=Offsets.of(ends, planned.end.stream_ids())), stops


def stopped(pieces: Iterable[Piece], stops: Stops) -> list[Piece]:
    """`pieces`, with what is read of a last chunk up to a place within it."""
    found = []
    for piece in pieces:
        stop = stops.get(EntryName(piece.stream, piece.entry.streamlet_id, piece.entry.entry))
        if stop is not None and piece.end == stop.behind.position:
            less = stop.behind.record - stop.place.record
            piece = replace(piece, stop=stop.place, records=piece.records - less)  # noqa: PLW2901 - the same, shorter
        found.append(piece)
    return found
