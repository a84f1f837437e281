"""The engine of one backup: memory, disks and replicas, made ready, kept going, and put away.

    start()   read what is on the disks, take the memory
    running   perform what is planned, on threads; look at the disks by the clock; read replicas; remember fences
    close()   write everything to disk, open replicas too: a start finds all of it

Everything that blocks is on threads of its own; the store belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kera.backup.disks import DiskState, disk_error
from kera.backup.fences import load_fences, store_fences
from kera.backup.frames import Layout
from kera.backup.jobs import Job
from kera.backup.log_file import LogFile, aligned
from kera.backup.performer import Performer
from kera.backup.reading import Streamlets, Walk, disk_window, memory_window, walk
from kera.backup.registration import Free
from kera.backup.replica import Replica
from kera.backup.restart import Found, note_damage, rebuild, scan_disk
from kera.backup.settings import BackupSettings
from kera.backup.slots import Slots
from kera.backup.store import ReplicaStore
from kera.core.blocks import BLOCK_BYTES
from kera.core.clock import Clock, SystemClock
from kera.core.errors import PathNotWritable
from kera.core.settings import GIB
from kera.core.telemetry import get_logger

log = get_logger("kera.engine")

TICK_S = 0.5
READS_MAX = 4
"""Reads of replicas under way; each from a disk has a buffer of the size of a replica, and so many there are."""
JOBS_PER_DISK = 3
"""One commit, one flush and one return of frames."""
RESERVE_BYTES_MAX = 1 * GIB
RESERVE_PART = 20
"""A twentieth of a small file system is left to others."""


@dataclass(slots=True, eq=False)
class _Buffer:
    """Memory for a replica, and what is in it of which: who reads it after others, or on, reads no block again."""

    memory: memoryview
    here: bytearray
    """By block, whether it is in the memory."""
    replica: Replica | None = None
    busy: bool = False
    """A thread has it."""


class Engine:
    """See the head of this module. Made with `start`; belongs to one event loop."""

    def __init__(
        self,
        store: ReplicaStore,
        disks: list[LogFile],
        layout: Layout,
        data_dir: Path,
        *,
        ephemeral: bool,
        stop_flush_ms: int,
        clock: Clock,
    ) -> None:
        self.store = store
        self.found = Found()
        self.chunks_damaged = 0
        """Found by readers."""
        self._disks = disks
        self._layout = layout
        self._data_dir = data_dir
        self._fences: dict[int, int] = {}
        """As the file has them."""
        self._fencing = asyncio.Lock()
        self._ephemeral = ephemeral
        self._stop_flush_ms = stop_flush_ms
        self._clock = clock
        self._performer = Performer(disks, layout)
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(JOBS_PER_DISK * len(disks), "kera-disk")
        self._readers = ThreadPoolExecutor(READS_MAX, "kera-read")
        self._buffers: list[_Buffer] = []
        """One for each thread at most; that which was used last at the end."""
        self._buffer_free = threading.Condition()
        self._dispatching = False
        self._jobs: set[asyncio.Future[None]] = set()
        self._reads: set[asyncio.Future[Walk]] = set()
        self._changed = asyncio.Event()
        store.persistence.on_work = self._work
        self._ticking = asyncio.create_task(self._tick())

    @classmethod
    async def start(
        cls, settings: BackupSettings, data_dir: Path, identity: tuple[int, str], clock: Clock | None = None
    ) -> Engine:
        """Open the logs of the backup `identity` (id and cluster). Raises `StartError` and what it has below it."""
        clock = clock or SystemClock()
        begun_s = clock.monotonic_s()
        layout = Layout(settings.segment_bytes)
        fences = await asyncio.to_thread(load_fences, data_dir)
        async with contextlib.AsyncExitStack() as stack:
            disks: list[LogFile] = []
            for directory in settings.log_dirs or [data_dir / "log"]:
                disks.append(await asyncio.to_thread(_open, directory.expanduser().absolute()))
                stack.callback(disks[-1].close)
            states = [_state(number, disk, layout, settings) for number, disk in enumerate(disks)]
            scanning = [
                asyncio.to_thread(scan_disk, disk, number, layout, identity) for number, disk in enumerate(disks)
            ]
            try:
                restart = await asyncio.to_thread(rebuild, await asyncio.gather(*scanning), states, layout)
                for disk, state in zip(disks, states, strict=True):
                    state.looked(disk.free_bytes())
            except OSError as error:
                raise PathNotWritable(f"cannot read the replicas: {error}; choose another --log-dirs") from error
            slots = await asyncio.to_thread(
                Slots, settings.memory_bytes // settings.segment_bytes, layout.segment_bytes
            )
            store = ReplicaStore(
                slots,
                states,
                sequence=restart.sequence,
                flush_delay_ms=settings.flush_delay_ms,
                headers_bytes_max=settings.headers_bytes_max,
            )
            store.persistence.backup_id, store.persistence.cluster_id = identity
            epochs = {number: max(epoch, fences.get(number, 0)) for number, epoch in restart.epochs.items()}
            store.adopt(restart.replicas, {**fences, **epochs})
            engine = cls(
                store,
                disks,
                layout,
                data_dir,
                ephemeral=settings.ephemeral,
                stop_flush_ms=settings.stop_flush_ms,
                clock=clock,
            )
            engine.found, engine._fences = restart.found, fences
            engine._work()
            stack.pop_all()
        log.info(
            "replicas opened",
            seconds=round(clock.monotonic_s() - begun_s, 3),
            **{name: getattr(restart.found, name) for name in restart.found.__slots__},
        )
        return engine

    def registered(self, backup_id: int, cluster_id: str) -> None:
        """What headers say of this backup from now on; nothing may be appended before."""
        self.store.persistence.backup_id, self.store.persistence.cluster_id = backup_id, cluster_id

    # -- running -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        if not self._dispatching:
            self._dispatching = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatching = False
        for job in self.store.plan():
            future = self._loop.run_in_executor(self._pool, self._performer.perform, job)
            self._jobs.add(future)
            future.add_done_callback(lambda done, job=job: self._done(job, done))  # type: ignore[misc]

    def _done(self, job: Job, future: asyncio.Future[None]) -> None:
        self._jobs.discard(future)
        future.result()  # `perform` raises nothing but what is a defect
        self.store.finished(job)
        self._changed.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for disk, state in zip(self._disks, self.store.disks, strict=True):
                with contextlib.suppress(OSError):
                    state.looked(disk.free_bytes())
            self.store.persistence.tick(int(self._clock.monotonic_s() * 1000))

    @property
    def free(self) -> Free:
        """What new replicas may take."""
        slots, working = self.store.slots, [disk for disk in self.store.disks if disk.error is None]
        return Free(slots.free * slots.slot_bytes, sum(disk.room_bytes for disk in working))

    @property
    def disk_bytes(self) -> int:
        """What there is for replicas, taken or not."""
        return sum(disk.used_bytes + disk.room_bytes for disk in self.store.disks)

    # -- reading, fencing --------------------------------------------------------------------------------------

    def read(
        self, replica: Replica, offset: int, bytes_max: int, streamlets: Streamlets, *, headers_only: bool = False
    ) -> asyncio.Future[Walk]:
        """Chunks of a replica, see `kera.backup.reading.walk`; fails with ``OSError``."""
        if headers_only and (known := self.store.headers.read(replica, offset, bytes_max, streamlets)) is not None:
            found: asyncio.Future[Walk] = self._loop.create_future()
            found.set_result(known)
            return found
        length, index = replica.length, replica.frame.number
        disk = self._disks[replica.frame.disk]
        view = replica.view[:length] if replica.slot is not None else None
        look_through = partial(
            walk,
            length=length,
            offset=offset,
            bytes_max=bytes_max,
            streamlets=streamlets,
            headers_only=headers_only,
            wanted_only=True,
        )

        def look() -> Walk:
            if view is not None:
                return look_through(memory_window(view, length))
            buffer = self._take_buffer(replica)
            try:
                return look_through(disk_window(disk, self._layout, index, length, buffer.memory, buffer.here))
            finally:
                with self._buffer_free:
                    buffer.busy = False
                    self._buffer_free.notify_all()

        self.store.pin(replica)
        future = self._loop.run_in_executor(self._readers, look)
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
        self.store.unpin(replica)
        if future.cancelled() or future.exception() is not None:
            return
        self.chunks_damaged += note_damage(replica, future.result().damaged, path)

    async def remember_fence(self, broker_id: int, broker_epoch: int) -> None:
        """Older launches are refused after a start, too, when this returns. Raises the disk's error."""
        async with self._fencing:
            if self._fences.get(broker_id, 0) >= broker_epoch:
                return
            fences = {**self._fences, broker_id: broker_epoch}
            try:
                await asyncio.to_thread(store_fences, self._data_dir, fences)
            except OSError as error:
                raise disk_error(error, str(self._data_dir)) from error
            self._fences = fences

    @property
    def replicas_open(self) -> int:
        """Replicas with something in them to which their brokers may still append."""
        return sum(not (replica.closed or replica.sealed) and replica.length > 0 for replica in self.store)

    @property
    def bytes_left(self) -> int:
        """In memory, and not on disk."""
        return sum(replica.length - replica.durable_length for replica in self.store if replica.slot is not None)

    # -- the end -----------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Write everything to disk, unless the backup never comes back."""
        if not self._ephemeral:
            self.store.seal_all()
            self.store.persistence.flush_delay_ms = 0
            clean = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._stop_flush_ms / 1000):
                    clean = await self._flushed()
            if not clean:
                log.error(
                    "not all is on disk; what is left is lost here, and made anew from its other replicas",
                    bytes=self.bytes_left,
                    stop_flush_ms=self._stop_flush_ms,
                    disk_errors=[str(disk.error) for disk in self.store.disks if disk.error is not None],
                )
        self._ticking.cancel()
        self.store.persistence.on_work = lambda: None
        for futures in (self._jobs, self._reads):
            if futures:
                await asyncio.wait(futures)
        await asyncio.to_thread(self._pool.shutdown)
        await asyncio.to_thread(self._readers.shutdown)
        for disk in self._disks:
            disk.close()

    async def _flushed(self) -> bool:
        """Wait until everything is on disk; False when a disk does not take it."""
        while not self.store.persistence.idle:
            if any(disk.error is not None for disk in self.store.disks):
                return False
            self._changed.clear()
            self._work()
            await self._changed.wait()
        return True


def _open(directory: Path) -> LogFile:
    try:
        return LogFile(directory)
    except OSError as error:
        raise PathNotWritable(
            f"cannot write replicas in {directory}: {error.strerror}; choose another --log-dirs", path=str(directory)
        ) from error


def _state(number: int, disk: LogFile, layout: Layout, settings: BackupSettings) -> DiskState:
    reserve_bytes = min(RESERVE_BYTES_MAX, disk.total_bytes() // RESERVE_PART)
    return DiskState(number, disk.name, layout, settings.disk_bytes_max, reserve_bytes)
