"""A broker's log in a world that breaks: a disk in memory that tears, refuses and forgets, and crashes anywhere.

Everything of the engine but its event loop is real: arena, index (LMDB), persistence manager, restart. The test
replaces the loop step by step: planned jobs wait until the test performs one, in any order.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from kera.broker.log.arena import Arena
from kera.broker.log.events import Events
from kera.broker.ownership.streams import Streams
from kera.broker.records import Change
from kera.broker.replication.limits import ReplicationLimits
from kera.broker.replication.manager import Replication
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.jobs import DiskTotals, Job
from kera.broker.storage.persistence import PersistenceManager
from kera.broker.storage.physical_ids import PhysicalIds
from kera.broker.storage.restart import Restart
from kera.broker.storage.segment_files import SegmentStore
from kera.v1 import common_pb2

BROKER_ID = 1
SLOT_BYTES = 8192
SLOTS = 6
SECTOR_BYTES = 512
GROUPS_PER_LAUNCH = 1 << 24
IDLE_MS = 1000


class Crash(BaseException):
    """The process ends in the middle of its work."""


@dataclass
class SimulatedDisk:
    """Files in memory, with all kinds of failures; see `kera.broker.storage.disk.Disk`."""

    random: Random
    files: dict[Path, bytearray] = field(default_factory=dict)
    fail: list[int] = field(default_factory=list)
    """Errors of the next operations."""
    crash_in: int = 0
    """A crash cuts off the change with this number from now on; 0: none."""
    full: bool = False

    def before_change(self) -> bool:
        """Whether a crash cuts off this change. Raises the error that is due."""
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._error()
        if self.crash_in:
            self.crash_in -= 1
            return self.crash_in == 0
        return False

    def _error(self) -> None:
        if self.fail:
            number = self.fail.pop()
            raise OSError(number, os.strerror(number))

    def create(self, path: Path, reserve_bytes: int) -> None:
        if self.before_change():
            raise Crash
        self.files[path] = bytearray(reserve_bytes)

    def write(self, path: Path, offset: int, data: memoryview) -> None:
        cut_off = self.before_change()
        file = self.files[path]
        file.extend(bytes(max(0, offset + len(data) - len(file))))
        if not cut_off:
            file[offset : offset + len(data)] = data
            return
        for at in range(0, len(data), SECTOR_BYTES):  # sectors are whole, and the disk chooses their order
            if self.random.random() < 0.5:
                file[offset + at : offset + at + SECTOR_BYTES] = data[at : at + SECTOR_BYTES]
        raise Crash

    def overwrite(self, path: Path, data: memoryview) -> None:
        del self.files.setdefault(path, bytearray())[len(data) :]
        self.write(path, 0, data)

    def move(self, path: Path, to: Path) -> None:
        if self.before_change():
            raise Crash
        assert to not in self.files
        self.files[to] = self.files.pop(path)

    def read(self, path: Path, offset: int, into: memoryview) -> int:
        self._error()
        try:
            data = self.files[path][offset : offset + len(into)]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
        into[: len(data)] = data
        return len(data)

    def truncate(self, path: Path, length: int) -> None:
        if self.before_change():
            raise Crash
        del self.files[path][length:]

    def remove(self, path: Path) -> None:
        if self.before_change():
            raise Crash
        self.files.pop(path, None)

    def sync_removals(self, paths: Iterable[Path]) -> None:
        if any(True for _ in paths) and self.before_change():
            raise Crash

    def names(self, path: Path) -> list[str]:
        depth = len(path.parts)
        return sorted({file.parts[depth] for file in self.files if file.is_relative_to(path)})

    def modified_us(self, path: Path) -> int:
        del path
        return 0

    def length(self, path: Path) -> int:
        try:
            return len(self.files[path])
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None


class CrashingIndex(SegmentIndex):
    """An index whose commits fail like the disk's writes: a crash comes before or after one, never in between."""

    disk: SimulatedDisk

    def commit(self, changes: Any, meta: dict[str, Any] | None = None) -> None:
        changes = list[Change](changes)
        if self.disk.before_change():
            if self.disk.random.random() < 0.5:
                super().commit(changes, meta)
            raise Crash
        super().commit(changes, meta)


