"""Assembles segments that come from backups: puts each chunk in its place, in memory or directly in the file.

    chunks of an answer ──put_in_place()──► verified, in `Assembly` or in the file ──make_durable()──► a durable file

Chunks of a segment come from several virtual segments, in any order, and some of them twice. So a segment is put
together in memory, which is bounded. The chunks of further segments are written to their files as they come, through
the page cache, which takes more time. Everything here runs on threads, and blocks. ``kera.broker.recovery.rebuild``
decides which replicas are read, and what happens to a complete file.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kera.broker.log.scan import address_of
from kera.broker.records import Key, SegmentAddress, SegmentRecord
from kera.broker.recovery.layout import Places
from kera.broker.recovery.merge import digest_of
from kera.broker.storage.disk import Disk, block_ceiling
from kera.core.base.blocks import FILE_CALLS, FileCalls
from kera.core.errors import CorruptChunk
from kera.core.format.checksum import crc32c
from kera.core.format.chunk import verify_chunk


@dataclass(slots=True, eq=False)
class Target:
    """A segment that still has to come."""

    address: SegmentAddress
    record: SegmentRecord
    places: Places
    path: Path
    physical_id: int
    here: bytearray = field(default_factory=bytearray)
    """For each chunk with a known place, whether it has come."""
    missing: int = 0
    """Number of chunks with a known place that have not come."""
    holes: bool = False
    """Whether chunks are on no backup, or their place is unknown."""
    installing: bool = False
    """Whether it takes no more chunks, because it is being installed."""
    memory: memoryview | None = None
    """The memory in which it is put together; None: its data is in the file."""
    begun: bool = False
    """Whether it is decided if it is put together in memory."""
    writers: int = 0
    """Number of threads that put chunks in their places."""

    @classmethod
    def of(cls, address: SegmentAddress, record: SegmentRecord, places: Places, path: Path, physical_id: int) -> Target:
        """Create a target without any of its chunks."""
        count = len(places.first_records)
        holes = count < record.chunk_count
        return cls(address, record, places, path, physical_id, bytearray(count), count, holes=holes)

    @property
    def key(self) -> Key:
        """The group and segment id."""
        return self.address.group_id, self.address.segment_id


class Assembly:
    """The memory in which segments are put together; it is reused. Called on several threads."""

    def __init__(self, bytes_max: int) -> None:
        self._left_bytes = bytes_max
        """Bytes that may still be allocated, besides the free buffers."""
        self._free: list[memoryview] = []
        """Buffers that can be reused."""
        self._lock = threading.Lock()

    def begin(self, target: Target) -> memoryview | None:
        """Return the memory for chunks of a segment, valid until `end`; None: they go into its file."""
        with self._lock:
            if not target.begun and not target.holes:
                target.memory = self._take(block_ceiling(target.record.length))
            target.begun = True
            target.writers += 1
            return target.memory

    def end(self, target: Target) -> None:
        """Note that the writing that `begin` began has ended."""
        with self._lock:
            target.writers -= 1

    def release(self, target: Target) -> None:
        """Release the memory of a segment that is in its file, or given up; may be repeated."""
        with self._lock:
            memory, target.memory, target.begun = target.memory, None, True
            if memory is None:
                return
            if target.writers:  # a thread still writes a repeated chunk there, so the buffer must not be reused
                self._left_bytes += len(memory)
            else:
                self._free.append(memory)

    def clear(self) -> None:
        """Free all buffers, because no segment is being put together for now."""
        with self._lock:
            self._drop_free()

    def _drop_free(self) -> None:
        self._left_bytes += sum(len(memory) for memory in self._free)
        self._free.clear()

    def _take(self, size: int) -> memoryview | None:
        for number, memory in enumerate(self._free):
            if len(memory) >= size:
                del self._free[number]
                np.frombuffer(memory, np.uint8).fill(0)
                return memory
        if size > self._left_bytes:
            self._drop_free()
        if size > self._left_bytes:
            return None
        try:
            memory = memoryview(mmap.mmap(-1, size))
        except OSError:  # the host has no memory left
            return None
        self._left_bytes -= size
        return memory


class Taken(NamedTuple):
    """The outcome of putting the chunks of an answer in their places."""

    chunks: list[tuple[Target, int]]
    """The chunks that were written, each as its target and its number there."""
    wrong: str
    """The error that the answer has; empty: none."""


def put_in_place(
    chunks: memoryview, targets: Mapping[SegmentAddress, Target], assembly: Assembly, calls: FileCalls = FILE_CALLS
) -> Taken:
    """Put the chunks of an answer in their places. Raises ``OSError``."""
    taken: list[tuple[Target, int]] = []
    pieces: list[tuple[Target, int, int, int]] = []
    wrong, at = "", 0
    while at < len(chunks):
        try:
            header = verify_chunk(chunks, at)
        except CorruptChunk as error:
            wrong = error.message
            break
        end = at + header.chunk_bytes
        target = targets.get(address_of(header))
        number = target.places.find(header.first_record, digest_of(header)) if target is not None else None
        if target is not None and number is not None and not target.here[number] and not target.installing:
            position = target.places.positions[number]
            last = pieces[-1] if pieces else None
            if last is not None and last[0] is target and last[2] == at and last[3] + at - last[1] == position:
                pieces[-1] = (target, last[1], end, last[3])
            else:
                pieces.append((target, at, end, position))
            taken.append((target, number))
        at = end
    for target, start, end, position in pieces:
        memory = assembly.begin(target)
        try:
            if memory is None:
                _write(target.path, chunks[start:end], position, calls)
            else:
                memory[position : position + end - start] = chunks[start:end]
        finally:
            assembly.end(target)
    return Taken(taken, wrong)


def _write(path: Path, data: memoryview, position: int, calls: FileCalls) -> None:
    try:
        fd = calls.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = calls.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while data:
            count = calls.write(fd, [data], position)
            data, position = data[count:], position + count
    finally:
        calls.close(fd)


def make_durable(targets: Iterable[Target], disk: Disk, calls: FileCalls = FILE_CALLS) -> list[int]:
    """Make files durable; return their checksums.

    Raises ``OSError``: then the content of files that were not put together in memory is unknown. A second attempt
    would not show it, because a disk reports only once that it has lost data.
    """
    checksums = []
    for target in targets:
        memory, length = target.memory, target.record.length
        target.path.parent.mkdir(parents=True, exist_ok=True)
        fd = calls.open(target.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if memory is not None:
                checksum = crc32c(memory[:length])
                disk.write(target.path, 0, memory[: block_ceiling(length)])
            else:
                calls.truncate(fd, block_ceiling(length))
                checksum = _checksum(fd, length)
                calls.sync(fd)
        finally:
            calls.close(fd)
        checksums.append(int(checksum))
    return checksums


def _checksum(fd: int, length: int) -> int:
    checksum, left = 0, length
    while left:
        data = os.pread(fd, min(left, 1 << 20), length - left)
        checksum, left = crc32c(data, checksum), left - len(data)
    return int(checksum)
