"""Decides which epoch comes next, and whether it is closed, from the progress of all entries. Pure.

An epoch is closed when no entry can get more records of it: each entry has gone beyond its end, or its broker has
promised that no older records follow (listing 4.1 of the dissertation uses a vector with a time for each channel).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

EntryT = TypeVar("EntryT", bound=Hashable)


class Reached(NamedTuple, Generic[EntryT]):
    """The progress of an entry."""

    entry: EntryT
    pending: int | None
    """The epoch of its next chunk; None: no chunk is at hand."""
    open: int | None
    """The first epoch that may still get chunks, behind the available ones; None: it holds up no epoch."""


class Decision(NamedTuple, Generic[EntryT]):
    """The next step."""

    epoch: int | None
    """The first epoch at hand; None: no chunks are at hand."""
    waits_for: tuple[EntryT, ...]
    """The entries that hold it up; empty: the epoch is closed."""


def decide(entries: Iterable[Reached[EntryT]]) -> Decision[EntryT]:
    """Return the next epoch that is not empty, and the entries that hold it up."""
    entries = list(entries)
    epoch = min((each.pending for each in entries if each.pending is not None), default=None)
    if epoch is None:
        return Decision(None, tuple(each.entry for each in entries if each.open is not None))
    return Decision(epoch, tuple(each.entry for each in entries if each.open is not None and each.open <= epoch))
