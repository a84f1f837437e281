"""Checks the directories of backups that do not run: are the replicas undamaged, and do they agree?

    backup.json, fences.json, and their copies   format and checksum
    log/replicas.log                             that it is not cut off, as far as its content shows its length
                                                 each replica: its header, its chunks, and the checksum over them
    several backups                              replicas of one virtual segment, byte by byte, as far as all have it
    with a broker's log                          each of its chunks with the replicas of it (other code reads the log)

Promises: no file is changed; damage is reported and never raised; at most two replicas are in memory at a time, and a
few numbers for each chunk. An unfinished write is not damage: the next start cuts it, see ``kera.backup.restart``.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

from kera.backup import fences
from kera.backup.frames import Layout, ReplicaHeader, decode_file_header, decode_header
from kera.backup.log_file import NAME, LogFile, aligned
from kera.backup.reading import disk_window, memory_window, walk
from kera.backup.registration import BackupIdentity
from kera.core.base.blocks import BLOCK_BYTES, FILE_CALLS, block_ceiling
from kera.core.errors import CorruptChunk, StartError
from kera.core.format.chunk import ALIGNMENT_BYTES, ChunkHeader, chained_checksum, read_header, verify_header
from kera.server.verifying import Defect, check_identity, unused


@dataclass(slots=True)
class ReplicasChecked:
    """Data that were checked and found whole so far."""

    replicas: int = 0
    chunks: int = 0
    bytes: int = 0
    """Size of the replicas, damaged chunks included."""
    replicas_expected: int = 0
    """How many replicas there are to check."""


class LogPlace(NamedTuple):
    """The place of a chunk in a broker's log: its segment and entry, and its first record."""

    stream_id: int
    streamlet_id: int
    entry: int
    group_id: int
    segment_id: int
    first_record: int


def place_of(header: ChunkHeader) -> LogPlace:
    """Return the place of a chunk, from its header."""
    return LogPlace(
        header.stream_id, header.streamlet_id, header.entry, header.group_id, header.segment_id, header.first_record
    )


class _ReadOnly(LogFile):
    """The file of a disk, opened only for reading."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises ``OSError``."""
        self.name = str(path)
        self._direct, self._calls = 0, FILE_CALLS
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)


@dataclass(slots=True, eq=False)
class StoredReplica:
    """A replica in a file; an unfinished last write is cut off."""

    path: Path
    frame: int
    header: ReplicaHeader
    length: int
    checksum: int
    closed: bool
    chunk_ends: list[int] = field(default_factory=list)
    """Ends of whole chunks."""
    holes: list[tuple[int, int]] = field(default_factory=list)
    """Start and end of each damaged part."""

    @property
    def replica_id(self) -> tuple[int, int]:
        """Broker and virtual segment."""
        return self.header.broker_id, self.header.virtual_segment_id

    def damaged(self, start: int, end: int) -> bool:
        """Return whether there is damage between `start` and `end`."""
        return any(first < end and start < last for first, last in self.holes)

    def __str__(self) -> str:
        return f"virtual segment {self.header.virtual_segment_id:#x} of broker {self.header.broker_id}"


def is_backup(directory: Path) -> bool:
    """Return whether this is a backup's data directory, or one of its directories of replicas."""
    return any((directory / name).exists() for name in (*BackupIdentity.names(), NAME, f"log/{NAME}"))


