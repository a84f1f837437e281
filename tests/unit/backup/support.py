"""Support for the backup's tests: a disk that can fail and lose power, a backup without threads, requests."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from kera.backup.disks import DiskState
from kera.backup.frames import Layout
from kera.backup.jobs import Job
from kera.backup.performer import Performer
from kera.backup.reading import WINDOW_BYTES, Walk, disk_window, memory_window, walk
from kera.backup.replica import Replica
from kera.backup.restart import FoundReplicas, rebuild, scan_disk
from kera.backup.slots import Slots
from kera.backup.store import ReplicaStore
from kera.core.base.blocks import BLOCK_BYTES
from kera.core.errors import KeraError
from kera.core.format.chunk import chained_checksum
from kera.v1 import backup_pb2
from tests.unit.broker.support import placed

__all__ = ["FakeBackup", "FakeDisk", "Outcome", "Segment", "chain", "placed", "request"]

BROKER_ID = 3
EPOCH = 12
STREAM_ID = 7
IDENTITY = (5, "cluster")
SEGMENT_BYTES = 2 * BLOCK_BYTES
FRAME_BYTES = SEGMENT_BYTES + BLOCK_BYTES
SECTOR_BYTES = 512
PLENTY = 1 << 40


class PowerLost(BaseException):
    """The host is gone; no handler of errors may catch this."""


class FakeDisk:
    """Blocks in memory: a write is visible at once, and lasts only after a sync."""

    def __init__(self, name: str = "/disk/replicas.log") -> None:
        self.name = name
        self.free = PLENTY
        self.write_error = 0
        """Error number of every operation that changes the disk."""
        self.scribbles = False
        """A write that fails leaves garbage in its place."""
        self.read_error = 0
        self.has_holes = True
        """Punching removes data, as on a file system that supports holes."""
        self.operations_left: int | None = None
        """The number of operations until the power is lost."""
        self.synced: dict[int, bytes] = {}
        self.pending: list[tuple[int, bytes]] = []
        self.syncs = 0
        self.writes: list[tuple[int, int]] = []
        """Offset and length of each write."""

    def _operate(self) -> None:
        if self.operations_left is not None:
            self.operations_left -= 1
            if self.operations_left < 0:
                raise PowerLost
        if self.write_error:
            raise OSError(self.write_error, os.strerror(self.write_error), self.name)

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        data = b"".join(pieces)
        if self.write_error and self.scribbles:
            self.pending += [
                ((offset + at) // BLOCK_BYTES, b"?" * BLOCK_BYTES) for at in range(0, len(data), BLOCK_BYTES)
            ]
        self._operate()
        assert offset % BLOCK_BYTES == len(data) % BLOCK_BYTES == 0
        self.writes.append((offset, len(data)))
        for at in range(0, len(data), BLOCK_BYTES):
            self.pending.append(((offset + at) // BLOCK_BYTES, data[at : at + BLOCK_BYTES]))

    def punch(self, offset: int, length: int) -> None:
        if not self.has_holes:
            return
        self._operate()
        for block in range(offset // BLOCK_BYTES, (offset + length) // BLOCK_BYTES):
            self.pending.append((block, bytes(BLOCK_BYTES)))

    def sync(self) -> None:
        self._operate()
        self.syncs += 1
        self.keep_all()

    def keep_all(self) -> None:
        """Keep all writes, as when only the process ends: the kernel has them."""
        self.synced.update(self.pending)
        self.pending.clear()

    def lose_power(self, keeps: Callable[[], int]) -> None:
        """Keep those sectors of each unsynced block that the bits of `keeps()` name."""
        for number, data in self.pending:
            sectors = keeps()
            before = self.synced.get(number, bytes(BLOCK_BYTES))
            mixed = [
                (data if sectors >> at & 1 else before)[at * SECTOR_BYTES : (at + 1) * SECTOR_BYTES]
                for at in range(BLOCK_BYTES // SECTOR_BYTES)
            ]
            self.synced[number] = b"".join(mixed)
        self.pending.clear()
        self.operations_left = None

    def block(self, number: int) -> bytes:
        for at, data in reversed(self.pending):
            if at == number:
                return data
        return self.synced.get(number, bytes(BLOCK_BYTES))

    def flip(self, offset: int) -> None:
        """Damage a byte."""
        data = bytearray(self.block(offset // BLOCK_BYTES))
        data[offset % BLOCK_BYTES] ^= 0x40
        self.synced[offset // BLOCK_BYTES] = bytes(data)

    def read(self, offset: int, into: memoryview) -> int:
        if self.read_error:
            raise OSError(self.read_error, os.strerror(self.read_error), self.name)
        for at in range(0, len(into), BLOCK_BYTES):
            into[at : at + BLOCK_BYTES] = self.block((offset + at) // BLOCK_BYTES)[: len(into) - at]
        return len(into)

    def next_data(self, offset: int) -> int | None:
        blocks = {number for number, _ in self.pending} | self.synced.keys()
        used = [number for number in blocks if number >= offset // BLOCK_BYTES and any(self.block(number))]
        return max(offset, min(used) * BLOCK_BYTES) if used else None

    def free_bytes(self) -> int:
        return self.free

    def total_bytes(self) -> int:
        return PLENTY


class Outcome:
    """Stands for a waiter."""

    def __init__(self) -> None:
        self.calls: list[KeraError | None] = []

    def __call__(self, error: KeraError | None) -> None:
        self.calls.append(error)

    @property
    def succeeded(self) -> bool:
        return self.calls == [None]


class FakeBackup:
    """The store of a backup over fake disks: a test decides when the planned jobs are done."""

    def __init__(
        self,
        *disks: FakeDisk,
        slots: int = 4,
        segment_bytes: int = SEGMENT_BYTES,
        bytes_max: int | None = None,
        flush_delay_ms: int = 0,
        headers_bytes_max: int = 0,
        on_work: Callable[[], None] = lambda: None,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        """Start from the disks' contents; `window_bytes`: the window of reads."""
        self.window_bytes = window_bytes
        self.disks = disks or (FakeDisk(),)
        self.layout = Layout(segment_bytes)
        states = [
            DiskState(number, disk.name, self.layout, bytes_max=bytes_max) for number, disk in enumerate(self.disks)
        ]
        scans = [scan_disk(disk, number, self.layout, IDENTITY) for number, disk in enumerate(self.disks)]
        restart = rebuild(scans, states, self.layout)
        self.found: FoundReplicas = restart.found
        self.slots = Slots(slots, segment_bytes)
        self.store = ReplicaStore(
            self.slots,
            states,
            IDENTITY,
            on_work=on_work,
            sequence=restart.sequence,
            flush_delay_ms=flush_delay_ms,
            headers_bytes_max=headers_bytes_max,
        )
        self.store.adopt(restart.replicas, restart.epochs)
        self.performer = Performer(self.disks, self.layout)
        self.look()

    def look(self) -> None:
        """Note the free space of the file systems."""
        for disk, state in zip(self.disks, self.store.persistence.disks, strict=True):
            state.set_free_bytes(disk.free_bytes())

    def run(self) -> None:
        """Do all planned jobs."""
        while jobs := self.store.persistence.plan():
            for job in jobs:
                self.perform(job)

    def perform(self, job: Job) -> None:
        self.performer.perform(job)
        self.store.persistence.finished(job)

    def retry(self) -> None:
        """Let enough time pass that failed disks are tried again."""
        self.store.persistence.tick(self.store.persistence.now_ms + 10_000)
        self.run()

    def restarted(self) -> "FakeBackup":
        """End the process and start another one."""
        for disk in self.disks:
            disk.keep_all()
        return FakeBackup(*self.disks, slots=self.slots.count, segment_bytes=self.layout.segment_bytes)

    def append(self, message: backup_pb2.ReplicateRequest, *chunks: bytes) -> Replica | None:
        return self.store.append(message, memoryview(b"".join(chunks)))

    def get(self, number: int = 1) -> Replica:
        return self.store.replicas.get(BROKER_ID, number)

    def numbers(self) -> list[int]:
        """The ids of all virtual segments that have a replica here."""
        return [replica.virtual_segment_id for replica in self.store.replicas.after(BROKER_ID, 0, 1000)[0]]

    def read(self, number: int = 1, **options: Any) -> Walk:
        """Chunks of a replica, from memory or from its disk."""
        replica = self.get(number)
        if replica.slot is not None:
            window = memory_window(replica.view, replica.length)
        else:
            buffer = memoryview(bytearray(self.layout.segment_bytes))
            disk = self.disks[replica.frame.disk]
            window = disk_window(disk, self.layout, replica.frame.number, replica.length, buffer)
        return walk(window, replica.length, window_bytes=self.window_bytes, **options)


