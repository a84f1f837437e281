"""Files as the target of a copy: each file is complete, or does not exist.

A directory gets file after file, ``part-00000.parquet`` and so on, and a list (`STATE`) with the number of files that
count, and the progress of the copy. A file is finished in three steps. If the process ends at any point, the next one
continues from the list:

    1. write the rows into a file with a temporary name, and sync it
    2. write the list with this file and the progress: under a temporary name, synced, then renamed   ◄── done
    3. rename the file to its final name

A single file is written under a temporary name, and renamed when it is complete; a copy that ends before that starts
from the beginning. Only one process can copy at a time: others find the directory, or the file, locked.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from kera.connect.endpoints import FilesEnd
from kera.connect.errors import CopyElsewhere, CopyMismatch, Refused
from kera.connect.files.writing import Writer, writer_of
from kera.connect.pieces import Piece, Place, Progress, Source
from kera.connect.worker import Worker
from kera.core.data_dir import checksum_of
from kera.core.errors import DiskFull, InternalError, SchemaMismatch
from kera.core.format.schema import DEFAULT_SCHEMA

STATE = ".kera-connect.json"
LOCK = ".kera-connect.lock"
VERSION = 1
FILE_BYTES = 256 << 20
FILE_S = 60.0
"""Age at which a file is finished."""
ENDINGS = {"parquet": ".parquet", "csv": ".csv", "jsonl": ".jsonl"}


class FilesSink:
    """See `kera.connect.pieces.Sink`."""

    piece_bytes = 1 << 20

    def __init__(self, end: FilesEnd, *, file_bytes: int = FILE_BYTES) -> None:
        """`file_bytes`: the size at which a file of a directory is finished, and the next one begins."""
        self.shown = end.shown
        self.notes: list[str] = []
        self._end = end
        self._file_bytes = file_bytes
        self._whole = not end.path.endswith("/")
        path = Path(end.path)
        self._directory = path.parent if self._whole else path
        self._target = path
        self._worker = Worker("files")
        self._lock: IO[Any] | None = None
        self._file: IO[bytes] | None = None
        self._writer: Writer | None = None
        self._begun_s = 0.0
        self._schema = DEFAULT_SCHEMA
        self._identity = ""
        self._finished = 0
        """Number of files in the list."""
        self._places: dict[str, Place] = {}
        self._counted: Mapping[str, Place] = {}
        """`_places` when the list was last written."""
        self._records = 0
        self._rows = 0
        """Number of rows in the file that is being written."""
        self._aging: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    async def open(self, source: Source) -> Progress:
        """See `Sink`. Raises `CopyElsewhere`, `CopyMismatch`, `Refused`."""
        self._schema, self._identity = source.schema, source.identity
        progress = await self._worker.call(self._open)
        if not self._whole:
            self._aging = asyncio.create_task(self._finish_old())
        return progress

    def _open(self) -> Progress:
        with self._translated():
            if self._whole:
                self._open_one()
            else:
                self._open_directory()
            if self._whole:
                self._begin()  # reports columns that the format cannot hold before any row is read
        return Progress(dict(self._places), self._records)

    def _open_one(self) -> None:
        if not self._directory.is_dir():
            raise Refused(f"there is no directory {self._directory}")
        if self._target.exists():
            raise Refused(f"{self._target} exists: remove it, or write another one")
        self._take_lock(self._temporary.with_suffix(".lock"))
        if self._target.exists():  # another process has finished it before the lock was free
            raise Refused(f"{self._target} exists: remove it, or write another one")

    def _open_directory(self) -> None:
        self._directory.mkdir(exist_ok=True)
        self._take_lock(self._directory / LOCK)
        state = self._read_state()
        if state is None:
            others = [each.name for each in self._directory.iterdir() if each.name not in (LOCK, STATE)]
            others = [name for name in others if not name.endswith(".tmp")]
            if others:
                raise Refused(
                    f"{self._directory} has files that no copy has put there, such as {min(others)}: give another one"
                )
        else:
            self._adopt(state)
        for left in self._directory.glob(".*.tmp"):
            left.unlink()

    def _read_state(self) -> dict[str, Any] | None:
        path = self._directory / STATE
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if "crc32c" in found and found["crc32c"] != checksum_of(found):  # lists of earlier versions have none
                raise ValueError("it does not match its checksum")
            if found["version"] != VERSION:
                raise CopyMismatch(f"{path} belongs to another program (version {found['version']})")
            state = {name: found[name] for name in ("source", "format", "files", "places", "records")}
            if list(map(type, state.values())) != [str, str, int, dict, int]:
                raise TypeError("a field of another type")
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CopyMismatch(f"{path} is damaged, which says how far the copy is: copy into another one") from error
        return state

    def _adopt(self, state: dict[str, Any]) -> None:
        if (state["source"], state["format"]) != (self._identity, self._end.format):
            raise CopyMismatch(
                f"{self._directory} has {state['format']} files from {state['source']}, and this copy writes"
                f" {self._end.format} from {self._identity}: give it another directory"
            )
        self._finished, self._places, self._records = state["files"], state["places"], state["records"]
        if self._finished:
            last = self._named(self._finished - 1)
            temporary = self._directory / f".{last.name}.tmp"
            if temporary.exists():  # the list has the file, but step 3 is missing
                temporary.rename(last)
                self._sync_directory()

    def _take_lock(self, path: Path) -> None:
        while self._lock is None:
            with contextlib.ExitStack() as unless_taken:
                lock = unless_taken.enter_context(path.open("w"))
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise CopyElsewhere(f"another process copies into {self._target}") from error
                with contextlib.suppress(FileNotFoundError):  # its process may just have removed the file
                    if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                        unless_taken.pop_all()
                        self._lock = lock

    @property
    def _temporary(self) -> Path:
        final = self._target if self._whole else self._named(self._finished)
        return final.with_name(f".{final.name}.tmp")

    def _named(self, number: int) -> Path:
        return self._directory / f"part-{number:05}{ENDINGS[self._end.format]}"

    def _begin(self) -> None:
        self._file = self._temporary.open("wb")
        typed = not self._schema.equals(DEFAULT_SCHEMA)
        self._writer = writer_of(self._end.format, self._file, self._schema, typed=typed)
        self._begun_s = time.monotonic()

    async def settle(self, rows: Sequence[pa.RecordBatch | None]) -> Progress:
        """Raise `InternalError`: this target has no unsure writes."""
        raise InternalError("this target leaves no write in doubt", spans=len(rows))

    async def put(self, pieces: Sequence[Piece]) -> Mapping[str, Place]:
        """See `Sink`. The rows go into a file that is not in the list yet."""
        await self._worker.call(self._put, pieces)
        return self._counted

    def _put(self, pieces: Sequence[Piece]) -> None:
        self._check()
        with self._translated():
            for piece in pieces:
                if piece.rows.num_rows and self._writer is None:
                    self._begin()
                if piece.rows.num_rows and self._writer is not None:
                    self._writer.write(piece.rows)
                self._rows += piece.rows.num_rows
                self._places[piece.part] = piece.end
                if not self._whole and self._file is not None and self._file.tell() >= self._file_bytes:
                    self._commit()
            if not self._whole and self._writer is None and not self._finished:
                self._write_list()  # stores the begin of the copy while there are no rows

    def _close_file(self) -> None:
        """Complete the file, and make it durable."""
        if self._writer is not None and self._file is not None:
            self._writer.end()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        self._writer = self._file = None

    def _commit(self) -> None:
        """Finish the file: steps 1 to 3."""
        if self._writer is None:
            return
        temporary = self._temporary
        self._close_file()
        final = self._named(self._finished)
        self._finished, self._records, self._rows = self._finished + 1, self._records + self._rows, 0
        self._write_list()
        temporary.rename(final)
        self._sync_directory()

    def _write_list(self) -> None:
        """Write the list: step 2."""
        state = {
            "version": VERSION,
            "source": self._identity,
            "format": self._end.format,
            "files": self._finished,
            "records": self._records,
            "places": self._places,
        }
        beside = self._directory / f"{STATE}.tmp"
        with beside.open("w", encoding="utf-8") as file:
            json.dump(state | {"crc32c": checksum_of(state)}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(self._directory / STATE)
        self._sync_directory()
        self._counted = dict(self._places)

    def _sync_directory(self) -> None:
        descriptor = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    async def _finish_old(self) -> None:
        """Finish old files regularly, so that rows become visible even if only few arrive."""
        while self._failure is None:
            await asyncio.sleep(1)
            await self._worker.call(self._commit_old)

    def _commit_old(self) -> None:
        if self._writer is None or not self._rows or time.monotonic() - self._begun_s <= FILE_S:
            return
        try:
            with self._translated():
                self._commit()
        except Exception as error:  # noqa: BLE001 - the next write, or the end of the copy, raises it
            self._failure = error

    def _check(self) -> None:
        """Raise the error with which an old file could not be finished."""
        if self._failure is not None:
            raise self._failure

    async def finish(self, *, complete: bool) -> Mapping[str, Place]:
        """See `Sink`. A single file appears only when it is complete."""
        if complete or not self._whole:
            await self._worker.call(self._finish)
        return self._counted

    def _finish(self) -> None:
        self._check()
        with self._translated():
            if not self._whole:
                self._commit()
                return
            temporary = self._temporary
            self._close_file()
            temporary.rename(self._target)
            self._sync_directory()

    async def close(self) -> None:
        """See `Sink`."""
        if self._aging is not None:
            self._aging.cancel()
            await asyncio.gather(self._aging, return_exceptions=True)
        await self._worker.call(self._close)
        self._worker.close()

    def _close(self) -> None:
        """Remove an unfinished file, because it may be what fills the disk, and release the lock."""
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError, pa.ArrowException):
                if self._writer is not None:
                    self._writer.end()  # otherwise the writer tries it when it is garbage-collected
            with contextlib.suppress(OSError, ValueError):
                self._file.close()
            with contextlib.suppress(OSError):
                self._temporary.unlink()
        if self._lock is not None:
            if self._whole:
                with contextlib.suppress(OSError):
                    Path(self._lock.name).unlink()
            self._lock.close()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except SchemaMismatch as error:
            raise SchemaMismatch(f"{self.shown}: {error.message}", **error.attributes) from error
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise SchemaMismatch(f"{self.shown}: {error}") from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(f"{self.shown}: no room on the disk; make some and start the copy again") from error
            raise Refused(f"{self.shown} cannot be written: {error.strerror or error}") from error
