"""The index of the broker's disk, in LMDB: which segments exist, in which files, and what they hold.

The index is not the only evidence: chunks name their segments, so a start can rebuild damaged or missing records from
the segment files (``kera.broker.storage.restart``). The index makes a start cheap: a start reads only one record per
entry, however long the history is. A segment that is only on disk takes no memory besides its record here.

``kera.broker.storage.index_format`` describes keys and values.

One thread writes (`commit`, durable when it returns), any thread reads.
"""

from __future__ import annotations

import errno
import json
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lmdb

from kera.broker.records import (
    Change,
    Digests,
    EntryRecord,
    OriginRecord,
    ProducerRecord,
    SegmentAddress,
    SegmentRecord,
)
from kera.broker.storage.index_format import (
    CRC,
    ENTRY_KEY,
    ORIGIN_KEY,
    POSITION,
    PRODUCER,
    PRODUCER_KEY,
    REMOVAL_KEY,
    SEGMENT_KEY,
    digests_record,
    entry_record,
    intact,
    merged,
    origin_record,
    removal_record,
    sealed,
    segment_key,
    segment_record,
    stream_of,
)
from kera.core.base.blocks import identity_of
from kera.core.base.ids import EntryId, Position
from kera.core.base.telemetry import get_logger
from kera.core.errors import StartError
from kera.server.lmdb_lock import reserve_lock

log = get_logger("kera.index")

_META = b"m"

FORMAT = 1
MAP_BYTES = 64 << 30
"""Address space, not memory: enough for the index of half a billion segments."""
LOCK_BYTES = 16 << 10
"""More than LMDB's lock file needs for `READERS_MAX` readers."""
READERS_MAX = 64
CHECK_TIMEOUT_S = 300.0


CopyIndex = Callable[[Path, Path], dict[str, int]]
"""Copies the intact records of an index, and returns counts, as ``kera.broker.storage.index_copy``."""
OpenEnvironment = Callable[..., lmdb.Environment]
"""Opens a database; by default `lmdb.open`."""
OpenIndex = Callable[[Path], "tuple[SegmentIndex, bool]"]
"""See `SegmentIndex.open_checked`."""


class CopyFailed(Exception):
    """The copying process has failed, or has taken too long."""


