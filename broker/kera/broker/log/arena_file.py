"""A file of shared memory that has the bytes of arena slots: one for each memory domain of a broker.

    0            4096                     slots_at
    ┌────────────┬────────────────────────┬──────────┬──────────┬─────
    │ JSON head  │ 64-byte row × slots    │ slot 0   │ slot 1   │ …
    └────────────┴────────────────────────┴──────────┴──────────┴─────

* A reader that maps a file sees all of it, so a file holds only data of its domain. All files of a broker have the same
  slots at the same places, and each slot has memory in one of them. In the other files the slot is a hole: its row
  there says so, and its bytes read as zeros.
* The first file is reserved and faulted in when it is created, because a fresh page costs ten times a reused one. So a
  full file system shows at the start, and not as SIGBUS later. The other files begin as holes, and slots get memory
  there before they are written to.
* A file that is *renewed* gets no further slots: new data of its domain goes to another file, which the readers of this
  one have not mapped. A file that was given to a reader that may lose its right has a mark that says so, because the
  next launch does not know the readers.
* A file survives a killed broker, and the next launch with the same data directory takes it over; its lock on the data
  directory proves that the owner is gone. The next start of any broker of the same user removes the files of an
  ephemeral broker, which never comes back; a lock on the file itself shows whether its owner lives.
* Any user can write to the directory. A file counts only if this user made it and no other user can open it. Anything
  else that has the name of an arena is left alone, with one warning. Names cannot be guessed.

A reader that maps a file can make the kernel put empty pages into its holes, by reading them. That takes up to the size
of the arena for each file, until slots get memory there, or another file is short of memory, or the file is removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Self

from kera.broker.log.arena_head import (
    DOMAIN_FORMAT,
    FORMAT,
    HEAD_BYTES,
    ROW_BYTES,
    ArenaHead,
    Geometry,
    Owner,
    new_head,
)
from kera.core.base.blocks import FILE_CALLS, FileCalls
from kera.core.base.own_directory import lock_id
from kera.core.base.own_file import open_own
from kera.core.base.telemetry import get_logger
from kera.core.errors import PathNotWritable, SharedMemoryTooSmall, StartError
from kera.server.populating import populate

log = get_logger("kera.arena")

_GIVEN, _YES = b'"given": ', ord("1")
"""The mark in the head, and the byte behind it if the file was given to a reader that may lose its right."""
HOLE = 15
"""Index of the u32 in a row that is not 0 when the slot has no memory in this file."""
IGNORED_LOGGED_MAX = 10
"""Maximum number of files that one warning names."""


class ArenaFile:
    """One file of shared memory: it holds the slots of one memory domain, and survives a broker that is killed."""

    def __init__(self, path: Path, fd: int, geometry: Geometry, domain: str, number: int, calls: FileCalls) -> None:
        """Map the file behind `fd`, which this object owns from now on. Raises `OSError`."""
        self.path = path
        self.domain = domain
        self.number = number
        """Number of the file within its domain; the file with the highest number is in use."""
        self.geometry = geometry
        self._fd = fd
        self._calls = calls
        self._memory = mmap.mmap(fd, geometry.file_bytes)
        self._view = memoryview(self._memory)
        self._given_at = self._find_given()

    @classmethod
    def create(
        cls,
        shm_dir: Path,
        geometry: Geometry,
        owner: Owner,
        *,
        domain: str,
        number: int = 0,
        reserved: bool = False,
        calls: FileCalls,
    ) -> Self:
        """Create a file in `shm_dir` and lock it.

        `reserved`: allocate the memory of all slots at once, which takes half a second for each GiB; otherwise they are
        holes. Raises `SharedMemoryTooSmall` or `PathNotWritable`.
        """
        size = geometry.file_bytes
        try:
            status = os.statvfs(shm_dir)
            available = status.f_bavail * status.f_frsize
            path, fd = _create_locked(shm_dir, calls)
        except OSError as error:
            raise _unusable(shm_dir, error) from error
        try:
            if reserved and available < size:
                raise _too_small(shm_dir, size, available)
            os.ftruncate(fd, size)
            calls.reserve(fd, 0, size if reserved else geometry.slots_at)
            file = cls(path, fd, geometry, domain, number, calls)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise _too_small(shm_dir, size, available) from error
            raise PathNotWritable(f"cannot make arena {path}: {error.strerror}", path=str(path)) from error
        except SharedMemoryTooSmall:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        if reserved:
            populate(file._memory)
        if not reserved:
            for index in range(geometry.slots):
                file.row(index).cast("I")[HOLE] = 1
        text = new_head(owner, geometry, domain, number, reserved=reserved)
        file._memory[: len(text)] = text  # last: a file without a head was never used
        file._given_at = file._find_given()
        return file

    @classmethod
    def left_by(cls, shm_dir: Path, data_dir: Path, calls: FileCalls = FILE_CALLS) -> list[Self]:
        """Take over the files that a killed launch has left; the caller has locked its data directory.

        Raises `PathNotWritable`, and `StartError` for a file of this broker that other users may have changed, or that
        a newer version has made: it may hold acknowledged data.
        """
        found: list[Self] = []
        lock = lock_id(data_dir)
        try:
            for path in _arenas_in(shm_dir):
                file = cls._take(path, data_dir, lock, calls)
                if file is not None:
                    found.append(file)
        except StartError:
            for file in found:
                file.close(keep=True)
            raise
        return found

    @classmethod
    def _take(cls, path: Path, data_dir: Path, lock: str, calls: FileCalls) -> Self | None:
        """Take over one file; None if it was not left to this broker. `lock`: id of the lock on `data_dir`."""
        try:
            fd = open_own(path, os.O_RDWR)
        except PermissionError as error:
            _refuse_opened_to_others(path, data_dir, error)
            return None
        except OSError:
            return None
        file = None
        try:
            head = ArenaHead.read(fd)
            if head is not None and _is_of(head, data_dir) and _owner_is_gone(fd, head, lock):
                _refuse_newer(path, head)
                geometry = head.geometry
                if head.format < FORMAT:
                    log.warning("ignored memory of a format that is not known any more", path=str(path))
                elif geometry is not None and os.fstat(fd).st_size == geometry.file_bytes:
                    file = cls(path, fd, geometry, head.domain, head.number, calls)
                else:
                    log.error(
                        "the memory of the last launch is damaged: data that were only there are lost", path=str(path)
                    )
        except OSError as error:
            log.error("cannot read memory that was left", path=str(path), error=str(error))
        finally:
            if file is None:
                os.close(fd)
        return file

    @property
    def is_given(self) -> bool:
        """Whether a reader that may lose its right may have mapped the file; also True if the head has no mark."""
        return self._given_at is None or self._view[self._given_at] == _YES

    def note_given(self) -> None:
        """Mark the file as given to a reader that may lose its right."""
        if self._given_at is not None:
            self._view[self._given_at] = _YES

    def _find_given(self) -> int | None:
        """Return where the mark is in the head; None: the head has no mark."""
        at = self._memory.find(_GIVEN, 0, HEAD_BYTES)
        return None if at < 0 else at + len(_GIVEN)

    def has_memory(self, index: int) -> bool:
        """Whether a slot has its memory in this file."""
        return not self.row(index).cast("I")[HOLE]

    def row(self, index: int) -> memoryview:
        """Return the row of a slot."""
        at = HEAD_BYTES + index * ROW_BYTES
        return self._view[at : at + ROW_BYTES]

    def slot_view(self, index: int) -> memoryview:
        """Return the bytes of a slot."""
        at = self.geometry.slot_at(index)
        return self._view[at : at + self.geometry.slot_bytes]

    def give_memory(self, index: int) -> None:
        """Allocate memory for a slot, all zeros. Raises `OSError` if there is none."""
        self._calls.reserve(self._fd, self.geometry.slot_at(index), self.geometry.slot_bytes)

    def take_memory(self, index: int) -> None:
        """Turn a slot into a hole, also for processes that have mapped the file."""
        self._memory.madvise(mmap.MADV_REMOVE, self.geometry.slot_at(index), self.geometry.slot_bytes)

    def clear_holes(self) -> None:
        """Free the pages of all slots that have no memory in this file."""
        for index in range(self.geometry.slots):
            if not self.has_memory(index):
                self.take_memory(index)

    def open_for_readers(self) -> int:
        """Return a new read-only descriptor. Raises `OSError`."""
        # Not by its path: if the directory is not sticky, the path may name another file by now.
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self, *, keep: bool = False) -> None:
        """Close the file, and remove it unless `keep`: the next launch then finds it.

        The memory itself is freed when no process maps the file any more.
        """
        if not keep:
            self.path.unlink(missing_ok=True)
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # the mapping has a duplicate of the descriptor, which would keep the lock
        os.close(self._fd)


def _create_locked(shm_dir: Path, calls: FileCalls) -> tuple[Path, int]:
    """Create a file; return its path and its descriptor, which holds the lock."""
    while True:
        path = shm_dir / f"kera-{os.getuid()}-{secrets.token_hex(16)}.arena"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            calls.lock(fd, fcntl.LOCK_EX)  # a broker that looks for orphans may hold it briefly
            if os.fstat(fd).st_nlink:
                return path, fd
        except OSError:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        os.close(fd)  # another broker has removed it as an orphan, before it was locked


def _unusable(shm_dir: Path, error: OSError) -> PathNotWritable:
    return PathNotWritable(
        f"cannot make an arena in shm_dir {shm_dir}: {error.strerror}; choose another --shm-dir", path=str(shm_dir)
    )


def _too_small(shm_dir: Path, needed: int, available: int) -> SharedMemoryTooSmall:
    return SharedMemoryTooSmall(
        f"{shm_dir} has {available >> 20} MiB free, the arena needs {-(-needed >> 20)} MiB;"
        " give the broker a smaller --arena-bytes, or the file system more room (mount -o remount,size=...)",
        path=str(shm_dir),
        needed_bytes=needed,
        available_bytes=available,
    )


# --- files that were left ---------------------------------------------------------------------------------------------


def remove_orphans(shm_dir: Path, data_dir: Path, *, keep: Collection[Path] = ()) -> list[Path]:
    """Remove the arenas of dead brokers, except `keep`; return the removed paths.

    These are arenas of an earlier launch with `data_dir`, which this launch has locked, and arenas of ephemeral brokers
    of the same user. A reader that still maps an ephemeral broker's arena can delay its removal by locking its
    descriptor; that costs no more memory than the mapping itself. Raises `PathNotWritable`.
    """
    removed, ignored = [], []
    lock = lock_id(data_dir)
    for path in _arenas_in(shm_dir):
        if path in keep:
            continue
        try:
            fd = open_own(path)
        except FileNotFoundError:
            continue
        except OSError as error:  # any user can create files in the directory
            ignored.append(f"{path.name}: {error.strerror}")
            continue
        try:
            head = ArenaHead.read(fd)
            if head is not None and not head.ephemeral and not _is_of(head, data_dir):
                continue  # its broker may come back for it
            if _owner_is_gone(fd, head, lock):
                path.unlink(missing_ok=True)
                removed.append(path)
                log.info("removed the arena of a dead broker", path=str(path))
        except OSError as error:
            log.warning("cannot remove the arena of a dead broker", path=str(path), error=str(error))
        finally:
            os.close(fd)
    if ignored:
        log.warning(
            "ignored a path with the name of an arena that is not this user's own file",
            shm_dir=str(shm_dir),
            count=len(ignored),
            files=ignored[:IGNORED_LOGGED_MAX],
        )
    return removed


def _arenas_in(shm_dir: Path) -> list[Path]:
    """Return the files that are named like arenas of this user; none if the directory does not exist."""
    try:
        return sorted(shm_dir.glob(f"kera-{os.getuid()}-*.arena"))
    except OSError as error:  # the name is too long; for other errors pathlib finds nothing
        raise _unusable(shm_dir, error) from error


def _is_of(head: ArenaHead | None, data_dir: Path) -> bool:
    return head is not None and not head.ephemeral and head.data_dir == str(data_dir)


def _owner_is_gone(fd: int, head: ArenaHead | None, lock: str) -> bool:
    """Whether the broker that wrote a file is gone; takes the file's lock if it is free.

    `lock`: id of the lock on this broker's data directory. A file that names the same lock has a dead owner, because
    this broker holds that lock now. A lock on the file itself proves less: any reader can take one by its descriptor,
    and keep it.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return head is not None and bool(lock) and head.lock == lock
    return True


def _refuse_opened_to_others(path: Path, data_dir: Path, error: PermissionError) -> None:
    """Raise `StartError` if `path` is memory of this broker that other users can access; ignore anything else."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if is_ours and _is_of(ArenaHead.read(fd), data_dir):
                raise StartError(
                    f"cannot trust {path}, the memory of this broker: {error.strerror}. Run chmod 600 on it if no"
                    " other user has changed it; if you remove it, readers get DataLost for data that were only"
                    " there",
                    path=str(path),
                )
        finally:
            os.close(fd)


def _refuse_newer(path: Path, head: ArenaHead) -> None:
    if head.format > DOMAIN_FORMAT:
        raise StartError(
            f"{path} has memory of format {head.format}, this version knows {DOMAIN_FORMAT}; use a newer version, or"
            " remove the file: readers then get DataLost for data that were only there",
            path=str(path),
        )
