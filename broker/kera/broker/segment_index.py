"""The index of what is on the broker's disk, in LMDB: which segments there are, in which files, and what they hold.

The index is never evidence. Chunks say themselves where they belong, so whatever of the index is damaged or gone is
made anew from the segment files (``kera.broker.restart``). It is what makes a start cheap: nothing of it but one record
per entry is looked at, however long the history is, and a segment that is on disk only takes no memory but its record
here.

    key (big-endian, so that LMDB's order is the order of the log)       value (ends with a crc32c over key and value)
    "m"                                                                  JSON: format, whether the broker runs, counters
    "e" stream u64, streamlet u32, entry u32                             EntryRecord
    "s" stream u64, streamlet u32, entry u32, group u64, segment u32     SegmentRecord
    "p" stream u64, streamlet u32, producer u64                          epoch u32, next sequence u64
    "c" stream u64, streamlet u32, entry u32, application text           committed cursor: group, segment, offset
    "r" physical id u64                                                  empty: file to be removed
    "v" stream u64, virtual segment u64                                  see ``kera.broker.virtual_index``
    "o" stream u64, streamlet u32                                        OriginRecord
    "h" stream u64, streamlet u32                                        see ``kera.broker.handover``
    "i" stream u64                                                       see ``kera.broker.stream_records``

One thread writes (`commit`, durable when it returns), any thread reads.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
from crc32c import crc32c

from kera.broker.segment_scan import SegmentAddress
from kera.core.errors import StartError
from kera.core.ids import EARLIEST, EntryId, Position
from kera.core.telemetry import get_logger

log = get_logger("kera.index")

FORMAT = 1
MAP_BYTES = 64 << 30
"""Of address space, not of memory: the index of half a billion segments."""
LOCK_BYTES = 16 << 10
"""More than LMDB's lock file takes with `READERS_MAX` readers."""
READERS_MAX = 64
CHECK_TIMEOUT_S = 300.0
GAPS_MAX = 64
"""Of an entry: each is one loss of the host's memory."""

Change = tuple[bytes, bytes | None]
"""A key and its new value, or None to delete it."""

_CRC = struct.Struct("<I")
_ENTRY_KEY = struct.Struct(">cQII")
_SEGMENT_KEY = struct.Struct(">cQIIQI")
_PRODUCER_KEY = struct.Struct(">cQIQ")
_REMOVAL_KEY = struct.Struct(">cQ")
_SEGMENT = struct.Struct("<QIIIIQQqqq")
_ENTRY = struct.Struct("<QIIQQQQQII")
_GAP = struct.Struct("<QIIQII")
_PRODUCER = struct.Struct("<IQ")
_POSITION = struct.Struct("<QII")
_ORIGIN_KEY = struct.Struct(">cQI")
_ORIGIN = struct.Struct("<QQI")
_SOURCE = struct.Struct("<IQ")
_META = b"m"


class SegmentRecord(NamedTuple):
    """What the index has of one segment."""

    physical_id: int
    """Names its file. 0: it is not here yet, but to come from backups (``kera.broker.recovering``)."""
    length: int
    """Of its chunks, in bytes; while `open`, what was durable when this was written down."""
    open: bool
    """The file is still written to: its chunks say up to where."""
    chunk_count: int
    crc32c: int
    """Over all its bytes: whether a look at each chunk can be spared."""
    first_record: int
    record_count: int
    min_timestamp_us: int
    max_timestamp_us: int
    newest_us: int
    """When its last chunk was appended here, by the broker's clock: the age that retention goes by. Of what was
    recovered from backups, and of all that was written down before this was so, when its newest chunk was made, by its
    producer's clock."""


class Gap(NamedTuple):
    """Positions of an entry whose data was lost with the memory of a host, before it was on disk."""

    start: Position
    end: Position


class EntryRecord(NamedTuple):
    """What the index has of one entry: its stored part, as a whole."""

    start: Position = EARLIEST
    """First position that is there; `EARLIEST` when nothing ever was."""
    start_record: int = 0
    next_record: int = 0
    """Ordinal behind the last stored segment."""
    stored_bytes: int = 0
    stored_segments: int = 0
    last_group_id: int = 0
    last_segment_id: int = 0
    """The last stored segment; 0, 0 when there never was one."""
    gaps: tuple[Gap, ...] = ()


