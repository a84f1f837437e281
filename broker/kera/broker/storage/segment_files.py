"""Performs the jobs of the persistence manager: writes, reads and removes segment files, and changes the index.

    <root>/index/                    see ``kera.broker.storage.index``
    <root>/segments/00000a/000000002b1f.segment
    <root>/spare/                    see ``kera.broker.storage.spares``
    <root>/arriving/000000002b1f.segment             being recovered: not complete, removed by a start
    <root>/set-aside/000000002b1f.segment            with other data than the index says, or damaged: left alone

A segment file has the chunks of one segment from its first byte on, and zeros up to the end of the last block. Its name
is the physical id of the segment within its broker, given only once. A directory has up to 1,024 files.

Everything here blocks and runs on threads. Each segment has at most one job under way. A failed job has its error in
`error`, whatever it is; none is raised.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import struct
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

from kera.broker.log.scan import SegmentScan, address_of, scan_segment
from kera.broker.log.segment import Segment
from kera.broker.records import Change, Hole, SegmentAddress, SegmentRecord, place_of
from kera.broker.storage.disk import BLOCK_BYTES, Disk, block_ceiling
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.index_format import delete_removal, put_segment
from kera.broker.storage.jobs import ArriveJob, IndexJob, Job, LoadJob, RemoveJob, StoreJob
from kera.broker.storage.spares import SEGMENT_NAME, SPARE_BYTES_MIN, Spares
from kera.core.base.blocks import FILE_CALLS, FileCalls, sync_directory
from kera.core.base.telemetry import get_logger
from kera.core.errors import CorruptChunk
from kera.core.format.checksum import crc32c
from kera.core.format.chunk import HEADER_BYTES, ChunkHeader, padded, verify_header
from kera.core.format.combined_checksum import combined_checksum
from kera.core.format.newer_format import refuse_unknown_version

log = get_logger("kera.store")

FILES_PER_DIRECTORY = 1024
SUFFIX = ".segment"
_PLACE = struct.Struct("<8xI4xQI60xQII")
"""Fields of a chunk header: length of the payload, stream, streamlet, group, segment, entry."""


class SegmentStore:
    """Reads, writes and removes segment files and changes the index, on threads; failed jobs carry their error."""

    def __init__(
        self,
        root: Path,
        disk: Disk,
        index: SegmentIndex,
        spare_bytes_min: int = SPARE_BYTES_MIN,
        calls: FileCalls = FILE_CALLS,
    ) -> None:
        self.root = root
        self.calls = calls
        self.disk = disk
        self.index = index
        self._spares = Spares(root / "spare", disk, spare_bytes_min)

    def path(self, physical_id: int) -> Path:
        """Return the path of a file."""
        return segment_path(self.root, physical_id)

    def written_us(self, physical_id: int) -> int:
        """Return when a file was last written to, in microseconds since the Unix epoch."""
        return self.disk.modified_us(self.path(physical_id))

    def perform(self, job: Job) -> None:
        """Perform a job, which gets its result and error."""
        try:
            match job:
                case StoreJob():
                    self._write(job)
                case LoadJob():
                    self._load(job)
                case IndexJob():
                    self.index.commit(job.changes)
                case RemoveJob():
                    self.remove_files(job.physical_ids)
                case ArriveJob():
                    self._arrive(job)
        except Exception as error:  # noqa: BLE001 - whatever it is, the job has to end, so that it is tried again
            job.error = error if isinstance(error, OSError) else self._as_of_disk(error, job)
            if isinstance(job, StoreJob):
                with contextlib.suppress(OSError):
                    self._spares.clear()  # if the disk is full, that makes room

    def _as_of_disk(self, error: Exception, job: Job) -> OSError:
        """Return an error for an exception that is not of the disk: a defect, or an index that cannot be read."""
        log.error("a job of the log failed unexpectedly", job=type(job).__name__, exc_info=error)
        return OSError(errno.EIO, f"{type(error).__name__}: {error}", str(self.root))

    def _write(self, job: StoreJob) -> None:
        changes: list[Change] = list(job.changes)
        for part in job.parts:
            path = self.path(part.physical_id)
            if part.create and part.final:
                self._spares.write(path, part.view)
            else:
                if part.create:
                    self.disk.create(path, part.reserve_bytes)
                if len(part.view):
                    self.disk.write(path, part.offset, part.view)
            part.crc32c = combined_checksum(part.segment.slot.view, part.begin, part.chunk_ends, part.crc32c)
            if part.final and not part.create:
                self.disk.truncate(path, block_ceiling(part.end))
            if part.final or part.create:
                segment = part.segment
                record = segment.record()._replace(
                    length=part.end if part.final else 0, open=not part.final, crc32c=part.crc32c
                )
                changes.append(put_segment(segment.address, record))
        if changes or job.meta is not None:
            self.index.commit(changes, job.meta)

    def _load(self, job: LoadJob) -> None:
        segment = job.segment
        view = segment.slot.view
        wanted = view[: block_ceiling(segment.head)]
        path = self.path(segment.physical_id)
        try:
            count = self.disk.read(path, 0, wanted)
        except FileNotFoundError:
            count = 0
        wanted[count:] = bytes(len(wanted) - count)
        if crc32c(view[: segment.head]) == segment.crc32c:
            ends = chunk_ends(view, segment.head, segment.address)
            if ends is not None:
                job.chunk_ends = ends
                return
        if segment.dropped:
            return  # it was removed meanwhile, so another segment may have its file
        scan = scan_segment(view, address=segment.address, length=segment.head)
        job.chunk_ends, job.holes = scan.chunk_ends, scan.holes
        other = other_content(view, segment, scan)
        if other:
            job.chunk_ends = array("I", [segment.head])
            job.holes = [Hole(0, segment.head, f"its file has {other}")]
            self.set_aside_foreign(segment.physical_id, segment.address, other)

    def set_aside_foreign(self, physical_id: int, address: SegmentAddress, other: str) -> None:
        """Set aside a file that has other data than the index says, and log it."""
        log.error(
            "a segment file has other data than the index says, as if files of two brokers were mixed up",
            path=str(self.path(physical_id)),
            expected=place_of(address),
            found=other,
            set_aside=str(self.set_aside(physical_id) or ""),
        )

    def set_aside(self, physical_id: int) -> Path | None:
        """Move a file out of the way, where it is neither used nor removed; return its new path.

        Returns None if the file does not exist, or cannot be moved.
        """
        path, directory = self.path(physical_id), self.root / "set-aside"
        taken = self.disk.names(directory)
        names = (f"{path.name}{number or ''}" for number in itertools.count())
        aside = directory / next(name for name in names if name not in taken)
        try:
            self.disk.move(path, aside)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.error("cannot set a segment file aside", path=str(path), error=str(error))
            return None
        return aside

    def write_arriving(self, physical_id: int, view: memoryview, length: int) -> int:
        """Write a segment durably to a file in ``arriving``; return its checksum. Raises ``OSError``."""
        view[length : block_ceiling(length)] = bytes(block_ceiling(length) - length)
        self.disk.overwrite(self.arriving_path(physical_id), view[: block_ceiling(length)])
        return int(crc32c(view[:length]))

    def arriving_path(self, physical_id: int) -> Path:
        """Return the path of a file that is not complete yet."""
        return self.root / "arriving" / f"{physical_id:012x}{SUFFIX}"

    def _arrive(self, job: ArriveJob) -> None:
        if job.physical_ids:
            self.index.commit([], job.meta)  # so a start looks for these files if the next commit fails
            directories = set()
            for physical_id in job.physical_ids:
                path = self.path(physical_id)
                if not path.parent.is_dir():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    sync_directory(path.parent.parent, self.calls)
                with contextlib.suppress(FileNotFoundError):  # an earlier attempt may have moved it
                    self.calls.rename(self.arriving_path(physical_id), path)
                directories.add(path.parent)
            for directory in directories:
                sync_directory(directory, self.calls)
        self.index.commit(job.changes, job.meta)

    def clear_arriving(self) -> None:
        """Remove the files that were not complete when the last launch ended. Raises ``OSError``."""
        for path in sorted((self.root / "arriving").glob("*")):
            if SEGMENT_NAME.fullmatch(path.name):
                self.calls.remove(path)

    def remove_files(self, physical_ids: list[int]) -> None:
        """Remove files that the index has marked for removal, and the marks once the removal is durable.

        A file with another segment than expected is set aside, because it may have the last copy of that segment.
        """
        paths = {physical_id: self.path(physical_id) for physical_id in physical_ids}
        for physical_id, path in paths.items():
            address = self.index.removal(physical_id)
            other = None if address is None else self._segment_in(path)
            if address is None or other is None or other == address:
                self._spares.remove(path)
            else:
                self.set_aside_foreign(physical_id, address, place_of(other))
        self.disk.sync_removals(paths.values())
        if physical_ids:
            self.index.commit([delete_removal(physical_id) for physical_id in physical_ids])

    def _segment_in(self, path: Path) -> SegmentAddress | None:
        """Return the segment of a file's first chunk; None if the file cannot be read, or has no whole header there."""
        block = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        with contextlib.suppress(OSError, CorruptChunk):
            self.disk.read(path, 0, block)
            header = verify_header(block)
            return address_of(header) if header.placed else None
        return None

    # -- for the start, and offline --------------------------------------------------------------------------------

    def scan_file(
        self,
        physical_id: int,
        *,
        address: SegmentAddress | None = None,
        length: int | None = None,
        durable: int = 0,
        finished: bool = True,
    ) -> SegmentScan:
        """Verify all chunks of a file, see `scan_segment`. Raises ``OSError``, and `StartError` if it is newer."""
        path = self.path(physical_id)
        expected = block_ceiling(durable)  # bytes that a shortened file lacks before this count as damage
        buffer = memoryview(mmap.mmap(-1, max(BLOCK_BYTES, expected, block_ceiling(self.disk.length(path)))))
        size = max(expected, self.disk.read(path, 0, buffer))
        view = buffer if length is not None else buffer[:size]
        scan = scan_segment(view, address=address, length=length, durable=durable, finished=finished)
        refuse_unknown_version(str(path), scan.unknown_version)
        return scan

    def physical_ids(self, *, first: int = 0) -> Iterator[int]:
        """Yield the ids of the existing files, from `first` on, ascending."""
        segments = self.root / "segments"
        for directory in self.disk.names(segments):
            try:
                if (int(directory, 16) + 1) * FILES_PER_DIRECTORY <= first:
                    continue
            except ValueError:
                continue
            for name in self.disk.names(segments / directory):
                match = SEGMENT_NAME.fullmatch(name)
                if match and int(match[1], 16) >= first:
                    yield int(match[1], 16)


