"""Ranges to fetch, and their arrivals: the interface between a `Fetcher` and its users."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kera.client.cluster.fetch import Fetched, Wanted
from kera.client.cluster.retry import RetryTime
from kera.core.base.ids import EntryId, Position
from kera.core.errors import DataLost

_LAST = (1 << 32) - 1

Home = tuple[int, int]
"""Stream and broker."""


def rest_of_group(entry: EntryId, start: Position, end: Position | None = None) -> Wanted:
    """Return the range of a group from a position up to `end`, or to the end of the group."""
    return Wanted(entry, start, end or Position(start.group_id, _LAST, _LAST))


class Range:
    """The part of an entry, or of one of its groups, that is still to be fetched."""

    __slots__ = (
        "closed",
        "cut_at",
        "dropped",
        "is_group",
        "open_end",
        "patience",
        "pull_until_s",
        "stop",
        "wanted",
    )

    def __init__(self, wanted: Wanted, patience: RetryTime, *, is_group: bool = False) -> None:
        self.wanted = wanted
        self.patience = patience
        self.is_group = is_group
        self.open_end = False
        """Whether it is a group whose end is not known: pushed data behind the group then show the end."""
        self.stop: Callable[[], object] | None = None
        """Makes the reader stop reading the range."""
        self.pull_until_s: float | None = None
        """Time until which it is pulled, although its broker may be able to push it; None: it need not be pulled."""
        self.cut_at: Position | None = None
        """Start of the data that are not delivered; None: all data are delivered."""
        self.closed = False
        """Whether it has come to its end, or was removed."""
        self.dropped = False
        """Whether its data are no longer needed here, or belong to another member."""

    @property
    def ends_with_group(self) -> bool:
        """Whether it is a group up to its end, wherever that is."""
        return self.is_group and self.wanted.end is not None and self.wanted.end.segment_id == _LAST

    @property
    def at_end(self) -> bool:
        """Whether all its data have come."""
        return self.wanted.end is not None and self.wanted.start >= self.wanted.end

    def advance(self, position: Position) -> None:
        """Note that all data before `position` have come."""
        self.wanted = self.wanted._replace(start=position)


class Arrived(NamedTuple):
    """An arrival for a range: chunks, a notice of removed records, or its end."""

    range: Range
    fetched: Fetched | None = None
    """The data; without chunks if only the position of the range has moved."""
    gap: DataLost | None = None
    """The removed records of a group; the following data are behind them."""
