"""Which epoch comes next, and whether it is closed: of several entries, by how far each has got. Pure.

An epoch is closed when no entry can get anything of it any more: each has gone beyond its end, or its broker has
promised that nothing older comes (listing 4.1 of the dissertation goes by a vector of times, one of each channel).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

EntryT = TypeVar("EntryT", bound=Hashable)


class Reached(NamedTuple, Generic[EntryT]):
    """How far an entry has got."""

    entry: EntryT
    pending: int | None
    """The epoch of what comes next of it; None: nothing is at hand."""
    open: int | None
    """The first epoch of which something may still come behind what is at hand; None: of none, ever."""


class Decision(NamedTuple, Generic[EntryT]):
    """The next step."""

    epoch: int | None
    """The first epoch at hand; None: there is nothing at hand."""
    waits_for: tuple[EntryT, ...]
    """The entries that hold it up; none: it is closed."""


def decide(entries: Iterable[Reached[EntryT]]) -> Decision[EntryT]:
    """The next epoch in which there is anything, and who holds it up."""
    entries = list(entries)
    epoch = min((each.pending for each in entries if each.pending is not None), default=None)
    if epoch is None:
        return Decision(None, tuple(each.entry for each in entries if each.open is not None))
    return Decision(epoch, tuple(each.entry for each in entries if each.open is not None and each.open <= epoch))
