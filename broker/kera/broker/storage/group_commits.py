"""Group commit: one write brings all appends to disk that have waited for level `persisted` since the last one. Pure.

This module keeps the waiting requests; ``kera.broker.storage.segment_writer`` writes their data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kera.broker.log.entry import Entry
from kera.broker.log.segment import Segment
from kera.broker.storage.books import Books
from kera.broker.storage.jobs import StoreJob
from kera.core.base.done import Done
from kera.core.errors import NotPersisted


@dataclass(slots=True)
class _Pending:
    """A request that waits until its data is durable on disk."""

    wanted: list[tuple[Segment, int]]
    done: Done


class GroupCommits:
    """Collects appends that wait for level `persisted`, and completes them when one commit has written them all."""

    def __init__(self, books: Books) -> None:
        self.dirty: dict[Entry, None] = {}
        """The entries that the next commit has to write."""
        self._books = books
        self._pending: list[_Pending] = []

    def persist(self, wanted: list[tuple[Segment, int]], done: Done) -> None:
        """Call `done` when each segment is durable on disk up to its offset, or with `NotPersisted`."""
        missing = [(segment, end) for segment, end in wanted if not segment.in_index and segment.stored < end]
        if not missing:
            done(None)
            return
        for segment, _ in missing:
            self.dirty[segment.entry] = None
        self._pending.append(_Pending(missing, done))
        self._books.events.disk_work()

    def written(self, job: StoreJob) -> None:
        """Complete or fail the requests that a performed job decides."""
        written = {part.segment for part in job.parts}

        def over(pending: _Pending) -> bool:
            pending.wanted = [
                (segment, end) for segment, end in pending.wanted if not segment.in_index and segment.stored < end
            ]
            if not pending.wanted:
                pending.done(None)
            elif _is_dropped(pending):
                pending.done(NotPersisted("the stream was deleted"))
            elif job.error is not None and any(segment in written for segment, _ in pending.wanted):
                cause = self._books.disk.full(job.error)
                for segment, _ in pending.wanted:
                    self.dirty[segment.entry] = None  # the next commit tries again
                pending.done(NotPersisted(cause.message, **cause.attributes))
            else:
                return False
            return True

        self._tell(over)

    def dropped(self) -> None:
        """Fail the requests that wait for dropped segments."""

        def over(pending: _Pending) -> bool:
            if _is_dropped(pending):
                pending.done(NotPersisted("the stream was deleted"))
                return True
            return False

        self._tell(over)

    def _tell(self, over: Callable[[_Pending], bool]) -> None:
        pending, self._pending = self._pending, []
        self._pending += [each for each in pending if not over(each)]


def _is_dropped(pending: _Pending) -> bool:
    return any(segment.dropped for segment, _ in pending.wanted)
