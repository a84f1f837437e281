"""Decides which replicas are written to the disks, and when. Pure: it plans jobs and processes their results.

* **Commit**: one job per disk (group commit) writes the data that are not durable yet of all replicas for which
  requests wait. Data that arrive meanwhile go into the next job.
* **Flush**: replicas are written completely as soon as they are finished, and their memory is then free. Or they wait
  for `flush_delay_ms`, as long as there is enough memory: replicas that brokers free by then are never written.
* **Vouch**: when all of a finished replica is durable, its header is written once more, with the next flush: a start
  then trusts it without reading the replica (see ``kera.backup.frames``).
* **Punch**: freed frames are emptied, and reused only when that is durable: so a crash cannot mix their old content
  with new data.

A commit and a flush may run on one disk at the same time, with different replicas.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from kera.backup.disks import RETRY_MS, DiskState, Waiter, disk_error
from kera.backup.frames import ReplicaHeader
from kera.backup.jobs import Freed, Job, PunchJob, ReplicaPart, StoreTotals, WriteReplicasJob
from kera.backup.log_file import aligned
from kera.backup.replica import Replica
from kera.core.base.blocks import BLOCK_BYTES, block_ceiling, block_floor
from kera.core.base.done import Done
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger
from kera.core.errors import KeraError, NotAccepted

log = get_logger("kera.persistence")

COMMIT_REPLICAS_MAX = 256
FLUSH_REPLICAS_MAX = 4
"""Maximum in one job: enough for the disk, and few enough to release memory soon."""
VOUCH_REPLICAS_MAX = 64
PUNCH_FRAMES_MAX = 64


class Persistence:
    """Plans the writes of replicas to disk, and completes each commit when all its bytes are durable.

    Belongs to one event loop.
    """

    def __init__(
        self,
        disks: list[DiskState],
        identity: tuple[int, str],
        *,
        on_work: Callable[[], None],
        on_written: Callable[[Replica], None],
        sequence: int = 0,
        flush_delay_ms: int = 0,
        scarce: Callable[[], bool] = bool,
    ) -> None:
        """`on_work`: called when `plan` may have work. `on_written`: called when a job no longer needs a replica.

        `identity`: id and cluster of the backup, for headers. `sequence`: the highest sequence in existing headers.
        `scarce`: returns whether memory is so scarce that no flush may be delayed.
        """
        self._flush_delay_ms = flush_delay_ms
        self.disks = disks
        self.totals = StoreTotals()
        self.now_ms = 0
        """Set by `tick`."""
        self._failing = [Repeated(log) for _ in disks]
        self._on_work = on_work
        self._backup_id, self._cluster_id = identity
        self._on_written = on_written
        self._sequence = sequence
        self._scarce = scarce

    def set_identity(self, backup_id: int, cluster_id: str) -> None:
        """Set the identity in new headers."""
        self._backup_id, self._cluster_id = backup_id, cluster_id

    def flush_soon(self) -> None:
        """Delay no flush from now on."""
        self._flush_delay_ms = 0
        self._on_work()

    # -- work to do -------------------------------------------------------------------------------------------------

    def wait(self, replica: Replica, length: int, done: Done) -> None:
        """Call `done` when the replica is durable up to `length`, or with an error if it cannot become so."""
        if replica.durable_length >= length:
            done(None)
            return
        self.disks[replica.frame.disk].waiting.setdefault(replica, []).append(Waiter(length, done))
        self._on_work()

    def finished_replica(self, replica: Replica) -> None:
        """Queue a replica for a flush, as nothing will be appended to it any more."""
        self.disks[replica.frame.disk].to_flush[replica] = self.now_ms
        self._on_work()

    def vouch(self, replica: Replica) -> None:
        """Queue a durable replica, so that its header on disk will vouch for all of it."""
        self.disks[replica.frame.disk].to_vouch[replica] = None
        self._on_work()

    def forget(self, replica: Replica, reason: str) -> None:
        """Write no more of a replica, and fail the requests that wait for it with `reason`."""
        disk = self.disks[replica.frame.disk]
        disk.to_flush.pop(replica, None)
        disk.to_vouch.pop(replica, None)
        for waiter in disk.waiting.pop(replica, []):
            waiter.done(NotAccepted(reason))

    def give_up(self, replica: Replica) -> None:
        """Fail the requests that wait for data behind the end of a replica that was cut."""
        disk = self.disks[replica.frame.disk]
        waiters = disk.waiting.pop(replica, [])
        still = [waiter for waiter in waiters if waiter.length <= replica.length]
        if still:
            disk.waiting[replica] = still
        for waiter in waiters:
            if waiter.length > replica.length:
                waiter.done(NotAccepted(f"{replica} was closed before this"))

    def punch(self, replica: Replica, done: list[Done]) -> None:
        """Empty the frame of a replica that no job or reader uses; call `done` when that is durable."""
        disk = self.disks[replica.frame.disk]
        freed = Freed(replica.frame.number, replica.disk_bytes, replica.written_bytes, done)
        if not replica.touched:
            disk.give_back(freed)
            _answer(freed.done, None)
            return
        disk.to_punch.append(freed)
        self._on_work()

    # -- planning --------------------------------------------------------------------------------------------------

    def plan(self) -> list[Job]:
        """Return the next jobs; each must be performed and then passed to `finished`."""
        jobs: list[Job] = []
        for disk in self.disks:
            if not disk.writable(self.now_ms):
                continue
            if disk.waiting and not disk.committing:
                parts = self._parts(disk.waiting, COMMIT_REPLICAS_MAX)
                if parts:
                    disk.committing = True
                    jobs.append(WriteReplicasJob(disk.number, parts, commit=True))
            if (disk.to_flush or disk.to_vouch) and not disk.flushing:
                parts = self._parts(self._due(disk), FLUSH_REPLICAS_MAX)
                parts += self._parts(disk.to_vouch, VOUCH_REPLICAS_MAX)
                if parts:
                    disk.flushing = True
                    jobs.append(WriteReplicasJob(disk.number, parts, commit=False))
            if disk.to_punch and not disk.punching:
                disk.punching = True
                jobs.append(PunchJob(disk.number, disk.to_punch[:PUNCH_FRAMES_MAX]))
                del disk.to_punch[:PUNCH_FRAMES_MAX]
        return jobs

    def _due(self, disk: DiskState) -> Iterable[Replica]:
        if not self._flush_delay_ms or self._scarce():
            return disk.to_flush
        due_ms = self.now_ms - self._flush_delay_ms
        return itertools.takewhile(lambda replica: disk.to_flush[replica] <= due_ms, disk.to_flush)

    def _parts(self, replicas: Iterable[Replica], count_max: int) -> list[ReplicaPart]:
        chosen = list(itertools.islice((replica for replica in replicas if not replica.busy), count_max))
        if not chosen:
            return []
        blocks = aligned(len(chosen) * BLOCK_BYTES)
        return [
            self._part(replica, blocks[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])
            for number, replica in enumerate(chosen)
        ]

    def _part(self, replica: Replica, last_block: memoryview) -> ReplicaPart:
        """Return the part of a replica that is not durable yet; `last_block`: zeroed memory for its last block.

        The last block is copied unless it is full, since more may be appended to it while it is written: a file system
        with checksums over its blocks, such as Btrfs, would store a checksum that does not match.
        """
        replica.busy = replica.touched = True
        self._sequence += 1
        header = ReplicaHeader(
            sequence=self._sequence,
            backup_id=self._backup_id,
            broker_id=replica.broker_id,
            broker_epoch=replica.broker_epoch,
            stream_id=replica.stream_id,
            virtual_log_id=replica.virtual_log_id,
            virtual_segment_id=replica.virtual_segment_id,
            length=replica.length,
            checksum=replica.checksum,
            chunk_count=replica.chunk_count,
            vouched_length=replica.durable_length,
            vouched_checksum=replica.durable_checksum,
            closed=replica.closed,
            cluster_id=self._cluster_id,
        )
        end = replica.length
        if replica.slot is None or end == replica.durable_length:
            return ReplicaPart(replica, replica.frame.number, header, 0, [])
        begin, last = block_floor(replica.durable_length), block_floor(end)
        data = [replica.view[begin:last]] if begin < last else []
        if last < end:
            last_block[: end - last] = replica.view[last:end]
            data.append(last_block)
        return ReplicaPart(replica, replica.frame.number, header, begin, data)

    # -- results ---------------------------------------------------------------------------------------------------

    def finished(self, job: Job) -> None:
        """Process the result of a job, and answer the requests that wait for it."""
        disk = self.disks[job.disk]
        self._note(disk, job)
        match job:
            case WriteReplicasJob(commit=True):
                disk.committing = False
                self._written(disk, job)
            case WriteReplicasJob():
                disk.flushing = False
                self._written(disk, job)
            case PunchJob():
                disk.punching = False
                self._punched(disk, job)
        self._on_work()

    def _note(self, disk: DiskState, job: Job) -> None:
        if job.error is None:
            self._failing[job.disk].over("the disk takes data again", path=disk.name)
            disk.error = None
            self.totals.syncs += 1
            return
        self.totals.disk_errors += 1
        self._failing[job.disk].goes_on(
            "cannot write to the disk; retrying", level="error", path=disk.name, error=str(job.error)
        )
        disk.error = job.error
        disk.retry_ms = self.now_ms + RETRY_MS

    def _written(self, disk: DiskState, job: WriteReplicasJob) -> None:
        if job.error is None:
            size = sum(part.data_bytes for part in job.parts)
            if job.commit:
                self.totals.commits += 1
                self.totals.bytes_committed += size
            else:
                self.totals.bytes_flushed += size
        for part in job.parts:
            replica = part.replica
            replica.busy = False
            if replica.dropped:
                self._on_written(replica)
                continue
            if job.error is None:
                self._part_written(disk, part)
            else:
                replica.error = disk_error(job.error, disk.name)
            self._answer_waiters(disk, replica)
            if replica.on_disk:
                self._all_written(disk, replica)
            self._on_written(replica)

    def _part_written(self, disk: DiskState, part: ReplicaPart) -> None:
        replica, header = part.replica, part.header
        written = max(replica.written_bytes, BLOCK_BYTES + block_ceiling(header.length))
        disk.written_bytes += written - replica.written_bytes
        replica.written_bytes = written
        replica.error = None
        if header.length > replica.length:  # it was cut meanwhile; a new header has yet to be written
            replica.durable_length, replica.durable_checksum = replica.length, replica.checksum
        else:
            replica.durable_length, replica.durable_checksum = header.length, header.checksum
            replica.durable_closed = header.closed
            replica.vouched = header.vouched_length == header.length

    def _all_written(self, disk: DiskState, replica: Replica) -> None:
        if not replica.finished:
            return
        if replica in disk.to_flush:
            del disk.to_flush[replica]
            self.totals.replicas_flushed += 1
        if replica.vouched:
            disk.to_vouch.pop(replica, None)
        else:
            disk.to_vouch[replica] = None
        needed = max(replica.written_bytes, BLOCK_BYTES + block_ceiling(replica.length))
        disk.used_bytes -= replica.disk_bytes - needed
        replica.disk_bytes = needed

    def _answer_waiters(self, disk: DiskState, replica: Replica) -> None:
        waiters = disk.waiting.pop(replica, [])
        if replica.error is not None:
            _answer((waiter.done for waiter in waiters), replica.error)
            return
        still = [waiter for waiter in waiters if waiter.length > replica.durable_length]
        if still:
            disk.waiting[replica] = still
        _answer((waiter.done for waiter in waiters if waiter.length <= replica.durable_length), None)

    def _punched(self, disk: DiskState, job: PunchJob) -> None:
        for freed in job.freed:
            if job.error is None:
                disk.give_back(freed)
                _answer(freed.done, None)
            else:
                waiters = list(freed.done)
                freed.done.clear()
                disk.to_punch.append(freed)
                _answer(waiters, disk_error(job.error, disk.name))

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Set the time, and try failed disks again."""
        self.now_ms = now_ms
        if self._flush_delay_ms and any(disk.to_flush for disk in self.disks):
            self._on_work()
        for disk in self.disks:
            if disk.error is None:
                continue
            if now_ms >= disk.retry_ms and disk.idle:
                disk.error = None  # no failed work is left to repeat: the next write will show whether it works
            self._on_work()

    @property
    def idle(self) -> bool:
        """Whether no job is running, and no work is waiting."""
        return all(disk.idle for disk in self.disks)


def _answer(waiters: Iterable[Done], error: KeraError | None) -> None:
    for done in waiters:
        done(error)