def segment_path(root: Path, physical_id: int) -> Path:
    """Return the path of a file under `root`."""
    return root / "segments" / f"{physical_id // FILES_PER_DIRECTORY:06x}" / f"{physical_id:012x}{SUFFIX}"


def chunk_ends(view: memoryview, length: int, address: SegmentAddress) -> array[int] | None:
    """Return the ends of all chunks, in bytes whose checksum was compared; None if they are of another segment.

    The checksum does not show that, because the crc32c of data that ends with its own crc32c, as headers do, is always
    the same.
    """
    ends = array("I")
    at = 0
    while at < length:
        payload_bytes, stream_id, streamlet_id, group_id, segment_id, entry = _PLACE.unpack_from(view, at)
        if (stream_id, streamlet_id, entry, group_id, segment_id) != address:
            return None
        at += HEADER_BYTES + padded(payload_bytes)
        ends.append(at)
    return ends


def other_content(view: memoryview, segment: Segment, scan: SegmentScan) -> str:
    """Return a description of the whole chunks that a file has instead of a segment's; empty: it has no such chunks.

    `scan`: the scan of the file for the segment's chunks.
    """
    if not scan.headers:
        with contextlib.suppress(CorruptChunk):
            header = verify_header(view)
            return place_of(address_of(header)) if header.placed and address_of(header) != segment.address else ""
    elif segment.crc32c and not all(_fits(header, segment) for header in scan.headers):
        return f"other chunks of {place_of(segment.address)}, of another cluster"
    return ""


