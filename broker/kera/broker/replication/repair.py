"""Replicates data with too few replicas again, in the background, so slowly that writers and readers do not notice.

It handles one virtual segment (or extent of the backlog) after the other, piece by piece. For each piece, it loads the
chunks from disk if they are not in memory, appends them to the stream's repair log, and waits for the backups. A
setting bounds the pace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

from kera.broker.log.entry import Entry
from kera.broker.log.segment import Segment
from kera.broker.log.waiting import until_done
from kera.broker.records import SegmentAddress
from kera.broker.replication.manager import Replication
from kera.broker.replication.virtual_segment import Batch, Extent, VirtualSegment
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
    ) -> None:
        self._replication = replication
        self._memory = memory
        self._find = find
        self._pump = pump
        self._bytes_per_s = bytes_per_s
        self._rest_s = rest_s
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
                self._replication.backlog.extents.rotate(-1)  # so an unreadable extent does not block the others
                await asyncio.sleep(FAILED_REST_S)
            except Exception as error:  # noqa: BLE001 - a defect must not end all repair
                self._failing.goes_on("repair failed", level="error", exc_info=error)
                await asyncio.sleep(FAILED_REST_S)

    async def _next(self) -> bool:
        """Repair one virtual segment or extent; False if there is nothing to do now."""
        replication = self._replication
        backlog = replication.backlog
        if backlog.repairing:
            return False  # an earlier piece took too long, and is still under way
        old = backlog.next_deficient()
        if old is not None:
            new = await self._cover(old.extents)
            replication.coverage.replaced(old, new)
            return True
        if backlog.extents and replication.backups.up_count:
            extent = backlog.extents[0]
            await self._cover([extent])
            if backlog.extents and backlog.extents[0] is extent:
                backlog.extents.popleft()
            return True
        return False

    async def _cover(self, extents: Iterable[Extent]) -> set[VirtualSegment]:
        """Replicate the data that is left of `extents`; return the virtual segments that have it now."""
        places: set[VirtualSegment] = set()
        for extent in extents:
            segment = await self._in_memory(extent.address)
            if segment is not None:
                for start, end in segment.intact(extent.start, min(extent.end, segment.head)):
                    await self._cover_part(segment, start, end, places)
        return places

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

                await until_done(begin)
                if batch is None:
                    return
                if batch.place is not None:
                    places.add(batch.place)
        finally:
            segment.slot.unpin()

    async def _in_memory(self, address: SegmentAddress) -> Segment | None:
        """Return the segment, loaded from disk if necessary; None if it was removed. Raises `DiskFailed`."""
        while True:
            entry = self._find(address)
            found = entry.find((address.group_id, address.segment_id)) if entry is not None else None
            if entry is None or found is None:
                return None
            if isinstance(found, Segment) and not found.loading:
                return found
            await until_done(partial(self._memory.loads.load, entry, (address.group_id, address.segment_id)))

    async def _wait_for_turn(self, size: int) -> None:
        now_s = self._loop.time()
        if self._free_s > now_s:
            await asyncio.sleep(self._free_s - now_s)
        self._free_s = max(self._free_s, self._loop.time()) + size / self._bytes_per_s()
