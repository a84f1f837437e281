"""The engine of one backup: the life of its memory, disks and replicas.

    start()   read the disks, allocate the memory
    running   perform planned jobs on threads; check the disks' free space periodically; store fences
    close()   write everything to disk, open replicas too, so that the next start finds it

Blocking calls are made on threads; the store belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kera.backup.disks import DiskState, disk_error
from kera.backup.fences import NAME, load_fences, store_fences
from kera.backup.frames import Layout
from kera.backup.jobs import Job
from kera.backup.log_file import LogFile
from kera.backup.performer import Performer
from kera.backup.reader import ReplicaReader
from kera.backup.registration import Free
from kera.backup.restart import Restart, rebuild, scan_disk
from kera.backup.settings import BackupSettings
from kera.backup.slots import Slots
from kera.backup.store import ReplicaStore
from kera.core.base.blocks import FileCalls
from kera.core.base.home import expanded
from kera.core.base.settings import GIB
from kera.core.base.telemetry import get_logger
from kera.core.errors import PathNotWritable
from kera.core.runtime import MACHINE, Runtime

log = get_logger("kera.engine")

TICK_S = 0.5
JOBS_PER_DISK = 3
"""Threads per disk: one commit, one flush and one punch may run at the same time."""
RESERVE_BYTES_MAX = 1 * GIB
RESERVE_PART = 20
"""A twentieth of a small file system is left for other uses."""


class Engine:
    """Owns a backup's memory, disks and replicas, and runs its jobs on threads.

    Made with `start`; belongs to one event loop.
    """

    def __init__(  # noqa: PLR0913 - the parts of a backup
        self,
        settings: BackupSettings,
        data_dir: Path,
        *,
        fences: Mapping[int, int],
        identity: tuple[int, str],
        disks: Sequence[LogFile],
        states: list[DiskState],
        slots: Slots,
        restart: Restart,
        runtime: Runtime,
    ) -> None:
        """`fences`: fenced broker epochs, as in their file. `identity`: id and cluster.

        `restart`: the replicas found on `disks`.
        """
        self.store = ReplicaStore(
            slots,
            states,
            identity,
            on_work=self._dispatch_soon,
            sequence=restart.sequence,
            flush_delay_ms=settings.flush_delay_ms,
            headers_bytes_max=settings.headers_bytes_max,
        )
        layout = Layout(settings.segment_bytes)
        self.found = restart.found
        self.reader = ReplicaReader(self.store, disks, layout)
        self._settings = settings
        self._disks = disks
        self._data_dir = data_dir
        self._fences = fences
        self._fencing = asyncio.Lock()
        self._clock, self._files = runtime.clock, runtime.files
        self._performer = Performer(disks, layout)
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(JOBS_PER_DISK * len(disks), "kera-disk")
        self._dispatching = self._closed = False
        self._jobs: set[asyncio.Future[None]] = set()
        self._changed = asyncio.Event()
        self._ticking = asyncio.create_task(self._tick())
        epochs = {number: max(epoch, fences.get(number, 0)) for number, epoch in restart.epochs.items()}
        self.store.adopt(restart.replicas, {**fences, **epochs})
        self._dispatch_soon()

    @classmethod
    async def start(
        cls, settings: BackupSettings, data_dir: Path, identity: tuple[int, str], runtime: Runtime = MACHINE
    ) -> Engine:
        """Open the logs of the backup `identity` (id and cluster). Raises `StartError` or a subclass of it."""
        clock, files = runtime.clock, runtime.files
        begun_s = clock.monotonic_s()
        layout = Layout(settings.segment_bytes)
        async with contextlib.AsyncExitStack() as stack:
            disks: list[LogFile] = []
            for directory in settings.log_dirs or [data_dir / "log"]:
                disks.append(await asyncio.to_thread(_open, expanded(directory).absolute(), files))
                stack.callback(disks[-1].close)
            states = [_state(number, disk, layout, settings) for number, disk in enumerate(disks)]
            scanning = [
                asyncio.to_thread(scan_disk, disk, number, layout, identity) for number, disk in enumerate(disks)
            ]
            try:
                restart = await asyncio.to_thread(rebuild, await asyncio.gather(*scanning), states, layout)
                for disk, state in zip(disks, states, strict=True):
                    state.set_free_bytes(disk.free_bytes())
            except OSError as error:
                raise PathNotWritable(f"cannot read the replicas: {error}; choose another --log-dirs") from error
            fences = await asyncio.to_thread(_known_fences, data_dir, files, has_replicas=bool(restart.replicas))
            slots = await asyncio.to_thread(
                Slots, settings.memory_bytes // settings.segment_bytes, layout.segment_bytes
            )
            engine = cls(
                settings,
                data_dir,
                fences=fences,
                identity=identity,
                disks=disks,
                states=states,
                slots=slots,
                restart=restart,
                runtime=runtime,
            )
            stack.pop_all()
        log.info(
            "replicas opened",
            seconds=round(clock.monotonic_s() - begun_s, 3),
            **{name: getattr(restart.found, name) for name in restart.found.__slots__},
        )
        return engine

    def registered(self, backup_id: int, cluster_id: str) -> None:
        """Set the identity in new headers; must be called before anything is appended."""
        self.store.persistence.set_identity(backup_id, cluster_id)

    # -- running -----------------------------------------------------------------------------------------------

    def _dispatch_soon(self) -> None:
        if not (self._dispatching or self._closed):
            self._dispatching = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatching = False
        for job in self.store.persistence.plan():
            future = self._loop.run_in_executor(self._pool, self._performer.perform, job)
            self._jobs.add(future)
            future.add_done_callback(lambda done, job=job: self._done(job, done))  # type: ignore[misc]

    def _done(self, job: Job, future: asyncio.Future[None]) -> None:
        self._jobs.discard(future)
        future.result()  # raises only if `perform` has a defect
        self.store.persistence.finished(job)
        self._changed.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for disk, state in zip(self._disks, self.store.persistence.disks, strict=True):
                with contextlib.suppress(OSError):
                    state.set_free_bytes(disk.free_bytes())
            self.store.persistence.tick(int(self._clock.monotonic_s() * 1000))

    @property
    def free(self) -> Free:
        """The room for new replicas."""
        slots, working = self.store.slots, [disk for disk in self.store.persistence.disks if disk.error is None]
        return Free(slots.free * slots.slot_bytes, sum(disk.room_bytes for disk in working))

    @property
    def disk_bytes(self) -> int:
        """The room for replicas, used or free."""
        return sum(disk.used_bytes + disk.room_bytes for disk in self.store.persistence.disks)

    async def remember_fence(self, broker_id: int, broker_epoch: int) -> None:
        """Store a fence, so that older launches are refused even after a restart. Raises the disk's error."""
        async with self._fencing:
            if self._fences.get(broker_id, 0) >= broker_epoch:
                return
            fences = {**self._fences, broker_id: broker_epoch}
            try:
                await asyncio.to_thread(store_fences, self._data_dir, fences, self._files)
            except OSError as error:
                raise disk_error(error, str(self._data_dir)) from error
            self._fences = fences

    @property
    def replicas_open(self) -> int:
        """The number of replicas that are not empty, and to which their brokers may still append."""
        return sum(not (replica.closed or replica.sealed) and replica.length > 0 for replica in self.store.replicas)

    @property
    def bytes_left(self) -> int:
        """The number of bytes that are in memory, and not on disk."""
        return sum(
            replica.length - replica.durable_length for replica in self.store.replicas if replica.slot is not None
        )

    # -- stopping ----------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Write everything to disk, unless the backup is ephemeral, and close the disks."""
        if not self._settings.ephemeral:
            self.store.seal_all()
            self.store.persistence.flush_soon()
            clean = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.stop_flush_ms / 1000):
                    clean = await self._flushed()
            if not clean:
                log.error(
                    "not all data are on disk; the rest is lost here, and restored from other replicas",
                    bytes=self.bytes_left,
                    stop_flush_ms=self._settings.stop_flush_ms,
                    disk_errors=[str(disk.error) for disk in self.store.persistence.disks if disk.error is not None],
                )
        self._ticking.cancel()
        self._closed = True
        if self._jobs:
            await asyncio.wait(self._jobs)
        await asyncio.to_thread(self._pool.shutdown)
        await self.reader.close()
        for disk in self._disks:
            disk.close()

    async def _flushed(self) -> bool:
        """Wait until everything is on disk; return False if a disk fails."""
        while not self.store.persistence.idle:
            if any(disk.error is not None for disk in self.store.persistence.disks):
                return False
            self._changed.clear()
            self._dispatch_soon()
            await self._changed.wait()
        return True


def _open(directory: Path, calls: FileCalls) -> LogFile:
    try:
        return LogFile(directory, calls=calls)
    except OSError as error:
        raise PathNotWritable(
            f"cannot write replicas in {directory}: {error.strerror}; choose another --log-dirs", path=str(directory)
        ) from error


def _known_fences(data_dir: Path, calls: FileCalls, *, has_replicas: bool) -> dict[int, int]:
    try:
        return load_fences(data_dir, calls, has_replicas=has_replicas)
    except OSError as error:
        raise PathNotWritable(f"cannot write {data_dir / NAME}: {error.strerror}", path=str(data_dir / NAME)) from error


def _state(number: int, disk: LogFile, layout: Layout, settings: BackupSettings) -> DiskState:
    reserve_bytes = min(RESERVE_BYTES_MAX, disk.total_bytes() // RESERVE_PART)
    return DiskState(number, disk.name, layout, settings.disk_bytes_max, reserve_bytes)
