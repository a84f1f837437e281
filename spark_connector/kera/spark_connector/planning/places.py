"""Places as a query names them: words, positions and times. What they mean in a stream is up to ``resolving``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kera.core.base.ids import Position
from kera.spark_connector.planning.offsets import EntryOffset


@dataclass(frozen=True)
class Time:
    """A moment, either absolute or relative: exactly one field is set."""

    epoch_us: int | None = None
    ago_us: int | None = None
    """Microseconds before now."""

    def at(self, now_us: int) -> int:
        """Return the moment in microseconds since the epoch, if now is `now_us`."""
        return self.epoch_us if self.epoch_us is not None else now_us - (self.ago_us or 0)


Place = Literal["earliest", "latest"] | Position | EntryOffset | Time
"""The places that a user may give for one entry. (An `EntryOffset` is a position with the ordinal of its record.)"""


@dataclass(frozen=True)
class Where:
    """Where a query begins or ends."""

    option: str
    """The option with this place, for errors; also if this is the option's default."""
    everywhere: Place | None = None
    """One place for all entries of all streams; None: `streams` has the places."""
    streams: Mapping[str, Mapping[int, Place | list[Place]]] | None = None
    """Per stream and streamlet, one place for all of its entries or a list with one place for each."""
    unnamed: Literal["earliest", "latest"] | None = None
    """The place in a stream that `streams` does not name; None: it must name all streams."""
    behind: Literal["error", "latest"] = "latest"
    """The position that a time stands for in a streamlet without records at or after it."""
    stream_ids: Mapping[str, int] = field(default_factory=dict)
    """The incarnations of the streams to which the places belong, if the text has them."""

    @property
    def is_start(self) -> bool:
        """Whether this is a start and not an end."""
        return self.option.startswith("starting")

    @property
    def by_time(self) -> bool:
        """Whether the places are times and not offsets."""
        said = (
            [self.everywhere]
            if self.streams is None
            else [row for rows in self.streams.values() for row in rows.values()]
        )
        return any(isinstance(place, Time) for place in said)
