"""Performs jobs on threads. Jobs consist of plain data, and of memory that is not released meanwhile.

A failed job has its error in `error`; errors are not raised.
"""

from __future__ import annotations

from collections.abc import Sequence

from kera.backup.frames import Layout
from kera.backup.jobs import Job, PunchJob, ReplicaPart, WriteReplicasJob
from kera.backup.log_file import BlockDisk, aligned
from kera.core.base.blocks import BLOCK_BYTES


class Performer:
    """Performs planned jobs on threads."""

    def __init__(self, disks: Sequence[BlockDisk], layout: Layout) -> None:
        self.disks = disks
        self.layout = layout

    def perform(self, job: Job) -> None:
        """Perform a job; an ``OSError`` becomes its `error`."""
        disk = self.disks[job.disk]
        try:
            match job:
                case WriteReplicasJob():
                    self._write(disk, job)
                    disk.sync()
                case PunchJob():
                    give_back(disk, self.layout, [freed.index for freed in job.freed])
        except OSError as error:
            job.error = error

    def _write(self, disk: BlockDisk, job: WriteReplicasJob) -> None:
        headers = aligned(BLOCK_BYTES * len(job.parts))
        for number, part in enumerate(job.parts):
            block = headers[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
            block[:] = part.header.encode()
            self._write_part(disk, part, block)

    def _write_part(self, disk: BlockDisk, part: ReplicaPart, block: memoryview) -> None:
        start = self.layout.offset(part.index)
        if part.offset == 0 or not part.data:
            disk.write(start, [block, *part.data])
        else:
            disk.write(start + BLOCK_BYTES + part.offset, part.data)
            disk.write(start, [block])


def give_back(disk: BlockDisk, layout: Layout, frames: Sequence[int]) -> None:
    """Empty frames, first their headers, durably: after a crash, no replica may have only a part of its chunks."""
    zeros = aligned(BLOCK_BYTES)
    for index in frames:
        disk.write(layout.offset(index), [zeros])
    disk.sync()
    for index in frames:
        disk.punch(layout.offset(index), layout.frame_bytes)
