"""Reads chunks of replicas on threads, from memory or from the disks, for recoveries of a lost broker.

Each read from a disk uses one of `READS_MAX` buffers, which have the size of a replica. A buffer keeps its content:
later reads of the same replica do not read a block again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from kera.backup.frames import Layout
from kera.backup.log_file import BlockDisk, aligned
from kera.backup.reading import Streamlets, Walk, disk_window, memory_window, walk
from kera.backup.replica import Replica
from kera.backup.restart import note_damage
from kera.backup.store import ReplicaStore
from kera.core.base.blocks import BLOCK_BYTES

READS_MAX = 4
"""Maximum of concurrent reads."""


@dataclass(slots=True, eq=False)
class _Buffer:
    """Memory for a replica, and which blocks of which replica are in it."""

    memory: memoryview
    here: bytearray
    """For each block, whether it is in the memory."""
    replica: Replica | None = None
    busy: bool = False
    """Whether a thread uses it."""


class ReplicaReader:
    """Reads the chunks of replicas for recoveries, from memory or disk, with a bounded number of buffers.

    Belongs to one event loop.
    """

    def __init__(self, store: ReplicaStore, disks: Sequence[BlockDisk], layout: Layout) -> None:
        self._store = store
        self._disks = disks
        self._layout = layout
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(READS_MAX, "kera-read")
        self._buffers: list[_Buffer] = []
        """At most one for each thread; the most recently used is last."""
        self._buffer_free = threading.Condition()
        self._reads: set[asyncio.Future[Walk]] = set()
        self.chunks_damaged = 0
        """Number of damaged chunks found."""

    def read(
        self, replica: Replica, offset: int, bytes_max: int, streamlets: Streamlets, *, headers_only: bool = False
    ) -> asyncio.Future[Walk]:
        """Read chunks of a replica, see `kera.backup.reading.walk`; the future may fail with ``OSError``."""
        if headers_only and (known := self._store.headers.read(replica, offset, bytes_max, streamlets)) is not None:
            found: asyncio.Future[Walk] = self._loop.create_future()
            found.set_result(known)
            return found
        length, index = replica.length, replica.frame.number
        disk = self._disks[replica.frame.disk]
        view = replica.view[:length] if replica.slot is not None else None
        walk_through = partial(
            walk,
            length=length,
            offset=offset,
            bytes_max=bytes_max,
            streamlets=streamlets,
            headers_only=headers_only,
            wanted_only=True,
        )

        def read() -> Walk:
            if view is not None:
                return walk_through(memory_window(view, length))
            buffer = self._take_buffer(replica)
            try:
                return walk_through(disk_window(disk, self._layout, index, length, buffer.memory, buffer.here))
            finally:
                with self._buffer_free:
                    buffer.busy = False
                    self._buffer_free.notify_all()

        self._store.pin(replica)
        future = self._loop.run_in_executor(self._threads, read)
        self._reads.add(future)
        # The caller may be gone before the thread is done; the replica is kept until then.
        future.add_done_callback(lambda done: self._read(replica, disk.name, done))
        return asyncio.shield(future)

    def _take_buffer(self, replica: Replica) -> _Buffer:
        """Return a buffer, preferably one that has blocks of the replica, which no longer change on disk.

        If another thread is reading the replica, wait for it, as the buffer will then have most of the wanted blocks.
        """
        with self._buffer_free:
            while (buffer := self._buffer_of(replica)) is not None and buffer.busy:
                self._buffer_free.wait()
            if buffer is None and len(self._buffers) < READS_MAX:
                segment_bytes = self._layout.segment_bytes
                buffer = _Buffer(aligned(segment_bytes), bytearray(segment_bytes // BLOCK_BYTES), replica)
            elif buffer is None:
                buffer = next(each for each in self._buffers if not each.busy)
                buffer.here[:] = bytes(len(buffer.here))
            if buffer in self._buffers:
                self._buffers.remove(buffer)
            self._buffers.append(buffer)
            buffer.replica, buffer.busy = replica, True
            return buffer

    def _buffer_of(self, replica: Replica) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.replica is replica), None)

    def _read(self, replica: Replica, path: str, future: asyncio.Future[Walk]) -> None:
        self._reads.discard(future)
        self._store.unpin(replica)
        if future.cancelled() or future.exception() is not None:
            return
        self.chunks_damaged += note_damage(replica, future.result().damaged, path)

    async def close(self) -> None:
        """Wait until no thread reads any more."""
        if self._reads:
            await asyncio.wait(self._reads)
        await asyncio.to_thread(self._threads.shutdown)
