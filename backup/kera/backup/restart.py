"""Reads the intact parts of the replicas on the disks at a start. Blocks, and runs on a thread per disk.

A header vouches for data that were durable before it was written. Data that were written with it count if their
checksum matches. If not, the process or the host ended during the write, the data were never acknowledged as durable,
and they are cut off. Damage in vouched data is reported, and readers skip it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kera.backup.disks import DiskState
from kera.backup.frames import Layout, ReplicaHeader, decode_file_header, decode_header, encode_file_header
from kera.backup.log_file import BlockDisk, aligned
from kera.backup.performer import give_back
from kera.backup.reading import NONE_OF_THEM, disk_window, memory_window, walk
from kera.backup.replica import Frame, Replica, ReplicaId
from kera.core.base.blocks import BLOCK_BYTES, block_ceiling
from kera.core.base.telemetry import get_logger
from kera.core.errors import StartError
from kera.core.format.chunk import chained_checksum
from kera.core.format.newer_format import refuse_unknown_version

log = get_logger("kera.restart")


@dataclass(slots=True)
class FoundReplicas:
    """The findings of a start."""

    replicas: int = 0
    unclosed: int = 0
    """Replicas that were not closed, or whose headers did not vouch for all of them, so that they were read."""
    torn_replicas: int = 0
    """Replicas whose last write was never finished, and was cut off."""
    torn_bytes: int = 0
    chunks_damaged: int = 0
    headers_damaged: int = 0
    """Damaged headers; the replica of each of them is lost."""
    frames_superseded: int = 0
    """Frames of replicas that were replaced, or had no durable data."""


@dataclass(slots=True)
class DiskScan:
    """The headers of one disk."""

    disk: BlockDisk
    number: int
    headers: list[tuple[int, ReplicaHeader]] = field(default_factory=list)
    damaged: int = 0


@dataclass(slots=True)
class Restart:
    """The replicas found at a start, for the store to adopt."""

    replicas: list[Replica] = field(default_factory=list)
    sequence: int = 0
    epochs: dict[int, int] = field(default_factory=dict)
    found: FoundReplicas = field(default_factory=FoundReplicas)


def scan_disk(disk: BlockDisk, number: int, layout: Layout, identity: tuple[int, str]) -> DiskScan:
    """Read all headers; an empty file gets a file header.

    `identity`: backup and cluster to which the replicas must belong. Raises `StartError` if they do not, if replicas
    have another size, or if the file is damaged or of a newer version; and ``OSError``.
    """
    scan = DiskScan(disk, number)
    _check_file(disk, layout)
    block = aligned(BLOCK_BYTES)
    at: int | None = BLOCK_BYTES
    while at is not None and (at := disk.next_data(at)) is not None:
        index = layout.frame_at(max(at, BLOCK_BYTES))
        start = layout.offset(index)
        if disk.read(start, block) < BLOCK_BYTES:
            break
        header = decode_header(block, f"frame {index} of {disk.name}")
        if header is not None and header.vouched_length <= header.length <= layout.segment_bytes:
            _check_identity(disk, header, identity)
            scan.headers.append((index, header))
        elif any(block):
            log.error("a header is damaged; the replica is lost", path=disk.name, frame=index)
            scan.damaged += 1
        at = start + layout.frame_bytes
    return scan


def _check_file(disk: BlockDisk, layout: Layout) -> None:
    block = aligned(BLOCK_BYTES)
    count = disk.read(0, block)
    segment_bytes = decode_file_header(block[:count], disk.name)
    if segment_bytes is None:
        if any(block) or disk.next_data(BLOCK_BYTES) is not None:
            raise StartError(f"{disk.name} has a damaged header; restore it, or move it away", path=disk.name)
        block[:] = encode_file_header(layout.segment_bytes)
        disk.write(0, [block])
        disk.sync()
    elif segment_bytes != layout.segment_bytes:
        raise StartError(
            f"{disk.name} has replicas of {segment_bytes} bytes; start the backup with --segment-bytes {segment_bytes},"
            " or choose another --log-dirs",
            path=disk.name,
        )


def _check_identity(disk: BlockDisk, header: ReplicaHeader, identity: tuple[int, str]) -> None:
    if (header.backup_id, header.cluster_id) != identity:
        mine = f"of backup {identity[0]} of cluster {identity[1]}" if identity[0] else "of none that has joined"
        raise StartError(
            f"{disk.name} has replicas of backup {header.backup_id} of cluster {header.cluster_id},"
            f" and the data directory is {mine};"
            " restore the backup.json that belongs to them, or choose another --log-dirs",
            path=disk.name,
        )


def rebuild(scans: Sequence[DiskScan], states: Sequence[DiskState], layout: Layout) -> Restart:
    """Make replicas of the headers, and empty frames without a replica. Raises `StartError`, and ``OSError``."""
    restart = Restart()
    latest: dict[ReplicaId, tuple[int, int]] = {}
    for scan in scans:
        for _, header in scan.headers:
            restart.sequence = max(restart.sequence, header.sequence)
            restart.epochs[header.broker_id] = max(restart.epochs.get(header.broker_id, 0), header.broker_epoch)
            key = header.broker_id, header.virtual_segment_id
            latest[key] = max(latest.get(key, (0, -1)), (header.sequence, scan.number))
    buffer = aligned(layout.segment_bytes)
    for scan in scans:
        restart.found.headers_damaged += scan.damaged
        used: dict[int, int] = {}
        empty = []
        for index, header in scan.headers:
            key = header.broker_id, header.virtual_segment_id
            replica = None
            if latest[key] == (header.sequence, scan.number):
                replica = _replica(scan, index, header, layout, buffer, restart.found)
            if replica is None:
                empty.append(index)
            else:
                used[index] = replica.disk_bytes
                restart.replicas.append(replica)
        restart.found.frames_superseded += len(empty)
        if empty:
            give_back(scan.disk, layout, empty)
        states[scan.number].found_frames(used)
    restart.found.replicas = len(restart.replicas)
    return restart


def _replica(
    scan: DiskScan, index: int, header: ReplicaHeader, layout: Layout, buffer: memoryview, found: FoundReplicas
) -> Replica | None:
    """Return the replica in a frame; None: it has no durable data."""
    replica = Replica(
        broker_id=header.broker_id,
        virtual_segment_id=header.virtual_segment_id,
        broker_epoch=header.broker_epoch,
        stream_id=header.stream_id,
        virtual_log_id=header.virtual_log_id,
        frame=Frame(scan.number, index),
        length=header.length,
        checksum=header.checksum,
        chunk_count=header.chunk_count,
        closed=header.closed,
        sealed=True,
        touched=True,
    )
    if not (header.closed and header.vouched_length == header.length):
        found.unclosed += 1
        _cut_torn_write(scan.disk, replica, header, layout, buffer, found)
    replica.durable_length, replica.durable_checksum = replica.length, replica.checksum
    replica.durable_closed = replica.closed
    replica.vouched = header.vouched_length == header.length
    replica.disk_bytes = replica.written_bytes = BLOCK_BYTES + block_ceiling(header.length)
    return replica if replica.length else None


def _cut_torn_write(
    disk: BlockDisk, replica: Replica, header: ReplicaHeader, layout: Layout, buffer: memoryview, found: FoundReplicas
) -> None:
    """Read a replica whose last write may be unfinished, and cut that write off if it is."""
    window = disk_window(disk, layout, replica.frame.number, header.length, buffer)
    view = window(0, header.length)
    vouched = header.vouched_length
    tail = walk(memory_window(view, header.length), header.length, offset=vouched, streamlets=NONE_OF_THEM)
    refuse_unknown_version(disk.name, tail.unknown_version)
    checksum, start = header.vouched_checksum, vouched
    for end in tail.ends:
        checksum = chained_checksum(view, start, checksum)
        start = end
    if start != header.length or checksum != header.checksum or tail.damaged:
        found.torn_replicas += 1
        found.torn_bytes += header.length - vouched
        log.warning(
            "a write was never finished; it is cut off",
            path=disk.name,
            broker_id=replica.broker_id,
            virtual_segment_id=replica.virtual_segment_id,
            torn_bytes=header.length - vouched,
        )
        replica.length, replica.checksum, replica.closed = vouched, header.vouched_checksum, False
    whole = walk(memory_window(view, replica.length), replica.length, streamlets=NONE_OF_THEM)
    refuse_unknown_version(disk.name, whole.unknown_version)
    replica.chunk_count = len(whole.ends) + len(whole.damaged)
    note_damage(replica, whole.damaged, disk.name)
    found.chunks_damaged += len(whole.damaged)


def note_damage(replica: Replica, damaged: Iterable[int], path: str) -> int:
    """Note damage in a replica, and log new damage; return how many chunks are newly damaged."""
    new = set(damaged) - replica.damaged
    for offset in sorted(new):
        log.error(
            "a chunk does not match its checksums; it is not served",
            path=path,
            broker_id=replica.broker_id,
            virtual_segment_id=replica.virtual_segment_id,
            offset=offset,
        )
    replica.damaged |= new
    return len(new)
