"""Where entries start by now, until the coordinator knows: retention and truncation move starts, and so do moves.

Promise: of a replicated stream nothing is removed before the coordinator knows that it goes. A recovery that did not
know would take for a loss what is missing on backups; or find nothing at all, and number the next records as those
were.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

from kera.broker.log.entry import Entry
from kera.core.base.done import Done, nothing
from kera.core.base.ids import Position
from kera.core.errors import KeraError, NotOwner


class MovedStarts:
    """Entries whose start the coordinator has yet to hear of. Belongs to the broker's loop."""

    def __init__(self, collect: Callable[[Entry, Done], None]) -> None:
        """`collect`: removes what is before an entry's start."""
        self._collect = collect
        self._untold: dict[Entry, list[Done]] = {}
        """With what is done when that is gone which was before it, and is still there."""
        self.hurry = asyncio.Event()
        """Somebody waits for it: the coordinator is to be told at once. Whoever sends heartbeats clears it."""

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._untold)

    def move(self, entry: Entry, position: Position, record: int, done: Done = nothing, *, replicated: bool) -> None:
        """Nobody reads any more what is before a position; it is removed when it may be; `done` when it is gone."""
        entry.move_start(position, record)
        untold = self._untold.setdefault(entry, [])
        if replicated:
            if done is not nothing or not untold:
                untold.append(done)
            if done is not nothing:
                self.hurry.set()
        else:
            self._collect(entry, done)

    def note(self, entries: Iterable[Entry]) -> None:
        """The coordinator is to hear where these start, though nothing that they have goes by that."""
        for entry in entries:
            self._untold.setdefault(entry, [])

    def forget(self, entry: Entry) -> None:
        """It is not here any more, as whoever waits for a removal is told."""
        for done in self._untold.pop(entry, []):
            done(NotOwner(f"streamlet {entry.log_id.streamlet_id} left this broker while it was truncated"))

    def when_removed(self, entry: Entry, done: Done) -> None:
        """`done` when that is gone for good which somebody has had removed."""
        untold = self._untold.get(entry)
        if untold:
            untold.append(done)
            self.hurry.set()
        else:
            self._collect(entry, done)  # it may be under way

    def refused(self, entry: Entry) -> None:
        """Others recover it from the replicas that it has: nothing is removed. Whoever waits for that asks them."""
        if (waiting := self._untold.pop(entry, None)) is None:
            return
        self._untold[entry] = [nothing] if waiting else []  # behind the others, which may be told meanwhile
        for done in waiting:
            done(
                NotOwner(
                    f"streamlet {entry.log_id.streamlet_id} is being recovered by another broker from replicas of this"
                    " one, so its records cannot be removed here; ask that broker"
                )
            )

    def told(self, entry: Entry) -> None:
        """The coordinator knows where an entry starts."""
        waiting = self._untold.pop(entry, [])

        def done(error: KeraError | None) -> None:
            for each in waiting:
                each(error)

        if waiting:
            self._collect(entry, done)
