"""Reads chunks of replicas on threads, from memory or from the disks: for whoever takes over from a lost broker.

Each read from a disk has a buffer of the size of a replica, of which there are `READS_MAX`. What is in it stays: who
reads the same replica after others, or on, reads no block again.
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
"""Reads under way."""


@dataclass(slots=True, eq=False)
class _Buffer:
    """Memory for a replica, and what is in it of which."""

    memory: memoryview
    here: bytearray
    """By block, whether it is in the memory."""
    replica: Replica | None = None
    busy: bool = False
    """A thread has it."""


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
        """One for each thread at most; that which was used last at the end."""
        self._buffer_free = threading.Condition()
        self._reads: set[asyncio.Future[Walk]] = set()
        self.chunks_damaged = 0
        """That were found."""

    def read(
        self, replica: Replica, offset: int, bytes_max: int, streamlets: Streamlets, *, headers_only: bool = False
    ) -> asyncio.Future[Walk]:
        """Chunks of a replica, see `kera.backup.reading.walk`; fails with ``OSError``."""
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
        # Whoever asked may be gone before the thread is done; the replica stays until it is.
        future.add_done_callback(lambda done: self._read(replica, disk.name, done))
        return asyncio.shield(future)

    def _take_buffer(self, replica: Replica) -> _Buffer:
        """The one that has something of the replica already, if there is one: nothing of it changes on disk any more.

        If somebody reads the replica just now, it is waited for: then most of what is wanted is there.
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
