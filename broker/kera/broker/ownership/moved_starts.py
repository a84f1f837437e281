"""New starts of entries that the coordinator does not know yet, after retention, truncation or a streamlet's move.

Promise: data of a replicated stream is removed only after the coordinator knows its entry's new start. Otherwise a
recovery would take the data that is missing on backups for a loss; or it would find no data at all, and reuse the
ordinals of the removed records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

from kera.broker.log.entry import Entry
from kera.core.base.done import Done, nothing
from kera.core.base.ids import Position
from kera.core.errors import KeraError, NotOwner


class MovedStarts:
    """Entries whose new start the coordinator does not know yet. Belongs to the broker's loop."""

    def __init__(self, collect: Callable[[Entry, Done], None]) -> None:
        """`collect`: removes the data before an entry's start."""
        self._collect = collect
        self._untold: dict[Entry, list[Done]] = {}
        """The entries, each with the functions to call once the data before its start is removed."""
        self.hurry = asyncio.Event()
        """Set when a request waits, so the coordinator has to be told at once; the sender of heartbeats clears it."""

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._untold)

    def move(self, entry: Entry, position: Position, record: int, done: Done = nothing, *, replicated: bool) -> None:
        """Move the start of an entry to a position; the data before it is removed when allowed, then `done` is called.

        `replicated`: the coordinator has to know the start before.
        """
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
        """Report the starts of entries to the coordinator, although no data is removed."""
        for entry in entries:
            self._untold.setdefault(entry, [])

    def forget(self, entry: Entry) -> None:
        """Forget an entry that left this broker, and fail the removals that requests wait for."""
        for done in self._untold.pop(entry, []):
            done(NotOwner(f"streamlet {entry.log_id.streamlet_id} left this broker while it was truncated"))

    def when_removed(self, entry: Entry, done: Done) -> None:
        """Call `done` when the data before the entry's start is removed for good."""
        untold = self._untold.get(entry)
        if untold:
            untold.append(done)
            self.hurry.set()
        else:
            self._collect(entry, done)  # the removal may be under way

    def refused(self, entry: Entry) -> None:
        """Fail the waiting removals of an entry that another broker recovers from its replicas: nothing is removed."""
        if (waiting := self._untold.pop(entry, None)) is None:
            return
        self._untold[entry] = [nothing] if waiting else []  # behind the others, so these can be reported meanwhile
        for done in waiting:
            done(
                NotOwner(
                    f"streamlet {entry.log_id.streamlet_id} is being recovered by another broker from replicas of this"
                    " one, so its records cannot be removed here; ask that broker"
                )
            )

    def told(self, entry: Entry) -> None:
        """Note that the coordinator knows the start of an entry: remove the data before it."""
        waiting = self._untold.pop(entry, [])

        def done(error: KeraError | None) -> None:
            for each in waiting:
                each(error)

        if waiting:
            self._collect(entry, done)
