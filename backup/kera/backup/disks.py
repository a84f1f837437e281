"""The state of one disk: its room, its frames, and the parts that wait to be written there. Pure.

Room is counted in bytes of whole blocks. An open replica counts with its maximum size, so that it can always be
written; a finished one with its actual size. Room is limited by the setting, and by the free space of the file system
(at the last check), less a reserve.
"""

from __future__ import annotations

import errno
import heapq
from dataclasses import dataclass, field

from kera.backup.frames import Layout
from kera.backup.jobs import Freed
from kera.backup.replica import Replica
from kera.core.base.done import Done
from kera.core.errors import DiskFailed, DiskFull, KeraError

RETRY_MS = 1_000
"""Time until a retry after an error of a disk."""


@dataclass(slots=True)
class Waiter:
    """A request that waits until a replica is durable up to `length`."""

    length: int
    done: Done


@dataclass(slots=True)
class DiskState:
    """The room, frames and queued parts of one disk. An open replica always has room to be written."""

    number: int
    name: str
    layout: Layout
    bytes_max: int | None = None
    reserve_bytes: int = 0
    """Space of the file system that is left for other uses."""
    used_bytes: int = 0
    """Bytes used by replicas; open ones count with their maximum size."""
    written_bytes: int = 0
    """The part of `used_bytes` that has been written."""
    free_frames: list[int] = field(default_factory=list)
    next_frame: int = 0
    waiting: dict[Replica, list[Waiter]] = field(default_factory=dict)
    to_flush: dict[Replica, int] = field(default_factory=dict)
    """Finished replicas that are not all on disk, and since when they are finished, in ms."""
    to_vouch: dict[Replica, None] = field(default_factory=dict)
    """Finished and durable replicas whose headers do not vouch for all of them yet."""
    to_punch: list[Freed] = field(default_factory=list)
    committing: bool = False
    flushing: bool = False
    punching: bool = False
    error: OSError | None = None
    """Why it takes no data; None: it does."""
    retry_ms: int = 0
    _fs_free_bytes: int = 1 << 62
    _fs_written_bytes: int = 0

    def set_free_bytes(self, fs_free_bytes: int) -> None:
        """Set the present free space of the file system."""
        self._fs_free_bytes = fs_free_bytes
        self._fs_written_bytes = self.written_bytes

    @property
    def room_bytes(self) -> int:
        """The room that replicas may still take."""
        to_come = self.used_bytes - self._fs_written_bytes
        room = self._fs_free_bytes - self.reserve_bytes - to_come
        if self.bytes_max is not None:
            room = min(room, self.bytes_max - self.used_bytes)
        return max(0, room)

    def take_frame(self) -> int:
        """Take the lowest free frame, so that the file stays short."""
        self.used_bytes += self.layout.frame_bytes
        if self.free_frames:
            return heapq.heappop(self.free_frames)
        self.next_frame += 1
        return self.next_frame - 1

    def found_frames(self, used: dict[int, int]) -> None:
        """Set the frames found at a start; `used`: the frames with replicas, and how many bytes each of them takes."""
        self.next_frame = max(used, default=-1) + 1
        self.free_frames = [index for index in range(self.next_frame) if index not in used]
        self.used_bytes = self.written_bytes = sum(used.values())

    def give_back(self, freed: Freed) -> None:
        """Free a frame that was emptied."""
        self.used_bytes -= freed.room_bytes
        self.written_bytes -= freed.written_bytes
        heapq.heappush(self.free_frames, freed.index)

    def writable(self, now_ms: int) -> bool:
        """Return whether to try a write: there was no error, or it is time for a retry."""
        return self.error is None or now_ms >= self.retry_ms

    @property
    def idle(self) -> bool:
        """Whether no job is running, and no work is waiting."""
        waits = self.waiting or self.to_flush or self.to_vouch or self.to_punch
        return not (waits or self.committing or self.flushing or self.punching)


def disk_error(error: OSError, name: str) -> KeraError:
    """Return the error for a broker when a disk fails."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return DiskFull(
            f"the backup's disk has no room for {name}; make room there, and writing resumes by itself",
            path=name,
            errno=error.errno,
        )
    return DiskFailed(f"the backup's disk fails at {name}: {error}", path=name, errno=error.errno)