class BackupFiles:
    """The files of a backup in one directory. `opened` creates the object, and keeps daemons out meanwhile."""

    def __init__(self, directory: Path) -> None:
        """`directory`: the data directory, or one of ``--log-dirs``."""
        self.directory = directory
        self.path = directory / NAME if (directory / NAME).exists() else directory / "log" / NAME
        self.replicas: list[StoredReplica] = []
        """The replicas that were checked."""
        self._disk: _ReadOnly | None = None
        self._size = 0
        """Size of the file."""
        self._layout = Layout(0)
        self._found: list[tuple[int, ReplicaHeader]] = []
        self._early: list[Defect] = []

    @classmethod
    @contextlib.contextmanager
    def opened(cls, directory: Path) -> Iterator[Self]:
        """Read all headers. Raises `StartError` if a backup uses the directory, or a newer version has written it."""
        directory = directory.absolute()
        files = cls(directory)
        with unused(directory) as free:
            if not free:
                raise StartError(f"a backup uses data directory {directory}; stop it first")
            try:
                files._early += _check_files(directory)
                files._open()
                yield files
            finally:
                if files._disk is not None:
                    files._disk.close()

    @property
    def count(self) -> int:
        """The number of replicas to check."""
        return len(self._found)

    @property
    def backup_ids(self) -> set[int]:
        """Ids of the backups whose replicas are in the directory, or would be if there were any.

        Empty if that is unknown: for one of ``--log-dirs`` without replicas, and for a data directory whose replicas
        are elsewhere.
        """
        found = {header.backup_id for _, header in self._found}
        for name in BackupIdentity.names() if self.path.exists() else ():
            with contextlib.suppress(OSError, ValueError):  # reported elsewhere
                identity = BackupIdentity.read(self.directory / name)
                found |= {identity.member_id} if identity is not None else set()
        return found

    def _open(self) -> None:
        if not self.path.exists():
            text = "has no replicas; name the directories of its --log-dirs as well"
            self._early.append(Defect("warning", self.directory, None, 0, text))
            return
        try:
            self._disk = _ReadOnly(self.path)
            self._size = self.path.stat().st_size
            # The file gets its header before the backup gets its identity.
            if self._size < BLOCK_BYTES and (self._size or self.backup_ids):
                text = f"is cut off: it has {self._size} bytes, and its header alone takes {BLOCK_BYTES}"
                self._early.append(Defect("damage", self.path, None, 0, text))
            block = aligned(BLOCK_BYTES)
            segment_bytes = decode_file_header(block[: self._disk.read(0, block)], str(self.path))
            if segment_bytes is None:
                if any(block) or self._disk.next_data(BLOCK_BYTES) is not None:
                    self._early.append(Defect("damage", self.path, 0, BLOCK_BYTES, "the header of the file is damaged"))
                return
            self._layout = Layout(segment_bytes)
            self._read_headers(self._disk)
        except OSError as error:
            self._early.append(Defect("damage", self.path, None, 0, f"cannot be read: {error.strerror}"))

    def _read_headers(self, disk: _ReadOnly) -> None:
        """Read the headers of the replicas that a start would take over."""
        block = aligned(BLOCK_BYTES)
        latest: dict[tuple[int, int], tuple[int, ReplicaHeader]] = {}
        at: int | None = BLOCK_BYTES
        while at is not None and (at := disk.next_data(at)) is not None:
            index = self._layout.frame_at(max(at, BLOCK_BYTES))
            start = self._layout.offset(index)
            count = disk.read(start, block)
            header = decode_header(block[:count], f"frame {index} of {self.path}")
            if header is not None and header.vouched_length <= header.length <= self._layout.segment_bytes:
                key = header.broker_id, header.virtual_segment_id
                if key not in latest or header.sequence > latest[key][1].sequence:
                    latest[key] = index, header
            elif any(block[:count]):
                text = "the header of a replica is damaged; the replica is lost"
                self._early.append(Defect("damage", self.path, start, BLOCK_BYTES, text))
            at = start + self._layout.frame_bytes
        self._found = sorted(latest.values(), key=lambda item: item[0])

    def check(self, totals: ReplicasChecked, progress: Callable[[], None] = lambda: None) -> Iterator[Defect]:
        """Check every replica; adds to `totals`, and calls `progress` after each."""
        yield from self._early
        owners = {(header.backup_id, header.cluster_id) for _, header in self._found}
        if len(owners) > 1:
            text = f"has replicas of {len(owners)} backups: {', '.join(f'{n} of {c}' for n, c in sorted(owners))}"
            yield Defect("damage", self.path, None, 0, text)
        for index, header in self._found:
            yield from self._check(index, header, totals)
            progress()

    def _check(self, index: int, header: ReplicaHeader, totals: ReplicasChecked) -> Iterator[Defect]:
        at = self._layout.offset(index) + BLOCK_BYTES
        replica = StoredReplica(self.path, index, header, header.length, header.checksum, header.closed)
        try:
            view = self.read(replica)
        except OSError as error:
            yield Defect("damage", self.path, at, header.length, f"cannot be read: {error.strerror}; it has {replica}")
            return
        ends = _find_holes(view, replica)
        wrong = list(_wrong_checksums(view, ends, replica))
        tail_torn = any(end > header.vouched_length for _, end in replica.holes) or header.length in wrong
        if header.vouched_length < header.length and tail_torn:
            torn = header.length - header.vouched_length
            text = f"a write that was not finished, of {replica}; the next start cuts it"
            yield Defect("warning", self.path, at + header.vouched_length, torn, text)
            replica.length, replica.checksum, replica.closed = header.vouched_length, header.vouched_checksum, False
            replica.holes = [hole for hole in replica.holes if hole[0] < replica.length]
            ends = ends[: bisect_left(ends, replica.length + 1)]
        replica.chunk_ends = ends
        for start, end in replica.holes:
            text = f"a chunk of {replica} does not match its checksums"
            if at + end > self._size:
                text += f": the file is cut off, and ends at {self._size}"
            yield Defect("damage", self.path, at + start, end - start, text)
        if not replica.holes:
            if replica.length in wrong:
                text = f"{replica} does not match the checksum over its chunks, though each of them is whole"
                yield Defect("damage", self.path, at, replica.length, text)
            elif replica.length == header.length and len(ends) != header.chunk_count:
                text = f"{replica} has {len(ends)} chunks, and its header says {header.chunk_count}"
                yield Defect("damage", self.path, at, replica.length, text)
        totals.replicas += 1
        totals.chunks += len(ends)
        totals.bytes += replica.length
        if replica.length:
            self.replicas.append(replica)

    def read(self, replica: StoredReplica) -> memoryview:
        """Return all bytes of a replica. Raises ``OSError``."""
        if self._disk is None:
            raise OSError(0, "it is closed")
        buffer = aligned(max(BLOCK_BYTES, block_ceiling(replica.length)))
        return disk_window(self._disk, self._layout, replica.frame, replica.length, buffer)(0, replica.length)

    def offset(self, replica: StoredReplica, at: int = 0) -> int:
        """Return the offset in the file of a byte of a replica."""
        return self._layout.offset(replica.frame) + BLOCK_BYTES + at


