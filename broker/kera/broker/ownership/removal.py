"""Removing what is left of streamlets that are not open here: on disk, and in memory that nobody has taken over."""

from __future__ import annotations

from collections.abc import Callable

from kera.broker.storage.persistence import PersistenceManager
from kera.broker.storage.restart import Restart
from kera.core.base.done import Done, nothing
from kera.core.errors import KeraError


class StreamletRemoval:
    """Belongs to one event loop."""

    def __init__(self, memory: PersistenceManager, restart: Restart) -> None:
        self._memory = memory
        self._restart = restart
        self._waiting: dict[tuple[int, int], list[Callable[[], None]]] = {}
        """Streamlets whose records and files are being removed, with who waits for that."""

    def remove(self, stream_id: int, streamlet_id: int, done: Done = nothing) -> None:
        """Remove what is left of a streamlet that is not open; `done` when its files are gone."""
        self._restart.drop_leftovers(lambda *streamlet: streamlet == (stream_id, streamlet_id))
        waiting = self._waiting.setdefault((stream_id, streamlet_id), [])

        def removed(error: KeraError | None) -> None:
            self._waiting.pop((stream_id, streamlet_id), None)
            for go_on in waiting:
                go_on()
            done(error)

        self._memory.removals.drop_streamlet(stream_id, streamlet_id, removed)

    def when_removed(self, stream_id: int, streamlet_id: int, go_on: Callable[[], None]) -> None:
        """Call `go_on` when nothing of an earlier time of the streamlet is being removed any more."""
        waiting = self._waiting.get((stream_id, streamlet_id))
        if waiting is None:
            go_on()
        else:
            waiting.append(go_on)
