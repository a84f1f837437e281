"""Verifies a broker's data directory while no broker runs: checks that all of it is as it was written.

    broker.json, broker.copy.json   format and checksum
    log/index                       copied record by record, by a process that may crash; nothing is written there
    log/segments                    each record's file by its checksum; if that differs, chunk by chunk
    log/arriving, log/spare         the names: files of incomplete segments, and files to be overwritten
    log/set-aside                   reports each file's content: the broker no longer uses these files
    in each entry                   ordinals of records without a gap

Promises: nothing in the directory is changed; damage is reported and never raised; one segment is in memory at a time.
Other modules repair damage: a start rebuilds the index (``kera.broker.storage.restart``), and missing data of segments
is read from backups (``kera.broker.recovery.healing``), or readers get the error that it is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kera.broker.log.scan import SegmentScan, scan_segment
from kera.broker.records import EntryRecord, SegmentAddress, SegmentRecord, place_of
from kera.broker.registration import BrokerIdentity
from kera.broker.storage.index import CHECK_TIMEOUT_S, SegmentIndex, file_checksum
from kera.broker.storage.segment_files import segment_path
from kera.broker.storage.spares import SEGMENT_NAME
from kera.core.base.ids import EntryId
from kera.core.errors import StartError
from kera.core.format.checksum import crc32c
from kera.server.verifying import Defect, check_identity, unused


@dataclass(slots=True)
class SegmentsChecked:
    """The checked data so far."""

    segments: int = 0
    chunks: int = 0
    records: int = 0
    bytes: int = 0
    """Size of the segments, including damaged chunks."""
    segments_to_come: int = 0
    """Number of segments that are being recovered, and are only on backups."""
    segments_expected: int = 0
    """Number of segments to check."""


@dataclass(slots=True)
class IndexCopy:
    """A private copy of the intact records of an index."""

    index: SegmentIndex | None
    """The copy; None if the index is missing, or cannot be read at all."""
    damaged: int = 0
    """Number of records that do not match their checksums."""
    missing: int = 0
    """Number of records that cannot be reached any more."""
    error: str = ""
    """Why the index cannot be read; empty: it can, or is missing."""

    @property
    def whole(self) -> bool:
        """Whether the copy has all records of the index."""
        return self.index is not None and not self.damaged and not self.missing


def verify(data_dir: Path, totals: SegmentsChecked, progress: Callable[[], None] = lambda: None) -> Iterator[Defect]:
    """Check everything in `data_dir`; `totals` grow meanwhile, and `progress` is called after each segment.

    Raises `StartError` if it is not a data directory, if a broker uses it, or if a newer version has written it.
    """
    data_dir = data_dir.absolute()
    if not any((data_dir / name).exists() for name in (*BrokerIdentity.names(), "log")):
        raise StartError(
            f"{data_dir} is not a broker's data directory: it has neither {BrokerIdentity.names()[0]} nor log"
        )
    with unused(data_dir) as free:
        if not free:
            raise StartError(f"a broker uses data directory {data_dir}; stop it first")
        yield from check_identity(data_dir, BrokerIdentity)
        root = data_dir / "log"
        if root.is_dir():
            with index_copy(root / "index") as copy:
                yield from _check_index(root / "index", copy)
                yield from _Log(root, copy, totals, progress).check()


@contextlib.contextmanager
def index_copy(path: Path) -> Iterator[IndexCopy]:
    """Copy the intact records of the index in `path`: damaged pages of LMDB can crash the process that reads them."""
    if not (path / "data.mdb").exists():
        yield IndexCopy(None)
        return
    with tempfile.TemporaryDirectory(prefix="kera-index-") as temporary:
        target = Path(temporary) / "index"
        command = [sys.executable, "-m", "kera.broker.storage.index_copy", str(path), str(target)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=CHECK_TIMEOUT_S, check=False)  # noqa: S603
            reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {done.returncode}"
            report = json.loads(done.stdout) if done.returncode == 0 else None
        except (subprocess.TimeoutExpired, ValueError) as error:
            report, reason = None, str(error)
        if report is None:
            yield IndexCopy(None, error=reason)
            return
        index = SegmentIndex.open(target, durable=False)
        try:
            yield IndexCopy(index, report["damaged"], report["missing"])
        finally:
            index.close()


def read_segment(path: Path, length: int | None = None) -> memoryview:
    """Return the first `length` bytes of a file, with zeros if it is shorter; None: all of it. Raises ``OSError``."""
    with path.open("rb", buffering=0) as file:
        view = memoryview(bytearray(os.fstat(file.fileno()).st_size if length is None else length))
        done = 0
        while done < len(view) and (count := file.readinto(view[done:])):
            done += count
    return view


def scan_all(view: memoryview, *, address: SegmentAddress | None = None) -> SegmentScan:
    """Find all chunks in a file of unknown length, including those behind a torn tail, which a start cuts off."""
    scan = scan_segment(view, address=address, length=len(view))
    if scan.holes and scan.holes[-1].end == len(view):
        last = scan.holes.pop()
        scan.chunk_ends.pop()
        scan.end = last.start + len(bytes(view[last.start :]).rstrip(b"\0"))
        if scan.end > last.start:
            scan.holes.append(last._replace(end=scan.end))
            scan.chunk_ends.append(scan.end)
    return scan


def _content(path: Path) -> str:
    """Return a description of the segment in a file."""
    try:
        address = scan_all(read_segment(path)).address
    except OSError as error:
        return f"content that cannot be read: {error.strerror}"
    return "no whole chunk" if address is None else place_of(address)


def _check_index(path: Path, copy: IndexCopy) -> Iterator[Defect]:
    """Report damage of the index in `path`, according to its copy."""
    data, checksum = path / "data.mdb", path / "data.crc32"
    anew = "the next start rebuilds it from the segment files"
    if copy.error:
        yield Defect("damage", data, None, 0, f"cannot be read ({copy.error}); {anew}")
    elif copy.index is None:
        yield Defect("damage", data, None, 0, f"is missing; {anew}")
    elif copy.damaged or copy.missing:
        yield Defect("damage", data, None, 0, f"{copy.damaged} records are damaged, {copy.missing} missing; {anew}")
    elif checksum.exists() and checksum.read_bytes().strip() != file_checksum(data).encode():
        yield Defect("damage", data, None, 0, f"does not match {checksum.name}; all its records are intact")


@dataclass(slots=True)
class _Seen:
    """The part of an entry that was checked so far."""

    end_record: int
    """Ordinal behind the last segment."""
    stored_segments: int = 0
    """Number of closed segments."""
    stored_record: int = 0
    """Ordinal behind the last closed segment."""


@dataclass(slots=True)
class _Log:
    """A check of all segments."""

    root: Path
    copy: IndexCopy
    totals: SegmentsChecked
    progress: Callable[[], None]
    named: set[int] = field(default_factory=set)
    """Files that the index knows."""
    entries: dict[EntryId, _Seen] = field(default_factory=dict)

    def check(self) -> Iterator[Defect]:
        index = self.copy.index
        if index is None:
            self.totals.segments_expected = sum(1 for _ in self._files())
        else:
            self.totals.segments_expected = sum(1 for _ in index.all_segments())
            self.named.update(index.removals())
            for address, record in index.all_segments():
                self.named.update(() if record.to_come else [record.physical_id])
                yield from self._check_segment(address, record)
                self.progress()
            if self.copy.whole:
                yield from self._check_entries(index)
        for path in sorted((self.root / "set-aside").glob("*")):
            yield Defect("warning", path, None, 0, f"set aside by a broker; it has {_content(path)}")
        for path in sorted(path for name in ("arriving", "spare") for path in (self.root / name).glob("*")):
            if not SEGMENT_NAME.fullmatch(path.name):
                yield Defect("warning", path, None, 0, "not a file of a broker; it is left alone")
        for path, physical_id in self._files():
            if physical_id in self.named:
                continue
            if self.copy.whole:
                yield Defect("warning", path, None, 0, "no record of the index names it")
            else:
                yield from self._check_unknown(path)
                self.progress()

    def _files(self) -> Iterator[tuple[Path, int | None]]:
        """Yield all files, each with its physical id, if its path has one."""
        segments = self.root / "segments"
        for directory in sorted(segments.iterdir()) if segments.is_dir() else ():
            for path in sorted(directory.iterdir()) if directory.is_dir() else [directory]:
                with contextlib.suppress(ValueError):
                    physical_id = int(path.stem, 16)
                    if segment_path(self.root, physical_id) == path:
                        yield path, physical_id
                        continue
                yield path, None

    def _check_segment(self, address: SegmentAddress, record: SegmentRecord) -> Iterator[Defect]:
        path, place = segment_path(self.root, record.physical_id), place_of(address)
        if record.to_come:
            path = self.root / "index" / "data.mdb"
        seen = self.entries.setdefault(EntryId(*address[:3]), _Seen(record.first_record))
        if record.first_record > seen.end_record:
            lost = f"records {seen.end_record} to {record.first_record - 1}"
            yield Defect("damage", path, None, 0, f"{lost} are missing before {place}")
        elif record.first_record < seen.end_record:
            twice = f"records {record.first_record} to {seen.end_record - 1}"
            yield Defect("damage", path, None, 0, f"{twice} are there twice: in {place}, and before it")
        seen.end_record = record.first_record + (0 if record.open else record.record_count)
        if not record.open:
            seen.stored_segments += 1
            seen.stored_record = seen.end_record
        if record.to_come:
            self.totals.segments_to_come += 1  # from backups: it has no file yet
            return
        try:
            view = read_segment(path, None if record.open else record.length)
        except FileNotFoundError:
            yield Defect("damage", path, None, record.length, f"is missing; it had {place}")
            return
        except OSError as error:
            yield Defect("damage", path, None, record.length, f"cannot be read: {error.strerror}; it has {place}")
            return
        if not record.open and crc32c(view) == record.crc32c:
            self._count(record.chunk_count, record.record_count, record.length)
            return
        if record.open:
            scan = scan_segment(view, address=address, durable=record.length)
        else:
            scan = scan_segment(view, address=address, length=record.length)
        if record.open and scan.headers:
            seen.end_record = scan.headers[-1].first_record + scan.headers[-1].record_count
        yield from self._report(path, view, scan)
        yield from self._check_identity(path, address, record, scan, view)

    @staticmethod
    def _check_identity(
        path: Path, address: SegmentAddress, record: SegmentRecord, scan: SegmentScan, view: memoryview
    ) -> Iterator[Defect]:
        """Report chunks of another segment, or a wrong checksum, in a file that does not match its checksum."""
        place, other = place_of(address), None if scan.headers else scan_all(view).address
        if other is not None:
            text = (
                f"has {place_of(other)} instead of {place}: files were mixed up, perhaps of two brokers. Put each back"
                " in its place; else the broker sets it aside, and reads the segment from backups if they have it"
            )
            yield Defect("damage", path, None, record.length, text)
        elif not record.open and not scan.holes and record.crc32c:  # 0: unknown, as of a file found by a start
            text = f"does not match the checksum that the index has of {place}; all its chunks match theirs"
            yield Defect("warning", path, None, record.length, text)

    def _check_unknown(self, path: Path) -> Iterator[Defect]:
        """Check a file without a record, by its chunks."""
        try:
            view = read_segment(path)
            yield from self._report(path, view, scan_segment(view))
        except OSError as error:
            yield Defect("damage", path, None, 0, f"cannot be read: {error.strerror}")

    def _report(self, path: Path, view: memoryview, scan: SegmentScan) -> Iterator[Defect]:
        self._count(len(scan.headers), scan.record_count, scan.end)
        for hole in scan.holes:
            yield Defect("damage", path, hole.start, hole.end - hole.start, hole.reason)
        if scan.torn_bytes:
            behind = len(scan_all(view, address=scan.address).headers) - len(scan.headers)
            text = f", or damage: {behind} whole chunks follow" if behind else ""
            text = f"a write that was not finished{text}; the next start cuts it"
            yield Defect("damage" if behind else "warning", path, scan.end, scan.torn_bytes, text)

    def _count(self, chunks: int, records: int, size: int) -> None:
        self.totals.segments += 1
        self.totals.chunks += chunks
        self.totals.records += records
        self.totals.bytes += size

    def _check_entries(self, index: SegmentIndex) -> Iterator[Defect]:
        """Report entries whose segments in the index are not those that the entry's record counts."""
        for entry_id in index.entries():
            record, seen = index.entry(entry_id) or EntryRecord(), self.entries.get(entry_id) or _Seen(0)
            there = seen.stored_segments, seen.stored_record if seen.stored_segments else record.next_record
            wanted = record.stored_segments, record.next_record
            if there != wanted:
                text = (
                    f"of {place_of(entry_id)}, {there[0]} segments up to record {there[1]} are left"
                    f" of {wanted[0]} up to record {wanted[1]}"
                )
                yield Defect("damage", self.root / "index" / "data.mdb", None, 0, text)