def chain(*chunks: bytes, checksum: int = 0) -> int:
    """The checksum over the checksums of chunks."""
    for data in chunks:
        checksum = chained_checksum(data, 0, checksum)
    return checksum


def request(
    number: int = 1, *, offset: int = 0, checksum: int = 0, epoch: int = EPOCH, **fields: Any
) -> backup_pb2.ReplicateRequest:
    """A request about virtual segment `number`."""
    values: dict[str, Any] = {"broker_id": BROKER_ID, "stream_id": STREAM_ID, "virtual_log_id": 2} | fields
    return backup_pb2.ReplicateRequest(
        virtual_segment_id=number, offset=offset, checksum=checksum, broker_epoch=epoch, **values
    )


class Segment:
    """A virtual segment, as its broker has it: makes its requests, one after the other."""

    def __init__(self, number: int = 1) -> None:
        self.number = number
        self.chunks: list[bytes] = []

    @property
    def length(self) -> int:
        return sum(map(len, self.chunks))

    @property
    def content(self) -> bytes:
        return b"".join(self.chunks)

    def next(self, *chunks: bytes, **fields: Any) -> backup_pb2.ReplicateRequest:
        """The request that appends `chunks` to the replica."""
        offset = self.length
        self.chunks += chunks
        return request(self.number, offset=offset, checksum=chain(*self.chunks), **fields)

    def append(self, backup: FakeBackup, *chunks: bytes, **fields: Any) -> Replica | None:
        """Append to a backup."""
        return backup.append(self.next(*chunks, **fields), *chunks)

    def end(self, count: int, **fields: Any) -> backup_pb2.ReplicateRequest:
        """The request that closes the segment behind its first `count` chunks."""
        self.chunks = self.chunks[:count]
        return request(self.number, offset=self.length, checksum=chain(*self.chunks), close=True, **fields)
