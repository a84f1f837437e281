"""Ranges that are fetched and their arrivals: the interface between a `Fetcher` and its users."""

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
    """All of a group from a position on, up to `end`; without one, it ends where the next group of its entry begins."""
    return Wanted(entry, start, end or Position(start.group_id, _LAST, _LAST))


class Range:
    """The rest of an entry, or of one of its groups, that has to be read."""

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
        """It is a group that nobody knows the end of, so what follows it tells the end when it is pushed."""
        self.stop: Callable[[], object] | None = None
        """Has whoever reads it do so no more."""
        self.pull_until_s: float | None = None
        """It is pulled until then, though its broker may be able to push; None: not so."""
        self.cut_at: Position | None = None
        """Data from this position on are not delivered."""
        self.closed = False
        """It has come to its end, or nobody wants it any more."""
        self.dropped = False
        """Its data are no longer needed here, or belong to another member."""

    @property
    def ends_with_group(self) -> bool:
        """It is a group up to its end, wherever that is."""
        return self.is_group and self.wanted.end is not None and self.wanted.end.segment_id == _LAST

    @property
    def at_end(self) -> bool:
        """Whether all of it has come."""
        return self.wanted.end is not None and self.wanted.start >= self.wanted.end

    def advance(self, position: Position) -> None:
        """All before `position` has come."""
        self.wanted = self.wanted._replace(start=position)


class Arrived(NamedTuple):
    """An arrival for a range: chunks, a notice of removed records, or its end."""

    range: Range
    fetched: Fetched | None = None
    """It may be without chunks, when all that came of it is that the range goes on at another place."""
    gap: DataLost | None = None
    """The removed records of a group; the data that come then are behind them."""
