"""Replicates data with too few replicas again, in the background, so slowly that writers and readers do not notice.

It handles one virtual segment (or extent of the backlog) after the other, piece by piece. For each piece, it loads the
chunks from disk if they are not in memory, appends them to the stream's repair log, and waits for the backups. A
setting bounds the pace.

Data that cannot be read is tried again when all other data is repaired, so it does not block repair.
The part of a virtual segment that can be read is replicated once, and not again with each attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from kera.broker.log.entry import Entry
from kera.broker.log.segment import Segment
from kera.broker.log.waiting import begun
from kera.broker.records import SegmentAddress
from kera.broker.replication.manager import Replication
from kera.broker.replication.virtual_segment import Batch, Extent, VirtualSegment
from kera.broker.storage.load_wait import until_loaded
from kera.broker.storage.persistence import PersistenceManager
from kera.core.base.done import Done
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger
from kera.core.errors import KeraError

log = get_logger("kera.repair")

REST_S = 0.1
"""Pause before the next look for work, when there was none."""
FAILED_REST_S = 1.0
"""Pause after a failure: of the disk, or because backups did not take a piece."""
LOAD_WAIT_S = 30.0
"""How long repair waits for memory to load a segment into, before it looks at others."""
SET_ASIDE_S = 10.0
"""How long what cannot be repaired waits for the next attempt, at least."""


class _Attempt:
    """The progress of an attempt to repair a virtual segment or an extent of the backlog, for the next attempt."""

    __slots__ = ("covered", "places", "retry_s")

    def __init__(self) -> None:
        self.covered: set[Extent] = set()
        """The extents that have new replicas."""
        self.places: set[VirtualSegment] = set()
        """The virtual segments that cover them."""
        self.retry_s = 0.0
        """When the next attempt is due, as a time of the loop."""


class Repair:
    """Replicates parts of the log with too few replicas again, in the background and at a bounded pace."""

    def __init__(
        self,
        replication: Replication,
        memory: PersistenceManager,
        *,
        find: Callable[[SegmentAddress], Entry | None],
        pump: Callable[[], None],
        bytes_per_s: Callable[[], int],
        rest_s: float = REST_S,
        failed_rest_s: float = FAILED_REST_S,
        set_aside_s: float = SET_ASIDE_S,
    ) -> None:
        self._replication = replication
        self._memory = memory
        self._find = find
        self._pump = pump
        self._bytes_per_s = bytes_per_s
        self._rest_s = rest_s
        self._failed_rest_s = failed_rest_s
        self._set_aside_s = set_aside_s
        self._attempts: dict[VirtualSegment | Extent, _Attempt] = {}
        """Repairs under way, and failed ones, which are tried again when there is nothing else to repair."""
        self._loop = asyncio.get_running_loop()
        self._free_s = 0.0
        """When the next piece may be sent, as a time of the loop."""
        self._failing = Repeated(log)

    async def run(self) -> None:
        """Repair for ever."""
        while True:
            try:
                found = await self._next()
                self._failing.over("repair goes on")
                if not found:
                    self._replication.backlog.rest()
                    await asyncio.sleep(self._rest_s)
            except KeraError as error:
                self._failing.goes_on("cannot repair now; retrying", error=str(error))
                self._replication.backlog.rest()  # failures that go on must not keep open what is covered again
                await asyncio.sleep(self._failed_rest_s)
            except Exception as error:  # noqa: BLE001 - a defect must not end all repair
                self._failing.goes_on("repair failed", level="error", exc_info=error)
                await asyncio.sleep(self._failed_rest_s)

    async def _next(self) -> bool:
        """Repair one virtual segment or extent; False if there is nothing to do now."""
        replication = self._replication
        backlog = replication.backlog
        if backlog.repairing:
            return False  # an earlier piece took too long, and is still under way
        todo = self._fresh() or self._due()
        if todo is None:
            return False
        attempt = self._attempts.setdefault(todo, _Attempt())
        try:
            await self._cover_rest(todo.extents if isinstance(todo, VirtualSegment) else [todo], attempt)
        except Exception:
            attempt.retry_s = self._loop.time() + self._set_aside_s
            raise
        del self._attempts[todo]
        if isinstance(todo, VirtualSegment):
            self._replaced(todo, attempt.places)
        else:
            with contextlib.suppress(ValueError):
                backlog.extents.remove(todo)
        return True

    def _fresh(self) -> VirtualSegment | Extent | None:
        """Return the next virtual segment or extent whose repair has not failed before."""
        backlog = self._replication.backlog
        old = backlog.next_deficient(self._attempts)
        if old is not None or not self._replication.backups.up_count:
            return old
        return next((extent for extent in backlog.extents if extent not in self._attempts), None)

    def _due(self) -> VirtualSegment | Extent | None:
        """Return what has waited for longest of what failed, if its next attempt is due; forget what is over."""
        replication, now_s = self._replication, self._loop.time()
        left = {*replication.coverage.deficient, *replication.backlog.extents} if self._attempts else set()
        self._attempts = {todo: attempt for todo, attempt in self._attempts.items() if todo in left}
        usable = replication.backups.usable(replication.logs.now_ms)
        due = [
            todo
            for todo, attempt in self._attempts.items()
            if attempt.retry_s <= now_s and (todo.wanted if isinstance(todo, VirtualSegment) else 1) <= usable
        ]
        return min(due, key=lambda todo: self._attempts[todo].retry_s, default=None)

    def _replaced(self, old: VirtualSegment, places: set[VirtualSegment]) -> None:
        coverage, opened = self._replication.coverage, self._replication.logs.opened
        known = {
            place
            for place in places
            if place.virtual_segment_id in opened or place.virtual_segment_id in coverage.segments
        }  # the others were replaced themselves meanwhile, or the log has none of their data any more
        coverage.replaced(old, known)

    async def _cover_rest(self, extents: Iterable[Extent], attempt: _Attempt) -> None:
        """Cover the extents that earlier attempts have not covered. Raises the first error of those that cannot be
        read, once all others are covered.
        """
        unreadable: KeraError | None = None
        for extent in extents:
            if extent in attempt.covered:
                continue
            try:
                await self._in_memory(extent.address)
            except KeraError as error:
                unreadable = unreadable or error
                continue
            await self._cover(extent, attempt.places)
            attempt.covered.add(extent)
        if unreadable is not None:
            raise unreadable

    async def _cover(self, extent: Extent, places: set[VirtualSegment]) -> None:
        """Replicate the data that is left of an extent; add the virtual segments that have it now to `places`."""
        segment = await self._in_memory(extent.address)
        if segment is not None:
            for start, end in segment.intact(extent.start, min(extent.end, segment.head)):
                await self._cover_part(segment, start, end, places)

    async def _cover_part(self, segment: Segment, start: int, end: int, places: set[VirtualSegment]) -> None:
        segment.slot.pin()
        try:
            for first, last in segment.pieces(start, end, self._replication.limits.request_bytes_max):
                await self._wait_for_turn(last - first)
                batch: Batch | None = None

                def begin(done: Done, first: int = first, last: int = last) -> None:
                    nonlocal batch
                    batch = self._replication.backlog.cover(segment, first, last, done)
                    if batch is None:
                        done(None)  # the stream is gone
                    self._pump()

                error = await begun(begin)
                if batch is None:
                    return
                if error is not None:
                    await self._until_over(batch, error)
                if batch.place is not None:
                    places.add(batch.place)
        finally:
            segment.slot.unpin()

    async def _until_over(self, batch: Batch, error: KeraError) -> None:
        """Wait for a piece that takes too long: sent again, backups would have it twice. Raises if it is given up."""
        while not batch.over:
            self._failing.goes_on("cannot repair now; waiting for backups", error=str(error))
            await asyncio.sleep(self._rest_s)
        if not batch.completed:
            raise error

    async def _in_memory(self, address: SegmentAddress) -> Segment | None:
        """Return the segment, loaded from disk if necessary; None if it was removed. Raises if it cannot be loaded."""
        while True:
            entry = self._find(address)
            found = entry.find((address.group_id, address.segment_id)) if entry is not None else None
            if entry is None or found is None:
                return None
            if isinstance(found, Segment) and not found.loading:
                return found
            key, until_s = (address.group_id, address.segment_id), self._loop.time() + LOAD_WAIT_S
            await until_loaded(self._memory.loads, entry, key, until_s)

    async def _wait_for_turn(self, size: int) -> None:
        now_s = self._loop.time()
        if self._free_s > now_s:
            await asyncio.sleep(self._free_s - now_s)
        self._free_s = max(self._free_s, self._loop.time()) + size / self._bytes_per_s()
