"""The interface of sources and targets: pieces, and the places between which they lie.

A source has parts (the partitions of a topic, the entries of a stream, or just one), each with an order of its own. A
place says where in a part one is; only the source knows what it means, and others keep it as the JSON that it is.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import pyarrow as pa

Place: TypeAlias = Any
"""JSON that means something to its source."""


class Piece(NamedTuple):
    """Rows of one part of a source that follow each other."""

    part: str
    start: Place
    """Where the piece begins."""
    end: Place
    """Where the next one does."""
    rows: pa.RecordBatch
    streamlet: int | None = None
    """Where a stream is to have all of it; None: it decides."""
    digest: str = ""
    """See `Span`."""
    everywhere: bool = False
    """Each streamlet of a stream gets all rows: they concern every key."""
    row_places: Sequence[int] | None = None
    """The place of each row, where places are numbers with gaps, such as offsets of Kafka; None: they are not known."""


class Span(NamedTuple):
    """Which rows a piece had: what is needed to read it again."""

    part: str
    start: Place
    end: Place
    rows: int
    digest: str = ""
    """Written by the source, for itself: it tells whether the rows are the same when they are read again."""


class Progress(NamedTuple):
    """How far a copy has got, as its target says."""

    places: Mapping[str, Place]
    """Per part, where it goes on; a part that is missing has not been begun."""
    records: int = 0
    """Copied so far."""
    unsure: Sequence[Span] = ()
    """These, before `places`, may have been written or not: the target has to be given them again."""


class Source(Protocol):
    """Where a copy comes from."""

    schema: pa.Schema
    """Schema of the rows; known once it is open."""
    may_shrink: bool
    """Rows between two places may go with time (of a topic that is compacted), and none ever come."""
    shown: str
    """A description in words without secrets."""
    identity: str
    """The same each time, and of no other source; known once it is open."""
    notes: list[str]
    """Notes for users on how it is read."""
    streamlets: int
    """Its pieces say where a stream of so many streamlets is to have them; 0: they do not."""

    async def open(self) -> None:
        """Connect, and see that what is to be copied is there."""
        ...

    async def left(self, places: Mapping[str, Place]) -> int | None:
        """About how many records come after these places, up to the end as it is now; None: nobody knows."""
        ...

    def read(self, places: Mapping[str, Place], piece_bytes: int) -> AsyncGenerator[Piece, None]:
        """The pieces after `places`, of about `piece_bytes` each: to the end, or for ever if it is followed."""
        ...

    async def again(self, spans: Sequence[Span]) -> list[pa.RecordBatch | None]:
        """The rows of each span, once more; None for a span that has other rows now, and can be copied anew.

        Raises `SourceChanged` if rows are gone that cannot be copied anew.
        """
        ...

    async def kept(self, places: Mapping[str, Place]) -> None:
        """The target never asks for anything before these places again: the source may let go of it."""
        ...

    async def close(self) -> None:
        """Disconnect; also without having been opened."""
        ...


class Sink(Protocol):
    """Where a copy goes. It alone says how far the copy has got."""

    shown: str
    """A description in words without secrets."""
    piece_bytes: int
    """Pieces of about this size suit it; known once it is open."""
    notes: list[str]
    """Notes for users on how it is written."""

    async def open(self, source: Source) -> Progress:
        """Connect, make what is to be made for the rows of `source`, and see how far the copy was."""
        ...

    async def settle(self, rows: Sequence[pa.RecordBatch | None]) -> Progress:
        """Make sure that what `open` called unsure is there, once: these are its rows, span by span.

        Returns where the copy goes on. With None for a span, that is where the unsure spans begin: all of them are
        copied anew, so some of their rows may be there twice.
        """
        ...

    async def put(self, pieces: Sequence[Piece]) -> Mapping[str, Place]:
        """Write these and how far one is with them: both or neither, however this ends.

        Returns the places before which this copy never asks its source for anything again; see `Source.kept`.
        """
        ...

    async def finish(self, *, complete: bool) -> Mapping[str, Place]:
        """Nothing more is put: what is held back becomes visible. `complete`: the source has come to its end.

        Returns the same as `put`.
        """
        ...

    async def close(self) -> None:
        """Disconnect; what was not put is forgotten."""
        ...