class World:
    """One broker, launch after launch."""

    def __init__(self, seed: int, *, streams: list[common_pb2.StreamInfo], slots: int = SLOTS) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="kera-world-", dir="/dev/shm"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)
        """Also at the end of the process without a `close`: failed worlds must not fill the memory."""
        self.disk = SimulatedDisk(Random(seed))
        self.infos = streams
        self.slots = slots
        self.launches = 0
        self.now_ms = 0
        self.jobs: list[Job] = []
        self.totals = DiskTotals()
        self.start()

    def close(self) -> None:
        try:
            self._let_go()
        finally:
            self._remove()

    # -- launches --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Do as `LogEngine.start`. Disk errors and crashes are over by then."""
        self.disk.fail.clear()
        self.disk.crash_in = 0
        self.disk.full = False
        self.jobs.clear()
        self.launches += 1
        index = CrashingIndex.open(self.root / "index", durable=False)
        assert isinstance(index, CrashingIndex)
        index.disk = self.disk
        self.index = index
        self.store = SegmentStore(Path("/log"), self.disk, index, spare_bytes_min=1)
        arena = Arena.attach(self.root, self.root)
        self.restart = Restart(arena, index, self.store)
        self.restart.look(index_whole=True, slot_bytes=SLOT_BYTES)
        self.arena = arena or Arena.create(
            self.root, arena_bytes=self.slots * SLOT_BYTES, slot_bytes=SLOT_BYTES, data_dir=self.root, ephemeral=False
        )
        for slot in self.arena.inherited:
            slot.release()
        self.arena.inherited.clear()
        next_id = index.meta().get("next_physical_id", 1)
        meta = {"clean": False, "next_physical_id": next_id, "first_unsettled_id": next_id, "slot_bytes": SLOT_BYTES}
        index.commit([], meta)
        self.memory = PersistenceManager(self.arena, index, PhysicalIds(meta), Events(), now_ms=self.now_ms)
        replication = Replication(ReplicationLimits(SLOT_BYTES), self.memory.index_writer.note, self.memory.events)
        self.streams = Streams(self.memory, self.restart, replication)
        for info in self.infos:
            for assignment in info.assignments:
                assignment.broker_epoch = self.launches
                assignment.first_group_id = 1 + (self.launches - 1) * GROUPS_PER_LAUNCH
            self.streams.open(info, BROKER_ID)
        self.restart.drop_leftovers(lambda *_: True)

    def kill(self) -> None:
        """The process dies; its arena stays."""
        self._let_go()
        self.start()

    def lose_host(self) -> None:
        """The machine dies: files on disk stay."""
        self._let_go()
        self._forget_memory()
        self.start()

    def stop(self) -> bool:
        """Do as `LogEngine.close`; return whether the disk took everything."""
        self.memory.segments.close_all()
        try:
            clean = self.settle()
            if clean:
                self.index.commit([], dict(self.memory.ids.meta, clean=True))
        except OSError:
            clean = False
        self._let_go()
        if clean:
            self._forget_memory()
        self.start()
        return clean

    def lose_index(self) -> None:
        """The process dies, and the index is lost."""
        self._let_go()
        shutil.rmtree(self.root / "index")
        self.start()

    def _forget_memory(self) -> None:
        for path in self.root.glob("*.arena"):
            path.unlink()

    def _let_go(self) -> None:
        for name in self.totals.__slots__:
            setattr(self.totals, name, getattr(self.totals, name) + getattr(self.memory.totals, name))
        self.index.close()
        self.arena.close(keep=True)

    # -- work ------------------------------------------------------------------------------------------------------

    def plan(self) -> None:
        """Take the planned jobs of the persistence manager."""
        self.jobs += self.memory.plan()

    def perform_one(self, number: int = 0) -> None:
        """Do one of the waiting jobs. Raises `Crash`."""
        self.plan()
        if self.jobs:
            job = self.jobs.pop(number % len(self.jobs))
            self.store.perform(job)
            self.memory.finished(job)

    def settle(self) -> bool:
        """Do all jobs; False when the disk does not take them."""
        for _ in range(10_000):
            self.plan()
            if not self.jobs:
                if self.memory.disk.error is None and self.memory.idle:
                    return True
                if self.disk.full:
                    return False
                self.tick(2000)
                continue
            self.perform_one()
        raise AssertionError("the jobs never end")

    def tick(self, by_ms: int) -> None:
        """Let time pass."""
        self.now_ms += by_ms
        self.memory.tick(self.now_ms, idle_close_ms=IDLE_MS)
