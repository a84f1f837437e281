"""Installs recovered segments that are complete: makes their files durable, and adds them to the index.

Files are synced in batches, on threads; the persistence manager does the rest (``kera.broker.storage.arrivals``). If
the disk fails, the installer tries again, and `failing` has the reason.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

from kera.broker.log.entry import Entry
from kera.broker.records import SegmentAddress
from kera.broker.recovery.assembly import Assembly, Target, make_durable
from kera.broker.recovery.progress import UNEXPECTED, of_disk
from kera.broker.storage.persistence import PersistenceManager
from kera.broker.storage.segment_files import SegmentStore
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger

log = get_logger("kera.recovery")

BATCH_MAX = 4
"""Maximum number of files that are synced together."""


class Installer:
    """Makes recovered segments durable and puts them into the index, in batches, until the disk has taken each.

    Belongs to one event loop.
    """

    def __init__(  # noqa: PLR0913 - what it asks, and whom it tells
        self,
        store: SegmentStore,
        memory: PersistenceManager,
        assembly: Assembly,
        threads: Executor,
        *,
        find: Callable[[SegmentAddress], Entry | None],
        on_installed: Callable[[Target], None],
        on_gone: Callable[[Target], None],
        on_unsure: Callable[[Target], None],
        retry_s: float,
    ) -> None:
        """Set the callbacks and the services that installing needs.

        `on_gone`: called if a segment was removed before it was installed; `on_unsure`: called if the content of its
        file is unknown after an error of the disk.
        """
        self._store = store
        self._memory = memory
        self._assembly = assembly
        self._threads = threads
        self._find = find
        self._on_installed = on_installed
        self._on_gone = on_gone
        self._on_unsure = on_unsure
        self._retry_s = retry_s
        self._complete: deque[Target] = deque()
        self._more = asyncio.Event()
        self.failing = ""
        """Why recovered data cannot be made durable; empty: it can."""
        self._cannot_sync = Repeated(log)

    def add(self, target: Target) -> None:
        """Queue a segment that is complete, or gets no more chunks."""
        target.installing = True
        self._complete.append(target)
        self._more.set()

    async def install_some(self) -> None:
        """Wait for complete segments, and install a batch of them."""
        while not self._complete:
            self._more.clear()
            await self._more.wait()
        batch = [self._complete.popleft() for _ in range(min(BATCH_MAX, len(self._complete)))]
        checksums: list[int] | None = None
        failing = UNEXPECTED
        try:
            run = asyncio.get_running_loop().run_in_executor
            checksums = await run(self._threads, make_durable, batch, self._store.disk, self._store.calls)
            failing = ""
            self._cannot_sync.over("recovered data can be synced again")
        except OSError as error:
            self._cannot_sync.goes_on("cannot sync recovered data; trying again", level="error", error=str(error))
            failing = of_disk(error)
        except Exception as error:  # noqa: BLE001 - a defect must not leave segments that nobody installs
            self._cannot_sync.goes_on("syncing recovered data failed; trying again", level="error", exc_info=error)
        self.failing = failing
        if checksums is None:
            self._complete.extend(target for target in batch if target.memory is not None)
            for target in batch:
                if target.memory is None:
                    self._on_unsure(target)
            await asyncio.sleep(self._retry_s)
            return
        for target, checksum in zip(batch, checksums, strict=True):
            self._assembly.release(target)
            self._install(target, checksum)

    def _install(self, target: Target, checksum: int) -> None:
        entry = self._find(target.address)
        if entry is None:
            self._on_gone(target)
            return
        # Loads of a segment with holes have to verify each chunk to find them, so it gets no checksum.
        record = target.record._replace(physical_id=target.physical_id, crc32c=0 if target.holes else checksum)
        self._memory.arrivals.install(entry, target.key, record, lambda _error: self._installed(target))

    def _installed(self, target: Target) -> None:
        record = self._store.index.segment(target.address)
        known = record is not None and record.physical_id == target.physical_id
        (self._on_installed if known else self._on_gone)(target)
