"""Real-time mode: one long-running task per entry, which reads from a place on without an end.

A micro-batch then ends wherever the tasks are when its time is up, even within a chunk. Such a place is the position
of the chunk, with the ordinal of the next record. If the query is killed then, and continues with another trigger,
Spark plans that micro-batch again. Its end is then rounded up to the chunk's end, and the piece with that chunk gets
the place where it stops.

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
    """The end of a micro-batch within a chunk."""

    place: EntryOffset
    """The start of the chunk, and its first record that is not part of the micro-batch."""
    behind: EntryOffset
    """The end of the chunk."""


Stops = Mapping[EntryName, Stop]


@dataclass(frozen=True)
class Tail:
    """All records of one entry from a place on, read by one task."""

    stream: str
    entry: EntryId
    start: Position
    first_record: int
    """Ordinal of the first record to yield; see `Piece.first_record`."""
    typed: bool
    fail_on_data_loss: bool


def tails(start: Offsets, now: Now, *, fail_on_data_loss: bool) -> list[Tail]:
    """Return one tail per entry of `start` (of an `Advance`, so that all entries exist now), in order."""
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
    """Return the end of the micro-batch that began at ``advance.start``, and whose tasks have come to `places`.

    The end is never before the start. Raises `InvalidArgument` for a place in an entry that was not read.
    """
    ends = advance.start.places()
    for entry, place in places:
        if entry not in ends:
            raise InvalidArgument(f"{entry} is not read by this micro-batch", **entry._asdict())
        ends[entry] = max(ends[entry], place)
    return Offsets.of(ends, advance.start.stream_ids())


def rounded(planned: Planned, chunks: Mapping[EntryName, tuple[EntryOffset, EntryOffset]]) -> tuple[Planned, Stops]:
    """Return `planned` with its ends rounded up to ends of chunks, and the real ends within these chunks.

    `chunks`: start and end of the chunk at the end of the micro-batch, for entries with data to read.
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
    """Return `pieces`, where those with a last chunk in `stops` end within that chunk."""
    found = []
    for piece in pieces:
        stop = stops.get(EntryName(piece.stream, piece.entry.streamlet_id, piece.entry.entry))
        if stop is not None and piece.end == stop.behind.position:
            less = stop.behind.record - stop.place.record
            piece = replace(piece, stop=stop.place, records=piece.records - less)  # noqa: PLW2901 - the same, shorter
        found.append(piece)
    return found
