"""The interface of sources and targets: pieces, and the places between which they lie.

A source has parts (the partitions of a topic, the entries of a stream, or just one), each with its own order. A place
is a position in a part; only the source interprets it, and other code stores it as JSON.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import pyarrow as pa

Place: TypeAlias = Any
"""JSON that only its source interprets."""


class Piece(NamedTuple):
    """Consecutive rows of one part of a source."""

    part: str
    start: Place
    """The place where the piece begins."""
    end: Place
    """The place where the next piece begins."""
    rows: pa.RecordBatch
    streamlet: int | None = None
    """The streamlet for all rows, if the target is a stream; None: the stream decides."""
    digest: str = ""
    """See `Span`."""
    everywhere: bool = False
    """Whether each streamlet of a stream gets all rows, because they concern every key."""
    row_places: Sequence[int] | None = None
    """The place of each row, if places are numbers with gaps, such as Kafka's offsets; None: they are not known."""


class Span(NamedTuple):
    """The range of a piece, with all that is needed to read it again."""

    part: str
    start: Place
    end: Place
    rows: int
    digest: str = ""
    """A digest of the rows, made and read only by the source, to see whether rows are the same when it reads again."""


class Progress(NamedTuple):
    """The progress of a copy, as stored in its target."""

    places: Mapping[str, Place]
    """Per part, the place where the copy continues; a part without a place has not been begun."""
    records: int = 0
    """Number of records copied so far."""
    unsure: Sequence[Span] = ()
    """Spans before `places` that may or may not be written; the target needs their rows again."""


class Source(Protocol):
    """The source of a copy."""

    schema: pa.Schema
    """Schema of the rows; known once the source is open."""
    may_shrink: bool
    """Whether rows between two places may vanish with time (as in a compacted topic); none are ever added there."""
    shown: str
    """A description in words without secrets."""
    identity: str
    """A unique and constant name of the source; known once it is open."""
    notes: list[str]
    """Notes for users on how the source is read."""
    streamlets: int
    """If pieces name their streamlets, the number of streamlets of a stream that takes them so; 0: they do not."""

    async def open(self) -> None:
        """Connect, and check that the data to copy exist."""
        ...

    async def left(self, places: Mapping[str, Place]) -> int | None:
        """Return about how many records come after these places, up to the present end; None: it is not known."""
        ...

    def read(self, places: Mapping[str, Place], piece_bytes: int) -> AsyncGenerator[Piece, None]:
        """Yield the pieces after `places`, of about `piece_bytes` each: up to the end, or for ever when following."""
        ...

    async def again(self, spans: Sequence[Span]) -> list[pa.RecordBatch | None]:
        """Read the rows of each span again; None for a span that now has other rows, and can be copied anew.

        Raises `SourceChanged` if rows are missing that cannot be copied anew.
        """
        ...

    async def kept(self, places: Mapping[str, Place]) -> None:
        """Release data before these places, if the source holds any: the target never asks for them again."""
        ...

    async def close(self) -> None:
        """Disconnect. May also be called before `open`."""
        ...


class Sink(Protocol):
    """The target of a copy. Only the target stores the copy's progress."""

    shown: str
    """A description in words without secrets."""
    piece_bytes: int
    """The preferred size of pieces; known once the target is open."""
    notes: list[str]
    """Notes for users on how the target is written."""

    async def open(self, source: Source) -> Progress:
        """Connect, create what the rows of `source` need, and return the progress of the copy."""
        ...

    async def settle(self, rows: Sequence[pa.RecordBatch | None]) -> Progress:
        """Ensure that the unsure spans of `open` are stored once; `rows` has their rows, span by span.

        Return where the copy continues. With None for any span, that is where the unsure spans begin: all of them are
        copied anew, so some of their rows may be stored twice.
        """
        ...

    async def put(self, pieces: Sequence[Piece]) -> Mapping[str, Place]:
        """Write `pieces` and the progress after them: both or neither, however this ends.

        Return the places before which this copy never reads from its source again; see `Source.kept`.
        """
        ...

    async def finish(self, *, complete: bool) -> Mapping[str, Place]:
        """End the writing, and make held-back rows visible. `complete`: the source has reached its end.

        Return the same as `put`.
        """
        ...

    async def close(self) -> None:
        """Disconnect, and discard rows that were not `put`."""
        ...