class ProducerRecord(NamedTuple):
    """Up to where chunks of a producer are stored in a streamlet."""

    producer_epoch: int
    next_sequence: int


class OriginRecord(NamedTuple):
    """That a streamlet was taken over from launches that are gone, and that the index has what was found of them."""

    sources: frozenset[tuple[int, int]]
    """Brokers, and the epoch before which their launches were."""
    next_group_id: int
    """Above all groups that they may have given."""
    records_lost: int
    """That no replica had, though they may have been acknowledged."""


def put_segment(address: SegmentAddress, record: SegmentRecord) -> Change:
    """The change that writes `record`."""
    value = _SEGMENT.pack(
        record.physical_id,
        record.length,
        record.open,
        record.chunk_count,
        record.crc32c,
        record.first_record,
        record.record_count,
        record.min_timestamp_us,
        record.max_timestamp_us,
        record.newest_us,
    )
    return sealed(_segment_key(address), value)


def delete_segment(address: SegmentAddress) -> Change:
    """The change that forgets a segment."""
    return _segment_key(address), None


def put_entry(entry: EntryId, record: EntryRecord) -> Change:
    """The change that writes `record`."""
    value = _ENTRY.pack(
        *record.start,
        record.start_record,
        record.next_record,
        record.stored_bytes,
        record.stored_segments,
        record.last_group_id,
        record.last_segment_id,
        len(record.gaps),
    )
    gaps = b"".join(_GAP.pack(*gap.start, *gap.end) for gap in record.gaps)
    return sealed(_ENTRY_KEY.pack(b"e", *entry), value + gaps)


def put_producer(stream_id: int, streamlet_id: int, producer_id: int, record: ProducerRecord) -> Change:
    """The change that writes `record`."""
    return sealed(_PRODUCER_KEY.pack(b"p", stream_id, streamlet_id, producer_id), _PRODUCER.pack(*record))


def no_producer(stream_id: int, streamlet_id: int, producer_id: int) -> Change:
    """The change that deletes the record of a producer."""
    return _PRODUCER_KEY.pack(b"p", stream_id, streamlet_id, producer_id), None


def put_cursor(entry: EntryId, application_id: str, position: Position) -> Change:
    """The change that writes how far an application has read."""
    return sealed(_ENTRY_KEY.pack(b"c", *entry) + application_id.encode(), _POSITION.pack(*position))


def put_origin(stream_id: int, streamlet_id: int, record: OriginRecord) -> Change:
    """The change that writes `record`."""
    value = _ORIGIN.pack(record.next_group_id, record.records_lost, len(record.sources))
    value += b"".join(_SOURCE.pack(*source) for source in sorted(record.sources))
    return sealed(_ORIGIN_KEY.pack(b"o", stream_id, streamlet_id), value)


def delete_origin(stream_id: int, streamlet_id: int) -> Change:
    """The change that forgets where a streamlet came from."""
    return _ORIGIN_KEY.pack(b"o", stream_id, streamlet_id), None


def put_removal(physical_id: int) -> Change:
    """The change that remembers a file to be removed."""
    return sealed(_REMOVAL_KEY.pack(b"r", physical_id), b"")


def delete_removal(physical_id: int) -> Change:
    """The change that says that the file is gone."""
    return _REMOVAL_KEY.pack(b"r", physical_id), None


def stream_of(key: bytes) -> int | None:
    """The stream that a key belongs to."""
    return int.from_bytes(key[1:9], "big") if key[:1] in b"espcvohi" and len(key) > 1 else None


def streamlet_of(key: bytes) -> tuple[int, int] | None:
    """The stream and streamlet that a key belongs to, if it belongs to one streamlet."""
    if key[:1] not in b"espcoh" or len(key) <= 1:
        return None
    return int.from_bytes(key[1:9], "big"), int.from_bytes(key[9:13], "big")


def with_gap(gaps: tuple[Gap, ...], gap: Gap) -> tuple[Gap, ...]:
    """One gap more; the oldest are joined when they are too many."""
    gaps = (*gaps, gap)
    if len(gaps) <= GAPS_MAX:
        return gaps
    return (Gap(gaps[0].start, gaps[1].end), *gaps[2:])


def _segment_key(address: SegmentAddress) -> bytes:
    return _SEGMENT_KEY.pack(b"s", *address)


def sealed(key: bytes, value: bytes) -> Change:
    """The change that writes `value`, with its checksum."""
    return key, value + _CRC.pack(crc32c(value, crc32c(key)))


