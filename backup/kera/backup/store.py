"""The replicas of one backup: appending, closing, freeing, listing. Pure bookkeeping, except for the copy into memory.

``kera.backup.persistence`` plans what is written to disk, and when.

Fencing: the store knows the highest epoch that it has ever seen of each broker. It refuses a request with a lower epoch
(`StaleEpoch`); a higher one seals the replicas of older launches, so that nothing can be appended to them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from kera.backup.disks import DiskState, disk_error
from kera.backup.errors import ReplicaClosed, ReplicaOffset
from kera.backup.headers import KeptHeaders
from kera.backup.persistence import Persistence
from kera.backup.replica import Frame, Replica, ReplicaId, verify_chunks
from kera.backup.replicas import Replicas
from kera.backup.slots import Slots
from kera.core.base.done import Done, all_done
from kera.core.errors import BackupFull, CorruptChunk, InvalidArgument, KeraError, RecordTooLarge, StaleEpoch
from kera.v1 import backup_pb2

SLOTS_PER_FREE_SLOT = 4
"""If at most one slot in this many is free, no flush is delayed."""


class ReplicaStore:
    """Appends to, closes, frees and lists a backup's replicas, and refuses requests of fenced launches.

    Belongs to one event loop.
    """

    def __init__(
        self,
        slots: Slots,
        disks: list[DiskState],
        identity: tuple[int, str],
        *,
        on_work: Callable[[], None],
        sequence: int = 0,
        flush_delay_ms: int = 0,
        headers_bytes_max: int = 0,
    ) -> None:
        """`identity`: id and cluster of the backup; the id is 0 until it has joined one. `on_work`: see `Persistence`.

        `sequence`: the highest sequence in headers on disk.
        """
        self.slots = slots
        self.headers = KeptHeaders(headers_bytes_max)
        self.persistence = Persistence(
            disks,
            identity,
            on_work=on_work,
            on_written=self._let_go,
            sequence=sequence,
            flush_delay_ms=flush_delay_ms,
            scarce=lambda: slots.free * SLOTS_PER_FREE_SLOT <= slots.count,
        )
        self.epochs: dict[int, int] = {}
        """The highest epoch seen of each broker."""
        self.replicas = Replicas()
        self._leaving: dict[Replica, list[Done]] = {}
        """Replicas that were freed or replaced and are still in use; with the callbacks for when they are gone."""
        self._going: dict[ReplicaId, list[list[Done]]] = {}
        """Callbacks for when replicas are gone from the disks: until then a crash would bring them back."""

    @property
    def leaving(self) -> Collection[Replica]:
        """Replicas that were freed or replaced, and that a job or a reader still needs."""
        return self._leaving.keys()

    # -- appending -------------------------------------------------------------------------------------------------

    def append(self, request: backup_pb2.ReplicateRequest, chunks: memoryview) -> Replica | None:
        """Carry out a request, all of it or nothing; return the replica, None if nothing remains of it.

        Raises `StaleEpoch`, `UnknownReplica`, `ReplicaOffset`, `ReplicaClosed`, `RecordTooLarge`, `CorruptChunk`,
        `BackupFull`, and the disk's error if the replica cannot be written.
        """
        broker_id, number, offset = request.broker_id, request.virtual_segment_id, request.offset
        self.see_epoch(broker_id, request.broker_epoch)
        replica = self.replicas.find(broker_id, number)
        if request.close and not chunks:
            return self._close_at(replica, request)
        size = len(chunks)
        end = offset + size
        if end > self.slots.slot_bytes:
            raise RecordTooLarge(
                f"a replica of this backup has at most {self.slots.slot_bytes} bytes, not {end};"
                " give it a larger --segment-bytes, or the broker a smaller one",
                replica_bytes=end,
                limit=self.slots.slot_bytes,
            )
        if offset:
            replica = self.replicas.get(broker_id, number)
            self._check_appendable(replica, offset)
            before = replica.checksum
        else:
            before = 0
        ends, checksum = verify_chunks(chunks, offset, before)
        if checksum != request.checksum:
            raise _wrong_checksum(request, checksum, end)
        if replica is None or (not offset and (replica.length or not replica.appendable)):
            replica = self._open(request, replica)
        replica.view[offset:end] = chunks
        replica.chunk_ends.extend(ends)
        replica.chunk_count += len(ends)
        replica.length, replica.checksum = end, checksum
        totals = self.persistence.totals
        totals.chunks_appended += len(ends)
        totals.bytes_appended += size
        if request.close:
            self._close(replica)
        return replica

    def _check_appendable(self, replica: Replica, offset: int) -> None:
        if replica.error is not None:
            raise type(replica.error)(replica.error.message, **replica.error.attributes)
        if not replica.appendable:
            why = "is closed" if replica.closed else "is not in memory any more, or of an older launch of its broker"
            raise ReplicaClosed(f"{replica} {why}; open another virtual segment", length=replica.length)
        if replica.length != offset:
            raise _wrong_offset(replica, offset)

    def _open(self, request: backup_pb2.ReplicateRequest, before: Replica | None) -> Replica:
        """Return a new replica with a slot and a frame, which replaces `before`.

        Raises `BackupFull`, or the disks' error.
        """
        if not self.slots.free:
            raise BackupFull(
                f"all {self.slots.count} segments of the backup's memory are in use;"
                " writing resumes when some are on disk; or give it more --memory-bytes",
                resource="memory",
                limit_bytes=self.slots.count * self.slots.slot_bytes,
                free_bytes=0,
            )
        disk = self._choose_disk()
        if before is not None:
            self._drop(before)
        slot = self.slots.take()
        replica = Replica(
            broker_id=request.broker_id,
            virtual_segment_id=request.virtual_segment_id,
            broker_epoch=request.broker_epoch,
            stream_id=request.stream_id,
            virtual_log_id=request.virtual_log_id,
            frame=Frame(disk.number, disk.take_frame()),
            slot=slot,
            view=self.slots.view(slot),
            disk_bytes=disk.layout.frame_bytes,
        )
        self.replicas.add(replica)
        return replica

    def _choose_disk(self) -> DiskState:
        """Return the disk with the most room. Raises `BackupFull`, or the disks' error."""
        working = [disk for disk in self.persistence.disks if disk.error is None]
        if not working:
            disk = self.persistence.disks[0]
            raise disk_error(disk.error or OSError("it takes no data"), disk.name)
        disk = max(working, key=lambda disk: disk.room_bytes)
        if disk.room_bytes < disk.layout.frame_bytes:
            raise BackupFull(
                f"the backup's disks have no room for another replica: {disk.room_bytes} bytes at most;"
                " make room there, or give it more --disk-bytes-max",
                resource="disk",
                limit_bytes=sum(disk.used_bytes + disk.room_bytes for disk in working),
                free_bytes=sum(disk.room_bytes for disk in working),
            )
        return disk

    def adopt(self, replicas: Iterable[Replica], epochs: dict[int, int]) -> None:
        """Take over the replicas and epochs that a start has found."""
        self.epochs = {**self.epochs, **epochs}
        for replica in replicas:
            self.replicas.add(replica)
            if not replica.vouched:
                self.persistence.vouch(replica)

    def _close_at(self, replica: Replica | None, request: backup_pb2.ReplicateRequest) -> Replica | None:
        """Close a replica without new chunks; chunks behind the offset are dropped."""
        offset = request.offset
        if offset == 0:
            if request.checksum:
                raise _wrong_checksum(request, 0, 0)
            if replica is not None:
                self._drop(replica)
            return None
        replica = self.replicas.get(request.broker_id, request.virtual_segment_id)
        if replica.length == offset and replica.closed and replica.checksum == request.checksum:
            return replica  # a repeated request
        if replica.finished:
            raise ReplicaClosed(f"{replica} ended at {replica.length} before", length=replica.length, offset=offset)
        if offset > replica.length:
            raise _wrong_offset(replica, offset)
        replica.cut(offset, request.checksum)
        self.persistence.give_up(replica)
        self._close(replica)
        return replica

    def _close(self, replica: Replica) -> None:
        replica.closed = True
        self.persistence.finished_replica(replica)

    # -- epochs ----------------------------------------------------------------------------------------------------

    def see_epoch(self, broker_id: int, broker_epoch: int) -> None:
        """Note the epoch of a launch; a newer one seals the open replicas of older ones. Raises `StaleEpoch`."""
        known = self.epochs.get(broker_id, 0)
        if broker_epoch == known:
            return
        if broker_epoch < known:
            raise StaleEpoch(
                f"broker {broker_id} has epoch {known}, this request {broker_epoch}; a newer launch has taken over",
                broker_id=broker_id,
                broker_epoch=known,
            )
        self.epochs[broker_id] = broker_epoch
        for replica in self.replicas.of_broker(broker_id).values():
            self._seal(replica)

    def _seal(self, replica: Replica) -> None:
        if not replica.finished:
            replica.sealed = True
            self.persistence.finished_replica(replica)

    def seal_all(self) -> None:
        """Seal all replicas, so that they are written to disk."""
        for replica in self.replicas:
            self._seal(replica)

    # -- freeing ---------------------------------------------------------------------------------------------------

    def free(self, broker_id: int, virtual_segment_ids: Iterable[int], done: Done) -> None:
        """Free replicas; `done` is called when they cannot reappear after a crash, or with the error of a disk."""
        waiting: list[list[Done]] = []
        for number in dict.fromkeys(virtual_segment_ids):
            replica = self.replicas.find(broker_id, number)
            if replica is not None:
                self.persistence.totals.replicas_freed += 1
                self._drop(replica)
            waiting += self._going.get((broker_id, number), [])
        each = all_done(len(waiting), done)
        for waiters in waiting:
            waiters.append(each)

    def fenced(self, broker_id: int, before_epoch: int) -> list[int]:
        """Return the virtual segments of all launches before an epoch.

        Raises `InvalidArgument` if these launches are not fenced, and could still append.
        """
        if self.epochs.get(broker_id, 0) < before_epoch:
            raise InvalidArgument(
                f"launches of broker {broker_id} before epoch {before_epoch} are not fenced here: fence them first",
                broker_id=broker_id,
                broker_epoch=self.epochs.get(broker_id, 0),
            )
        replicas = self.replicas.of_broker(broker_id)
        return [number for number, replica in replicas.items() if replica.broker_epoch < before_epoch]

    def _drop(self, replica: Replica) -> None:
        self.replicas.remove(replica)
        replica.dropped = True
        self.headers.forget(replica)
        self._leaving[replica] = self._until_gone(replica.replica_id)
        self.persistence.forget(replica, f"{replica} was freed")
        self._let_go(replica)

    def _until_gone(self, replica_id: ReplicaId) -> list[Done]:
        """Return the list of callbacks for when a version of a replica is gone from its disk; more may be added."""
        waiters: list[Done] = []
        going = self._going.setdefault(replica_id, [])
        going.append(waiters)

        def gone(error: KeraError | None) -> None:
            if error is not None:
                waiters.append(gone)  # the punch will be retried
                return
            going.remove(waiters)
            if not going:
                del self._going[replica_id]

        waiters.append(gone)
        return waiters

    def _let_go(self, replica: Replica) -> None:
        """Release the memory and the frame of a replica, as far as no job or reader needs them any more."""
        if replica.busy or replica.readers:
            return
        if replica.dropped:
            done = self._leaving.pop(replica, None)
            if done is not None:
                self._release_slot(replica)
                self.persistence.punch(replica, done)
        elif replica.finished and replica.on_disk:
            self.headers.keep(replica)
            self._release_slot(replica)

    def _release_slot(self, replica: Replica) -> None:
        if replica.slot is not None:
            slot, replica.slot, replica.view = replica.slot, None, memoryview(b"")
            del replica.chunk_ends[:]
            self.slots.release(slot)

    # -- for readers -----------------------------------------------------------------------------------------------

    def pin(self, replica: Replica) -> None:
        """Keep a replica's memory and frame for a reader until `unpin`."""
        replica.readers += 1

    def unpin(self, replica: Replica) -> None:
        """End one `pin`."""
        replica.readers -= 1
        self._let_go(replica)


def _wrong_offset(replica: Replica, offset: int) -> ReplicaOffset:
    return ReplicaOffset(
        f"{replica} has {replica.length} bytes, and the request goes on from {offset}",
        length=replica.length,
        offset=offset,
    )


def _wrong_checksum(request: backup_pb2.ReplicateRequest, found: int, end: int) -> CorruptChunk:
    return CorruptChunk(
        f"up to offset {end}, virtual segment {request.virtual_segment_id:#x} of broker {request.broker_id} has"
        f" checksum {found:08x} and not {request.checksum:08x}: chunks are missing, or out of order",
        offset=end,
    )
