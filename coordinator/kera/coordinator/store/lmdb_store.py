"""The metadata store of a lone coordinator: LMDB, embedded, in its data directory.

A commit is synchronous: data and then the page that makes it valid are on disk when a write returns, so that a crash at
any point leaves the store as it was before or after the write. Commits run on their own thread, one after the other,
because a slow disk must not hold up heartbeats. Reads are memory accesses and run in the caller's thread.

    <data_dir>/lock              one coordinator per directory, see `DataDir`
    <data_dir>/metadata/         the LMDB environment, with two databases:
        store                    "format" → version of this layout, as decimal text
        records                  key → version (u64, big-endian), then the value
    <data_dir>/metadata.damaged  damaged metadata that a copy has replaced; the next are metadata.damaged-2, …

A restore that replaces damaged metadata may be killed halfway. Then there are no metadata, or an empty database, beside
the ones that were set aside. No coordinator begins a new cluster there (`RestoreInterrupted`), and the next restore
continues from there.

A file that could make LMDB end the process is refused before, see ``kera.coordinator.store.lmdb_file``.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count, islice
from pathlib import Path

import lmdb

from kera.coordinator.store import lmdb_file
from kera.coordinator.store.data_dir import DataDir
from kera.coordinator.store.metadata import (
    Check,
    MetadataDamaged,
    MetadataStoreFailed,
    MetadataStoreFull,
    StoredRecord,
    UnknownFormat,
    Write,
    check_writes,
    conflict,
)
from kera.core.base.blocks import identity_of, sync_directory
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger
from kera.core.errors import DiskFull, KeraError, StartError, Unavailable
from kera.server.lmdb_lock import reserve_lock

log = get_logger("kera.metadata")

FORMAT = 1
LOCK_BYTES = 8 << 10
"""Size of LMDB's lock file with LMDB's default number of readers."""
DATABASES = 2
_FORMAT_KEY = b"format"
_VERSION = struct.Struct(">Q")
OpenEnvironment = Callable[..., lmdb.Environment]
"""Opens a database; `lmdb.open` by default."""


_DAMAGE = (lmdb_file.DamagedFile, lmdb.InvalidError, lmdb.CorruptedError, lmdb.PageNotFoundError)


class RestoreInterrupted(StartError):
    """Damaged metadata were set aside, and nothing was put in their place."""

    code = "restore_interrupted"


class LmdbStore:
    """See `kera.coordinator.store.metadata.MetadataStore`. Owns the data directory while it is open.

    Raises `PathNotWritable`, `DataDirInUse`, `MetadataDamaged`, `RestoreInterrupted`, `UnknownFormat` or `StartError`.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        bytes_max: int,
        committing: ThreadPoolExecutor | None = None,
        environment_of: OpenEnvironment | None = None,
        for_copy: bool = False,
        replace_damaged: bool = False,
    ) -> None:
        """`committing`: the single thread that commits; it ends with the store.

        `for_copy`: a copy will be put into the store, so an earlier attempt that was interrupted is no error. With
        `replace_damaged`, damaged metadata are also set aside, and the store is empty. They are put back if the store
        is closed without a write.
        """
        self._directory = DataDir(data_dir)
        self._path = self._directory.path / "metadata"
        self._bytes_max = bytes_max
        self._committing = committing or ThreadPoolExecutor(1, thread_name_prefix="kera-metadata")
        self._for_copy = for_copy or replace_damaged
        self._failing = Repeated(log)
        self._problem = ""
        """The error of the last write; empty if it succeeded."""
        self._set_aside: Path | None = None
        """The place of damaged metadata, until something is written in their stead."""
        try:
            self._open_or_replace(environment_of, replace_damaged=replace_damaged)
        except BaseException:
            self._let_go()
            raise

    def _open_or_replace(self, environment_of: OpenEnvironment | None, *, replace_damaged: bool) -> None:
        try:
            self._open(environment_of)
        except MetadataDamaged as damaged:
            if not replace_damaged:
                raise
            aside = next(each for each in self._places_aside() if not os.path.lexists(each))
            self._move(self._path, aside)
            self._set_aside = aside
            log.warning("damaged metadata are set aside", path=str(aside), reason=damaged.attributes["reason"])
            self._open(environment_of)

    def _places_aside(self) -> Iterator[Path]:
        """Yield the places for damaged metadata, in the order of use."""
        for number in count(1):
            yield self._path.with_name(f"{self._path.name}.damaged{f'-{number}' if number > 1 else ''}")

    def _check_place(self) -> None:
        """Check whether missing metadata were set aside. Raises `RestoreInterrupted` if so, unless a restore
        continues.
        """
        aside = next(self._places_aside())
        if self._set_aside is not None or not os.path.lexists(aside):
            return
        if not self._for_copy:
            raise RestoreInterrupted(
                f"{self._path} has no metadata, and {aside} has damaged ones: putting a copy in their place was"
                f" interrupted. Repeat kera cluster restore FILE --data-dir {self._directory.path}, or move {aside} to"
                " another directory to begin a new cluster",
                path=str(self._path),
                aside=str(aside),
            )
        log.warning("going on with a restore that was interrupted", damaged=str(aside))

    def _let_go(self) -> None:
        try:
            if self._set_aside is not None:
                shutil.rmtree(self._path, ignore_errors=True)
                self._move(self._set_aside, self._path)
                log.warning("damaged metadata are back in their place", path=str(self._path))
        finally:
            self._directory.close()

    def _move(self, path: Path, to: Path) -> None:
        try:
            path.rename(to)
            sync_directory(path.parent)
        except OSError as error:
            raise StartError(f"cannot rename {path} to {to}: {error.strerror}", path=str(path)) from error

    def _open(self, environment_of: OpenEnvironment | None) -> None:
        file = self._path / "data.mdb"
        is_new = not os.path.lexists(file)
        if is_new:
            self._check_place()
        try:
            # LMDB would make a directory that only root can enter, and earlier versions of KerA have let it.
            self._path.mkdir(exist_ok=True)
            self._path.chmod(0o700)
            if not is_new:
                lmdb_file.check(file)
            reserve_lock(self._path / "lock.mdb", LOCK_BYTES)
            self._environment = (environment_of or lmdb.open)(
                str(self._path), map_size=self._bytes_max, max_dbs=DATABASES, mode=0o600
            )
            try:
                self._refuse_other_database()
                self._check_format()
                self._records = self._environment.open_db(b"records")
                self._identity = identity_of(file)
                if is_new:  # a commit is not durable while the file's name can vanish
                    sync_directory(self._path)
                    sync_directory(self._path.parent)
                elif self._is_empty():
                    self._check_place()
            except BaseException:
                self._environment.close()
                raise
        except _DAMAGE as error:
            raise MetadataDamaged(
                f"{file} is damaged: {error}; put a copy back with kera cluster restore FILE --data-dir"
                f" {self._directory.path} --force, or remove {self._path} if this coordinator has never run",
                path=str(file),
                reason=str(error),
            ) from error
        except (lmdb.Error, OSError) as error:
            if is_new:  # a half-written new file, as on a full disk, would count as damaged at the next start
                with suppress(OSError):
                    file.unlink()
            raise StartError(
                f"cannot use metadata in {self._path}: {error}{self._hint(error)}", path=str(self._path)
            ) from error

    def _refuse_other_database(self) -> None:
        """Raise `StartError` for a database that is not a coordinator's: it would become a new cluster's."""
        with self._environment.begin() as transaction:
            names = list(islice(transaction.cursor().iternext(values=False), DATABASES + 1))
        if names and b"store" not in names:
            raise StartError(
                f"{self._path} has a database that is not a coordinator's, such as the index of a broker: files of two"
                " data directories were mixed up; put each back in its place",
                path=str(self._path),
            )

    def _check_format(self) -> None:
        store = self._environment.open_db(b"store")
        with self._environment.begin(db=store, write=True) as transaction:
            found = (transaction.get(_FORMAT_KEY) or b"").decode(errors="replace")
            if not found:
                transaction.put(_FORMAT_KEY, str(FORMAT).encode())
            elif found != str(FORMAT):
                raise UnknownFormat(
                    f"metadata in {self._path} has format {found}, this version knows {FORMAT};"
                    " start the version that wrote it, or choose another --data-dir",
                    path=str(self._path),
                    format=found,
                )

    def _is_empty(self) -> bool:
        with self._environment.begin(db=self._records) as transaction:
            return not transaction.stat(self._records)["entries"]

    async def get(self, key: str) -> StoredRecord | None:
        """See `MetadataStore.get`."""
        (found,) = await self.get_each([key])
        return found

    async def get_each(self, keys: Sequence[str]) -> Sequence[StoredRecord | None]:
        """See `MetadataStore.get_each`."""
        with self._translated(), self._environment.begin(db=self._records) as transaction:
            found = [transaction.get(key.encode()) for key in keys]
        return [None if data is None else _unpack(data) for data in found]

    async def list(self, prefix: str) -> dict[str, StoredRecord]:
        """See `MetadataStore.list`."""
        start = prefix.encode()
        found: dict[str, StoredRecord] = {}
        with self._translated(), self._environment.begin(db=self._records) as transaction:
            cursor = transaction.cursor()
            there = cursor.set_range(start) if start else cursor.first()
            while there and cursor.key().startswith(start):
                found[cursor.key().decode()] = _unpack(cursor.value())
                there = cursor.next()
        return found

    async def keys(self) -> set[str]:
        """See `MetadataStore.keys`."""
        with self._translated(), self._environment.begin(db=self._records) as transaction:
            return {key.decode() for key in transaction.cursor().iternext(values=False)}

    async def write(self, *writes: Write | Check) -> None:
        """See `MetadataStore.write`."""
        check_writes(writes)
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._committing, self._commit, writes))

    def _commit(self, writes: tuple[Write | Check, ...]) -> None:
        if (problem := self.problem) != self._problem:  # a commit would go to a file that has no name any more
            self._failing.goes_on("cannot write metadata", level="error", path=str(self._path), error=problem)
            raise Unavailable(f"metadata cannot be written: {problem}", path=str(self._path))
        try:
            self._carry_out(writes)
            self._set_aside = None  # final: there is something in its place
            self._failing.over("metadata can be written again", path=str(self._path))
            self._problem = ""
        except lmdb.Error as error:
            self._failing.goes_on("cannot write metadata", level="error", path=str(self._path), error=str(error))
            self._problem = f"metadata cannot be written in {self._path}: {error}{self._hint(error)}"
            if self._is_as_before(writes):
                full = isinstance(error, lmdb.MapFullError)
                kind: type[KeraError] = MetadataStoreFull if full else DiskFull  # the coordinator continues after these
                raise kind(
                    f"no room for metadata{'' if full else ', or a failing disk,'} in {self._path}: {error}"
                    f"{self._hint(error)}",
                    path=str(self._path),
                ) from error
            raise self._failed(error) from error

    @property
    def problem(self) -> str:
        """Why the last write failed, or the next one will; empty: no problem."""
        file = self._path / "data.mdb"
        if identity_of(file) == self._identity:
            return self._problem
        return (
            f"{file} was removed or replaced while the coordinator runs, so nothing is written: save what the"
            " coordinator has with kera cluster backup FILE, stop it, and put that back with kera cluster restore FILE"
            f" --data-dir {self._directory.path} --force"
        )

    def _carry_out(self, writes: tuple[Write | Check, ...]) -> None:
        with self._environment.begin(db=self._records, write=True) as transaction:
            for write in writes:
                key = write.key.encode()
                data = transaction.get(key)
                found_version = 0 if data is None else _unpack(data).version
                if found_version != write.expected_version:
                    raise conflict(write, found_version)
                if isinstance(write, Check):
                    continue
                if write.value is None:
                    transaction.delete(key)
                else:
                    transaction.put(key, _VERSION.pack(found_version + 1) + write.value)

    def _is_as_before(self, writes: tuple[Write | Check, ...]) -> bool:
        """Whether a failed commit has changed nothing.

        LMDB treats a disk that takes only a part of the pages like any other error. Then the page that makes the commit
        valid was not written. If writing that page itself fails, nothing can be read until the store is opened anew.
        """
        try:
            with self._environment.begin(db=self._records) as transaction:
                found = [transaction.get(write.key.encode()) for write in writes]
        except lmdb.Error:
            return False
        versions = [0 if data is None else _unpack(data).version for data in found]
        return versions == [write.expected_version for write in writes]

    async def close(self) -> None:
        """See `MetadataStore.close`. Waits for commits that have begun."""
        await asyncio.to_thread(self._committing.shutdown)
        self._environment.close()
        self._let_go()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except lmdb.Error as error:
            raise self._failed(error) from error

    def _failed(self, error: lmdb.Error) -> MetadataStoreFailed:
        return MetadataStoreFailed(f"metadata store {self._path}: {error}", path=str(self._path))

    def _hint(self, error: Exception) -> str:
        if isinstance(error, lmdb.MapFullError):
            return f"; raise metadata_bytes_max (now {self._bytes_max}) and restart the coordinator"
        if os.strerror(errno.ENOSPC) in str(error):
            return "; make room there"
        if os.strerror(errno.EROFS) in str(error):
            return "; stop the coordinator, repair the file system, mount it writable, and start the coordinator again"
        return ""


def _unpack(data: bytes) -> StoredRecord:
    (version,) = _VERSION.unpack_from(data)
    return StoredRecord(data[_VERSION.size :], version)