def intact(key: bytes, value: bytes) -> bool:
    """Whether a record is what was written."""
    if len(value) < _CRC.size:
        return False
    (checksum,) = _CRC.unpack_from(value, len(value) - _CRC.size)
    return bool(checksum == crc32c(value[: -_CRC.size], crc32c(key)))


class SegmentIndex:
    """The index of one broker; see the head of this module. `open` makes it."""

    def __init__(self, path: Path, environment: lmdb.Environment) -> None:
        self.path = path
        self._environment = environment
        self.was_closed = False
        """There is a checksum of the last launch, which it writes last of all: it ended in good order."""

    @classmethod
    def open(cls, path: Path, *, durable: bool = True) -> SegmentIndex:
        """Open the index in `path`, or make it. Raises `StartError`."""
        path.mkdir(parents=True, exist_ok=True)
        _reserve(path / "lock.mdb")
        try:
            environment = lmdb.open(
                str(path), map_size=MAP_BYTES, mode=0o600, sync=durable, metasync=durable, max_readers=READERS_MAX
            )
        except lmdb.Error as error:
            raise StartError(f"cannot open the index in {path}: {error}; remove it, it is made anew") from error
        return cls(path, environment)

    @classmethod
    def open_checked(cls, path: Path) -> tuple[SegmentIndex, bool]:
        """Open the index in `path` after making sure that nothing in it can harm; and whether all of it was there.

        After a clean stop its checksum is compared. Otherwise a process of its own copies what is intact: damaged pages
        of LMDB can crash whoever follows them. False when records were damaged or are gone: then it must be repaired.
        """
        data, checksum = path / "data.mdb", path / "data.crc32"
        whole = True
        was_closed = checksum.exists()
        if data.exists():
            expected = checksum.read_bytes() if checksum.exists() else b""
            checksum.unlink(missing_ok=True)
            if expected != file_checksum(data).encode():
                whole = _copy_intact(path)
        elif checksum.exists():
            checksum.unlink()
            whole = False
        index = cls.open(path)
        index.was_closed = was_closed
        return index, whole

    # -- reading ---------------------------------------------------------------------------------------------------

    def meta(self) -> dict[str, Any]:
        """What the broker remembers of itself; empty for a new index."""
        value = self._get(_META)
        return {} if value is None else dict(json.loads(value))

    def segment(self, address: SegmentAddress) -> SegmentRecord | None:
        """The record of a segment, None when it is not on disk."""
        value = self._get(_segment_key(address))
        return None if value is None else _segment_record(value)

    def following(self, address: SegmentAddress) -> tuple[SegmentAddress, SegmentRecord] | None:
        """The first segment of the same entry behind `address`, which need not exist itself."""
        return next(self.segments(address[:3], after=address), None)

    def segments(
        self, entry: tuple[int, int, int], *, after: SegmentAddress | None = None
    ) -> Iterator[tuple[SegmentAddress, SegmentRecord]]:
        """The segments of an entry in order, those behind `after` if it is given.

        Each is looked up anew: between two of them the index may change.
        """
        prefix = _ENTRY_KEY.pack(b"s", *entry)
        key = prefix if after is None else _segment_key(after) + b"\0"
        while (found := self._at_or_after(key, prefix)) is not None:
            yield SegmentAddress(*_SEGMENT_KEY.unpack(found[0])[1:]), _segment_record(found[1])
            key = found[0] + b"\0"

    def entry(self, entry: EntryId) -> EntryRecord | None:
        """The record of an entry, None when nothing of it was ever stored."""
        value = self._get(_ENTRY_KEY.pack(b"e", *entry))
        if value is None:
            return None
        group, segment, offset, start_record, next_record, size, count, last_group, last_segment, gaps = (
            _ENTRY.unpack_from(value)
        )
        return EntryRecord(
            Position(group, segment, offset),
            start_record,
            next_record,
            size,
            count,
            last_group,
            last_segment,
            tuple(
                Gap(Position(*numbers[:3]), Position(*numbers[3:]))
                for numbers in _GAP.iter_unpack(value[_ENTRY.size : _ENTRY.size + gaps * _GAP.size])
            ),
        )

    def entries(self) -> Iterator[EntryId]:
        """All entries that have a record."""
        for key, _ in self.records(b"e"):
            yield EntryId(*_ENTRY_KEY.unpack(key)[1:])

    def producers(self, stream_id: int, streamlet_id: int) -> dict[int, ProducerRecord]:
        """The producers of a streamlet."""
        prefix = struct.pack(">cQI", b"p", stream_id, streamlet_id)
        return {
            _PRODUCER_KEY.unpack(key)[3]: ProducerRecord(*_PRODUCER.unpack(value))
            for key, value in self.records(prefix)
        }

    def cursors(self, entry: EntryId) -> dict[str, Position]:
        """How far applications have read an entry."""
        prefix = _ENTRY_KEY.pack(b"c", *entry)
        return {key[len(prefix) :].decode(): Position(*_POSITION.unpack(value)) for key, value in self.records(prefix)}

    def removals(self) -> list[int]:
        """Physical ids of files that are to be removed."""
        return [_REMOVAL_KEY.unpack(key)[1] for key, _ in self.records(b"r")]

    def stream_ids(self) -> set[int]:
        """Streams of which there is anything."""
        keys = (key for kind in (b"e", b"v", b"i") for key, _ in self.records(kind))
        return {stream_id for key in keys if (stream_id := stream_of(key)) is not None}

    def keys_of_stream(self, stream_id: int) -> list[bytes]:
        """All keys that have to do with a stream."""
        kinds = (b"e", b"s", b"p", b"c", b"v", b"o", b"h", b"i")
        return [key for kind in kinds for key, _ in self.records(struct.pack(">cQ", kind, stream_id))]

    def keys_of_streamlet(self, stream_id: int, streamlet_id: int) -> list[bytes]:
        """All keys that have to do with one streamlet only."""
        kinds = (b"e", b"s", b"p", b"c", b"o", b"h")
        return [key for kind in kinds for key, _ in self.records(_ORIGIN_KEY.pack(kind, stream_id, streamlet_id))]

    def origin(self, stream_id: int, streamlet_id: int) -> OriginRecord | None:
        """What was taken over of a streamlet; None: nothing, or it is all here for good."""
        value = self._get(_ORIGIN_KEY.pack(b"o", stream_id, streamlet_id))
        if value is None:
            return None
        next_group_id, records_lost, count = _ORIGIN.unpack_from(value)
        sources = _SOURCE.iter_unpack(value[_ORIGIN.size : _ORIGIN.size + count * _SOURCE.size])
        return OriginRecord(frozenset((broker_id, epoch) for broker_id, epoch in sources), next_group_id, records_lost)

    def segments_of_streamlet(
        self, stream_id: int, streamlet_id: int
    ) -> Iterator[tuple[SegmentAddress, SegmentRecord]]:
        """All segments of a streamlet, entry by entry."""
        for key, value in self.records(_ORIGIN_KEY.pack(b"s", stream_id, streamlet_id)):
            yield SegmentAddress(*_SEGMENT_KEY.unpack(key)[1:]), _segment_record(value)

    def segments_of_stream(self, stream_id: int) -> Iterator[tuple[SegmentAddress, SegmentRecord]]:
        """All segments of a stream."""
        for key, value in self.records(struct.pack(">cQ", b"s", stream_id)):
            yield SegmentAddress(*_SEGMENT_KEY.unpack(key)[1:]), _segment_record(value)

    def all_segments(self) -> Iterator[tuple[SegmentAddress, SegmentRecord]]:
        """All segments of all streams."""
        for key, value in self.records(b"s"):
            yield SegmentAddress(*_SEGMENT_KEY.unpack(key)[1:]), _segment_record(value)

    def open_segments(self, entry: EntryId) -> list[tuple[SegmentAddress, SegmentRecord]]:
        """Segments of an entry whose files are still written to: they are its last ones."""
        prefix = _ENTRY_KEY.pack(b"s", *entry)
        found = []
        with self._environment.begin() as transaction:
            cursor = transaction.cursor()
            there = (cursor.set_range(prefix + b"\xff" * 12) and cursor.prev()) or cursor.last()
            while there and cursor.key().startswith(prefix):
                record = _segment_record(cursor.value())
                if not record.open:
                    break
                found.append((SegmentAddress(*_SEGMENT_KEY.unpack(cursor.key())[1:]), record))
                there = cursor.prev()
        return found[::-1]

    def _get(self, key: bytes) -> bytes | None:
        with self._environment.begin() as transaction:
            value = transaction.get(key)
        return None if value is None or not intact(key, value) else value[: -_CRC.size]

    def _at_or_after(self, key: bytes, prefix: bytes) -> tuple[bytes, bytes] | None:
        with self._environment.begin() as transaction:
            cursor = transaction.cursor()
            if not cursor.set_range(key) or not cursor.key().startswith(prefix):
                return None
            return cursor.key(), cursor.value()

    def record(self, key: bytes) -> bytes | None:
        """The value of a key without its checksum; None when there is none that is intact."""
        return self._get(key)

    def records(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """All keys with this prefix, and their values without the checksum."""
        with self._environment.begin() as transaction:
            cursor = transaction.cursor()
            there = cursor.set_range(prefix)
            while there and cursor.key().startswith(prefix):
                yield cursor.key(), cursor.value()[: -_CRC.size]
                there = cursor.next()

    # -- writing ---------------------------------------------------------------------------------------------------

    def commit(self, changes: Iterable[Change], meta: dict[str, Any] | None = None) -> None:
        """Make all changes, or none. Raises ``OSError`` when the disk does not take them."""
        try:
            with self._environment.begin(write=True) as transaction:
                for key, value in changes:
                    if value is None:
                        transaction.delete(key)
                    else:
                        transaction.put(key, value)
                if meta is not None:
                    # Jobs end in any order: a number that was given once must not be given again.
                    old = transaction.get(_META)
                    known = json.loads(old[: -_CRC.size])["next_physical_id"] if old is not None else 1
                    meta = dict(meta, next_physical_id=max(known, meta["next_physical_id"]))
                    key, value = sealed(_META, json.dumps(meta).encode())
                    transaction.put(key, value or b"")
        except lmdb.Error as error:
            raise OSError(getattr(error, "code", 0), f"index {self.path}: {error}") from error

    def close(self, *, clean: bool = False) -> None:
        """Close the environment; `clean`: leave a checksum, which spares the next start its check."""
        self._environment.sync(True)  # noqa: FBT003 - lmdb's own signature
        self._environment.close()
        if clean:
            (self.path / "data.crc32").write_text(file_checksum(self.path / "data.mdb"))


def _segment_record(value: bytes) -> SegmentRecord:
    physical_id, length, is_open, chunks, crc, first, count, low, high, newest = _SEGMENT.unpack_from(value)
    return SegmentRecord(physical_id, length, bool(is_open), chunks, crc, first, count, low, high, newest)


def file_checksum(path: Path) -> str:
    """A checksum over a file, in hexadecimal digits. Not crc32c: to that, records ending with theirs all look alike."""
    checksum = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(8 << 20):
            checksum = zlib.crc32(block, checksum)
    return f"{checksum:08x}"


def _reserve(path: Path) -> None:
    """Make LMDB's lock file: LMDB maps it without room for it, and on a full disk the first access would kill us."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, LOCK_BYTES)
    finally:
        os.close(fd)


def _copy_intact(path: Path) -> bool:
    """Replace the index by a copy of its intact records; returns whether that was all of it."""
    copy = path.with_name(path.name + ".copy")
    shutil.rmtree(copy, ignore_errors=True)
    command = [sys.executable, "-m", "kera.broker.index_copy", str(path), str(copy)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=CHECK_TIMEOUT_S, check=False)  # noqa: S603 - ourselves
        report = json.loads(done.stdout) if done.returncode == 0 else None
        reason = done.stderr.decode(errors="replace").strip()[-500:] or f"exit code {done.returncode}"
    except (subprocess.TimeoutExpired, ValueError) as error:
        report, reason = None, str(error)
    if report is None:
        log.error("index is damaged; it is made anew from the segments", path=str(path), reason=reason)
        shutil.rmtree(copy, ignore_errors=True)
        (path / "data.mdb").unlink()
        return False
    whole = not (report["damaged"] or report["missing"])
    if not report["written"]:
        shutil.rmtree(copy, ignore_errors=True)
        if whole:
            return True
        raise StartError(
            f"the index in {path} is damaged, and there is no room for a copy without the damage; make room",
            path=str(path),
        )
    (copy / "data.mdb").replace(path / "data.mdb")
    shutil.rmtree(copy, ignore_errors=True)
    if not whole:
        log.error(
            "index has damaged records; they are made anew from the segments",
            path=str(path / "data.mdb"),
            damaged=report["damaged"],
            missing=report["missing"],
        )
    return whole