def compare(backups: Sequence[BackupFiles]) -> Iterator[Defect]:
    """Compare the replicas of each virtual segment, after all `backups` were checked."""
    for versions in by_replica(backups).values():
        # A closed replica has its final length; of others, only the part that all have may have been acknowledged.
        versions.sort(key=lambda item: (not item[1].closed, bool(item[1].holes), -item[1].length))
        files, first = versions[0]
        if len(versions) == 1:
            continue
        try:
            view = files.read(first)
            for other_files, other in versions[1:]:
                yield from _compare(files, first, view, other_files, other)
        except OSError as error:
            yield Defect("damage", first.path, None, 0, f"cannot be read: {error.strerror}")


def by_replica(backups: Iterable[BackupFiles]) -> dict[tuple[int, int], list[tuple[BackupFiles, StoredReplica]]]:
    """Return replicas by broker and virtual segment; of each backup only the latest."""
    latest: dict[tuple[int, tuple[int, int]], tuple[BackupFiles, StoredReplica]] = {}
    for files in backups:
        for replica in files.replicas:
            key = replica.header.backup_id, replica.replica_id
            if key not in latest or replica.header.sequence > latest[key][1].header.sequence:
                latest[key] = files, replica
    found: dict[tuple[int, int], list[tuple[BackupFiles, StoredReplica]]] = {}
    for (_, replica_id), version in sorted(latest.items(), key=lambda item: item[0]):
        found.setdefault(replica_id, []).append(version)
    return found


class LogComparison:
    """The chunks in the replicas of one broker, for comparison with its log."""

    def __init__(self, backups: Sequence[BackupFiles], broker_id: int) -> None:
        """`backups`: must all be checked before. Raises ``OSError``."""
        self.streams: set[int] = set()
        """The streams that have replicas."""
        self._places: dict[LogPlace, list[tuple[BackupFiles, StoredReplica, int]]] = {}
        self._view: tuple[StoredReplica, memoryview] | None = None
        for (owner, _), versions in by_replica(backups).items():
            for files, replica in versions if owner == broker_id else ():
                self.streams.add(replica.header.stream_id)
                view = files.read(replica)
                for start, header in _chunks(view, replica.chunk_ends):
                    self._places.setdefault(place_of(header), []).append((files, replica, start))

    def check(self, chunk: memoryview, path: Path, at: int) -> tuple[int, list[Defect]]:
        """Return how many replicas a whole chunk of the log has, and which of them differ. Raises ``OSError``.

        `path` and `at`: the place of the chunk in the log.
        """
        header = read_header(chunk)
        found = self._places.get(place_of(header), [])
        findings = []
        for files, replica, start in found:
            view = self._read(files, replica)
            if view[start : start + header.chunk_bytes] != chunk:
                text = f"a chunk of {replica} differs from the one in the log, {path} at {at}"
                where = files.offset(replica, start)
                findings.append(Defect("damage", files.path, where, header.chunk_bytes, text))
        return len(found), findings

    def _read(self, files: BackupFiles, replica: StoredReplica) -> memoryview:
        if self._view is None or self._view[0] is not replica:
            self._view = replica, files.read(replica)
        return self._view[1]