class SegmentIndex:
    """The index of one broker, in LMDB: one thread writes, any thread reads. `open` creates the object."""

    def __init__(self, path: Path, environment: lmdb.Environment) -> None:
        self.path = path
        self._environment = environment
        self._file = path / "data.mdb"
        self._identity = identity_of(self._file)
        self.was_closed = False
        """Whether the last launch stopped cleanly: it then leaves a checksum, which it writes last of all."""

    @classmethod
    def open(cls, path: Path, *, durable: bool = True, environment_of: OpenEnvironment | None = None) -> SegmentIndex:
        """Open the index in `path`, or create it. Raises `StartError`."""
        path.mkdir(parents=True, exist_ok=True)
        reserve_lock(path / "lock.mdb", LOCK_BYTES)
        try:
            environment = (environment_of or lmdb.open)(
                str(path), map_size=MAP_BYTES, mode=0o600, sync=durable, metasync=durable, max_readers=READERS_MAX
            )
        except lmdb.Error as error:
            raise StartError(
                f"cannot open the index in {path}: {error}; remove it, and the broker rebuilds it"
            ) from error
        return cls(path, environment)

    @classmethod
    def open_checked(
        cls,
        path: Path,
        copying: CopyIndex | None = None,
        environment_of: OpenEnvironment | None = None,
    ) -> tuple[SegmentIndex, bool]:
        """Open the index in `path` after checking it; return it, and whether it is complete.

        After a clean stop, its checksum is compared. Otherwise a separate process (or `copying`) copies the intact
        records, because damaged pages of LMDB can crash the process that reads them. The second value is False if
        records were damaged or are missing: then the caller has to repair the index.
        """
        data, checksum = path / "data.mdb", path / "data.crc32"
        whole = True
        was_closed = checksum.exists()
        if data.exists():
            expected = checksum.read_bytes() if checksum.exists() else b""
            checksum.unlink(missing_ok=True)
            if expected != file_checksum(data).encode():
                whole = _copy_intact(path, copying or copy_apart)
        elif checksum.exists():
            checksum.unlink()
            whole = False
        index = cls.open(path, environment_of=environment_of)
        index.was_closed = was_closed
        return index, whole

    # -- reading ---------------------------------------------------------------------------------------------------

    def meta(self) -> dict[str, Any]:
        """Return the index's record about the broker; empty for a new index."""
        value = self.record(_META)
        return {} if value is None else dict(json.loads(value))

    def segment(self, address: SegmentAddress) -> SegmentRecord | None:
        """Return the record of a segment; None if it is not on disk."""
        value = self.record(segment_key(address))
        return None if value is None else segment_record(value)

    def following(self, address: SegmentAddress) -> tuple[SegmentAddress, SegmentRecord] | None:
        """Return the first segment of the same entry behind `address`, which itself need not exist."""
        return next(self.segments(address[:3], after=address), None)

    def segments(
        self, entry: tuple[int, int, int], *, after: SegmentAddress | None = None
    ) -> Iterator[tuple[SegmentAddress, SegmentRecord]]:
        """Yield the segments of an entry in order, or those behind `after`.

        Each is looked up anew, because the index may change between two of them.
        """
        prefix = ENTRY_KEY.pack(b"s", *entry)
        key = prefix if after is None else segment_key(after) + b"\0"
        while (found := self._at_or_after(key, prefix)) is not None:
            yield SegmentAddress(*SEGMENT_KEY.unpack(found[0])[1:]), segment_record(found[1])
            key = found[0] + b"\0"

    def entry(self, entry: EntryId) -> EntryRecord | None:
        """Return the record of an entry; None if none of its data was ever stored."""
        value = self.record(ENTRY_KEY.pack(b"e", *entry))
        return None if value is None else entry_record(value)

    def entries(self) -> Iterator[EntryId]:
        """Yield all entries that have a record."""
        for key, _ in self.records(b"e"):
            yield EntryId(*ENTRY_KEY.unpack(key)[1:])

    def producers(self, stream_id: int, streamlet_id: int) -> dict[int, ProducerRecord]:
        """Return the progress of a streamlet's producers."""
        prefix = struct.pack(">cQI", b"p", stream_id, streamlet_id)
        return {
            PRODUCER_KEY.unpack(key)[3]: ProducerRecord(*PRODUCER.unpack(value)) for key, value in self.records(prefix)
        }

    def digests(self, stream_id: int, streamlet_id: int, producer_id: int) -> Digests | None:
        """Return the digests of a producer's last chunks; None if the index has none."""
        value = self.record(PRODUCER_KEY.pack(b"q", stream_id, streamlet_id, producer_id))
        return None if value is None else digests_record(value)

    def cursors(self, entry: EntryId) -> dict[str, Position]:
        """Return how far consumer groups have read an entry."""
        prefix = ENTRY_KEY.pack(b"c", *entry)
        return {key[len(prefix) :].decode(): Position(*POSITION.unpack(value)) for key, value in self.records(prefix)}

    def removals(self) -> list[int]:
        """Return the physical ids of files that have to be removed."""
        return [REMOVAL_KEY.unpack(key)[1] for key, _ in self.records(b"r")]

    def removal(self, physical_id: int) -> SegmentAddress | None:
        """Return the segment in a file that has to be removed; None if unknown."""
        return removal_record(self.record(REMOVAL_KEY.pack(b"r", physical_id)) or b"")

    def stream_ids(self) -> set[int]:
        """Return the streams that have any records."""
        keys = (key for kind in (b"e", b"v", b"i") for key, _ in self.records(kind))
        return {stream_id for key in keys if (stream_id := stream_of(key)) is not None}

    def keys_of_stream(self, stream_id: int) -> list[bytes]:
        """Return all keys of a stream."""
        kinds = (b"e", b"s", b"p", b"q", b"c", b"v", b"o", b"h", b"i", b"u")
        return [key for kind in kinds for key, _ in self.records(struct.pack(">cQ", kind, stream_id))]

    def keys_of_streamlet(self, stream_id: int, streamlet_id: int) -> list[bytes]:
        """Return all keys of one streamlet."""
        kinds = (b"e", b"s", b"p", b"q", b"c", b"o", b"h", b"u")
        return [key for kind in kinds for key, _ in self.records(ORIGIN_KEY.pack(kind, stream_id, streamlet_id))]

    def origin(self, stream_id: int, streamlet_id: int) -> OriginRecord | None:
        """Return the origin of a streamlet that was taken over; None if it was not, or all of it is here for good."""
        value = self.record(ORIGIN_KEY.pack(b"o", stream_id, streamlet_id))
        return None if value is None else origin_record(value)

    def segments_of_streamlet(
        self, stream_id: int, streamlet_id: int
    ) -> Iterator[tuple[SegmentAddress, SegmentRecord]]:
        """Yield all segments of a streamlet, entry by entry."""
        for key, value in self.records(ORIGIN_KEY.pack(b"s", stream_id, streamlet_id)):
            yield SegmentAddress(*SEGMENT_KEY.unpack(key)[1:]), segment_record(value)

    def segments_of_stream(self, stream_id: int) -> Iterator[tuple[SegmentAddress, SegmentRecord]]:
        """Yield all segments of a stream."""
        for key, value in self.records(struct.pack(">cQ", b"s", stream_id)):
            yield SegmentAddress(*SEGMENT_KEY.unpack(key)[1:]), segment_record(value)

    def all_segments(self) -> Iterator[tuple[SegmentAddress, SegmentRecord]]:
        """Yield all segments of all streams."""
        for key, value in self.records(b"s"):
            yield SegmentAddress(*SEGMENT_KEY.unpack(key)[1:]), segment_record(value)

    def open_segments(self, entry: EntryId) -> list[tuple[SegmentAddress, SegmentRecord]]:
        """Return an entry's open segments, whose files are still written to: they are its last ones."""
        prefix = ENTRY_KEY.pack(b"s", *entry)
        found = []
        with self._environment.begin() as transaction:
            cursor = transaction.cursor()
            there = (cursor.set_range(prefix + b"\xff" * 12) and cursor.prev()) or cursor.last()
            while there and cursor.key().startswith(prefix):
                record = segment_record(cursor.value())
                if not record.open:
                    break
                found.append((SegmentAddress(*SEGMENT_KEY.unpack(cursor.key())[1:]), record))
                there = cursor.prev()
        return found[::-1]

    def record(self, key: bytes) -> bytes | None:
        """Return the value of a key without its checksum; None if there is no intact one."""
        with self._environment.begin() as transaction:
            value = transaction.get(key)
        return None if value is None or not intact(key, value) else value[: -CRC.size]

    def _at_or_after(self, key: bytes, prefix: bytes) -> tuple[bytes, bytes] | None:
        with self._environment.begin() as transaction:
            cursor = transaction.cursor()
            if not cursor.set_range(key) or not cursor.key().startswith(prefix):
                return None
            return cursor.key(), cursor.value()

    def records(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield all keys with this prefix, and their values without the checksum."""
        with self._environment.begin() as transaction:
            cursor = transaction.cursor()
            there = cursor.set_range(prefix)
            while there and cursor.key().startswith(prefix):
                yield cursor.key(), cursor.value()[: -CRC.size]
                there = cursor.next()

    # -- writing ---------------------------------------------------------------------------------------------------

    def commit(self, changes: Iterable[Change], meta: dict[str, Any] | None = None) -> None:
        """Make all changes, or none. Raises ``OSError`` if the disk does not take them."""
        if identity_of(self._file) != self._identity:  # a file without a name would be lost with the process
            problem = "removed or replaced while the broker runs; put it back, or restart the broker, which rebuilds it"
            raise OSError(errno.ESTALE, problem, str(self._file))
        try:
            with self._environment.begin(write=True) as transaction:
                for key, value in changes:
                    if value is None:
                        transaction.delete(key)
                    else:
                        transaction.put(key, merged(key, value, transaction.get(key)))
                if meta is not None:
                    # Jobs end in any order, but an id must never be given twice.
                    old = transaction.get(_META)
                    known = json.loads(old[: -CRC.size])["next_physical_id"] if old is not None else 1
                    meta = dict(meta, next_physical_id=max(known, meta["next_physical_id"]))
                    key, value = sealed(_META, json.dumps(meta).encode())
                    transaction.put(key, value or b"")
        except lmdb.Error as error:
            raise OSError(getattr(error, "code", 0), f"index {self.path}: {error}") from error

    def close(self, *, clean: bool = False) -> None:
        """Close the environment; `clean`: leave a checksum, so the next start need not copy the index."""
        self._environment.sync(True)  # noqa: FBT003 - lmdb's own signature
        self._environment.close()
        if clean:
            (self.path / "data.crc32").write_text(file_checksum(self.path / "data.mdb"))


def file_checksum(path: Path) -> str:
    """Return a checksum of a file, in hexadecimal digits.

    It is not a crc32c, for which all records that end with their own crc32c look alike.
    """
    checksum = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(8 << 20):
            checksum = zlib.crc32(block, checksum)
    return f"{checksum:08x}"


def copy_apart(source: Path, target: Path) -> dict[str, int]:
    """Run ``kera.broker.storage.index_copy`` in a separate process; return its counts. Raises `CopyFailed`."""
    command = [sys.executable, "-m", "kera.broker.storage.index_copy", str(source), str(target)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=CHECK_TIMEOUT_S, check=False)  # noqa: S603 - ourselves
        if done.returncode == 0:
            report: dict[str, int] = json.loads(done.stdout)
            return report
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise CopyFailed(str(error)) from error
    raise CopyFailed(done.stderr.decode(errors="replace").strip()[-500:] or f"exit code {done.returncode}")


def _copy_intact(path: Path, copying: CopyIndex) -> bool:
    """Replace the index by a copy of its intact records; return whether these are all records."""
    copy = path.with_name(path.name + ".copy")
    shutil.rmtree(copy, ignore_errors=True)
    try:
        report = copying(path, copy)
    except CopyFailed as error:
        log.error("rebuilding the damaged index from the segments", path=str(path), reason=str(error))
        shutil.rmtree(copy, ignore_errors=True)
        (path / "data.mdb").unlink()
        return False
    if report["foreign"] and not report["copied"]:
        shutil.rmtree(copy, ignore_errors=True)
        raise StartError(
            f"{path} has a database that is not the index of a broker, such as the metadata of a coordinator: files of"
            " two data directories were mixed up; put each back in its place",
            path=str(path),
        )
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
            "rebuilding damaged records of the index from the segments",
            path=str(path / "data.mdb"),
            damaged=report["damaged"],
            missing=report["missing"],
        )
    return whole