def _fits(header: ChunkHeader, segment: Segment) -> bool:
    """Whether a chunk fits the segment's record in the index."""
    end_record = segment.first_record + segment.record_count
    return (
        segment.first_record <= header.first_record
        and header.first_record + header.record_count <= end_record
        and segment.min_timestamp_us <= header.min_timestamp_us
        and header.max_timestamp_us <= segment.max_timestamp_us
    )


def report_damage(path: Path, holes: Iterable[Hole]) -> None:
    """Log the damage in a file, chunk by chunk."""
    for hole in holes:
        log.error(
            "a chunk is damaged and will not be served",
            path=str(path),
            offset=hole.start,
            length_bytes=hole.end - hole.start,
            reason=hole.reason,
        )


def record_of(physical_id: int, scan: SegmentScan, crc: int, written_us: int) -> SegmentRecord:
    """Return the index record of a closed segment, from its chunks, at least one, and the time of its file."""
    headers = scan.headers
    first, last = headers[0], headers[-1]
    return SegmentRecord(
        physical_id=physical_id,
        length=scan.end,
        open=False,
        chunk_count=len(scan.chunk_ends),
        crc32c=crc,
        first_record=first.first_record,
        record_count=last.first_record + last.record_count - first.first_record,
        min_timestamp_us=min(header.min_timestamp_us for header in headers),
        max_timestamp_us=max(header.max_timestamp_us for header in headers),
        newest_us=written_us,
    )
