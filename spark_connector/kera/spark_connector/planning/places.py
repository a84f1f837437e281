"""Places as a query names them: words, positions and times. What they mean in a stream is up to ``resolving``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kera.core.base.ids import Position
from kera.spark_connector.planning.offsets import EntryOffset


@dataclass(frozen=True)
class Time:
    """A moment: exactly one of the two is given."""

    epoch_us: int | None = None
    ago_us: int | None = None
    """Before now."""

    def at(self, now_us: int) -> int:
        """Microseconds since the epoch, when it is `now_us`."""
        return self.epoch_us if self.epoch_us is not None else now_us - (self.ago_us or 0)


Place = Literal["earliest", "latest"] | Position | EntryOffset | Time
"""The places that a user may give for one entry. (An `EntryOffset`: a position that came with the ordinal of its
record.)"""


@dataclass(frozen=True)
class Where:
    """Where a query begins or ends."""

    option: str
    """The option that says so, for errors; also when it is that option's default."""
    everywhere: Place | None = None
    """One place for all entries of all streams; else `streams` says where."""
    streams: Mapping[str, Mapping[int, Place | list[Place]]] | None = None
    """Per stream and streamlet one place for all of its entries, or a list with one for each."""
    unnamed: Literal["earliest", "latest"] | None = None
    """The place in a stream that `streams` does not name; None: naming it is required."""
    behind: Literal["error", "latest"] = "latest"
    """The meaning of a time without any record of a streamlet at or after it."""
    stream_ids: Mapping[str, int] = field(default_factory=dict)
    """The incarnation of streams that the places are of, where the text says so."""

    @property
    def is_start(self) -> bool:
        """A query begins there, and does not end."""
        return self.option.startswith("starting")

    @property
    def by_time(self) -> bool:
        """Whether times say where, and not offsets."""
        said = (
            [self.everywhere]
            if self.streams is None
            else [row for rows in self.streams.values() for row in rows.values()]
        )
        return any(isinstance(place, Time) for place in said)
