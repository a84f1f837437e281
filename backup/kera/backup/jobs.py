"""Jobs for the disks, performed on threads: plain data in both directions."""

from __future__ import annotations

from dataclasses import dataclass, field

from kera.backup.frames import ReplicaHeader
from kera.backup.replica import Replica
from kera.core.base.done import Done


@dataclass(slots=True)
class ReplicaPart:
    """The part of one replica that is written."""

    replica: Replica
    index: int
    """Index of the frame."""
    header: ReplicaHeader
    offset: int
    """Offset of the data within the replica."""
    data: list[memoryview]
    """Whole blocks, in pieces, which do not change while the job runs; may be empty."""

    @property
    def data_bytes(self) -> int:
        """The number of bytes in `data`."""
        return sum(map(len, self.data))


@dataclass(slots=True)
class WriteReplicasJob:
    """Write parts; they are durable when the job is done."""

    disk: int
    parts: list[ReplicaPart]
    commit: bool
    """Whether requests wait for it."""
    error: OSError | None = None


@dataclass(slots=True)
class Freed:
    """A frame to give back."""

    index: int
    room_bytes: int
    written_bytes: int
    done: list[Done] = field(default_factory=list)


@dataclass(slots=True)
class PunchJob:
    """Give back frames; when the job is done, their old content cannot reappear."""

    disk: int
    freed: list[Freed]
    error: OSError | None = None


Job = WriteReplicasJob | PunchJob


@dataclass(slots=True)
class StoreTotals:
    """Totals since the start."""

    chunks_appended: int = 0
    bytes_appended: int = 0

    commits: int = 0
    bytes_committed: int = 0
    replicas_flushed: int = 0
    bytes_flushed: int = 0
    syncs: int = 0
    disk_errors: int = 0
    replicas_freed: int = 0