def _compare(
    files: BackupFiles, first: StoredReplica, view: memoryview, other_files: BackupFiles, other: StoredReplica
) -> Iterator[Defect]:
    if first.closed and other.closed and first.length != other.length:
        text = f"{other} was closed at {other.length}, and at {first.length} in {first.path}"
        yield Defect("damage", other.path, other_files.offset(other), other.length, text)
    common = min(first.length, other.length)
    other_view = other_files.read(other)
    if view[:common] == other_view[:common]:
        return
    for start, header in _chunks(view, first.chunk_ends):
        end = min(start + header.chunk_bytes, common)
        if start >= common or other.damaged(start, end) or view[start:end] == other_view[start:end]:
            continue
        where = f"{first.path} at {files.offset(first, start)}"
        text = f"a chunk of {other} differs from the one in {where}"
        yield Defect("damage", other.path, other_files.offset(other, start), end - start, text)


def _find_holes(view: memoryview, replica: StoredReplica) -> list[int]:
    """Return the ends of whole chunks; add the parts between them to `holes`."""
    found = walk(memory_window(view, replica.length), replica.length)
    at = 0
    breaks = sorted(found.damaged)
    for start, header in _chunks(view, found.ends):
        if start > at:
            replica.holes += _parts(at, start, breaks)
        at = start + header.chunk_bytes
    if at < replica.length:
        replica.holes += _parts(at, replica.length, breaks)
    return list(found.ends)


def _parts(start: int, end: int, breaks: Sequence[int]) -> list[tuple[int, int]]:
    """Split a part without whole chunks where damaged chunks are known to begin."""
    edges = [start, *(each for each in breaks if start < each < end), end]
    return list(pairwise(edges))


def _chunks(view: memoryview, ends: Iterable[int]) -> Iterator[tuple[int, ChunkHeader]]:
    """Yield the start and the header of each chunk that ends at one of `ends`; there may be damage between them."""
    at = 0
    for end in ends:
        for start in range(at, end, ALIGNMENT_BYTES):
            with contextlib.suppress(CorruptChunk):
                header = verify_header(view, start)
                if start + header.chunk_bytes == end:
                    yield start, header
                    break
        at = end


def _wrong_checksums(view: memoryview, ends: Iterable[int], replica: StoredReplica) -> Iterator[int]:
    """Yield the lengths for which the header's checksum does not match the chunks, up to the first damage."""
    header = replica.header
    wanted = {header.vouched_length: header.vouched_checksum, header.length: header.checksum}
    checksum = at = 0
    for end in ends:
        if replica.holes and end > replica.holes[0][0]:
            return
        checksum = chained_checksum(view, at, checksum)
        at = end
        if wanted.get(end, checksum) != checksum:
            yield end
    for length in wanted:
        if 0 < length <= at and length not in ends:
            yield length  # no chunk ends there


def _check_files(directory: Path) -> Iterator[Defect]:
    identified = any((directory / name).exists() for name in BackupIdentity.names())
    if not identified and (directory / NAME).exists():
        return  # one of ``--log-dirs``
    yield from check_identity(directory, BackupIdentity)
    if not identified:
        return
    try:
        damaged, missing = fences.check_fences(directory)
        for path, reason in damaged.items():
            yield Defect("damage", path, None, 0, reason)
        if len(missing) == 1:
            yield Defect("warning", missing[0], None, 0, "is missing; the next start rewrites it")
    except StartError as error:
        yield Defect("damage", directory / fences.NAME, None, 0, error.message)
