"""A file of shared memory that slots of the arena have their bytes in: one for each memory domain of a broker.

    0            4096                     slots_at
    ┌────────────┬────────────────────────┬──────────┬──────────┬─────
    │ JSON head  │ 64-byte row × slots    │ slot 0   │ slot 1   │ …
    └────────────┴────────────────────────┴──────────┴──────────┴─────

* Who maps a file sees all that is in it, so nothing is in it but what is of its domain. All files of a broker have the
  same slots at the same places, and each slot has memory in one of them: in the others there is a hole, which its row
  says, and which reads as zeros.
* The first file is reserved and faulted in when it is made (a fresh page costs ten times a reused one), so a full file
  system shows at the start and not as SIGBUS later. The others begin as holes, and slots get memory there before they
  are written to.
* A file that is *renewed* gets no further slots: what is new of its domain lies in another one, which those who had
  mapped this one have not. One that was given to anybody who may lose the right to it says so, for the next launch,
  which does not know to whom.
* A file outlives a broker that is killed, and the next launch with the same data directory takes it over. That it has
  the lock on the data directory shows that the owner is gone. Files of an ephemeral broker, which never comes back, are
  removed by the next start of any broker of the same user; a lock on the file itself shows whether its owner lives.
* The directory is everybody's. A file counts only if this user made it and no other user can open it; anything else
  that has the name of an arena is left alone, with one warning. Names cannot be guessed.

A reader that maps a file can have the kernel put empty pages into its holes, by reading there. That takes up to the
size of the arena for each file, until slots get memory there, or want some elsewhere and there is none, or the file is
removed.
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
"""In the head, and what is behind it of a file that is."""
HOLE = 15
"""Place in a row, counted in u32, that is not 0 when the slot has no memory in this file."""
IGNORED_LOGGED_MAX = 10
"""Files that one warning names."""


class ArenaFile:
    """One file of shared memory: it holds the slots of one memory domain, and survives a broker that is killed."""

    def __init__(self, path: Path, fd: int, geometry: Geometry, domain: str, number: int, calls: FileCalls) -> None:
        """Map the file behind `fd`, which is its own from now on. Raises `OSError`."""
        self.path = path
        self.domain = domain
        self.number = number
        """Number of the file within its domain, from the first one on: the last one is in use."""
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
        """Make a file in `shm_dir` and lock it.

        `reserved`: take the memory of all slots at once, half a second for each GiB; else they are holes. Raises
        `SharedMemoryTooSmall` or `PathNotWritable`.
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
        """Take over the files that a killed launch with this data directory, which is ours now, has left.

        Raises `PathNotWritable`, and `StartError` for a file of ours that others may have changed, or that a newer
        version has made: what was acknowledged is in there.
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
        """One of them; None if the file is not memory that was left to us. `lock`: of our data directory."""
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
        """Whether anybody may have it mapped who could lose the right to it; so it is of one that does not say."""
        return self._given_at is None or self._view[self._given_at] == _YES

    def note_given(self) -> None:
        """Write down that somebody gets it who may lose the right to it."""
        if self._given_at is not None:
            self._view[self._given_at] = _YES

    def _find_given(self) -> int | None:
        """Where the head says whether it is given; None: it does not."""
        at = self._memory.find(_GIVEN, 0, HEAD_BYTES)
        return None if at < 0 else at + len(_GIVEN)

    def has_memory(self, index: int) -> bool:
        """Whether a slot has its memory here."""
        return not self.row(index).cast("I")[HOLE]

    def row(self, index: int) -> memoryview:
        """The row of a slot."""
        at = HEAD_BYTES + index * ROW_BYTES
        return self._view[at : at + ROW_BYTES]

    def slot_view(self, index: int) -> memoryview:
        """The bytes of a slot."""
        at = self.geometry.slot_at(index)
        return self._view[at : at + self.geometry.slot_bytes]

    def give_memory(self, index: int) -> None:
        """Have memory for a slot, all zeros. Raises `OSError` if there is none."""
        self._calls.reserve(self._fd, self.geometry.slot_at(index), self.geometry.slot_bytes)

    def take_memory(self, index: int) -> None:
        """Make a hole of a slot, for those who have mapped it as well."""
        self._memory.madvise(mmap.MADV_REMOVE, self.geometry.slot_at(index), self.geometry.slot_bytes)

    def clear_holes(self) -> None:
        """Have no memory where slots have none here."""
        for index in range(self.geometry.slots):
            if not self.has_memory(index):
                self.take_memory(index)

    def open_for_readers(self) -> int:
        """A descriptor by which nobody can write. Raises `OSError`."""
        # Not by its name, which may be another file's by now where the directory is not sticky.
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self, *, keep: bool = False) -> None:
        """Remove the file, unless the next launch is to find it.

        The memory itself goes when the last one who maps it lets it go.
        """
        if not keep:
            self.path.unlink(missing_ok=True)
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # the mapping has a duplicate of the descriptor, which would keep it
        os.close(self._fd)


def _create_locked(shm_dir: Path, calls: FileCalls) -> tuple[Path, int]:
    """A new file and its descriptor, which holds the lock."""
    while True:
        path = shm_dir / f"kera-{os.getuid()}-{secrets.token_hex(16)}.arena"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            calls.lock(fd, fcntl.LOCK_EX)  # a broker that looks for orphans may have it, but not for long
            if os.fstat(fd).st_nlink:
                return path, fd
        except OSError:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        os.close(fd)  # taken for an orphan between its creation and its lock


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
    """Remove the arenas of dead brokers that are ours to remove, except `keep`; returns their paths.

    Ours are those of an earlier launch with the same `data_dir`, which is ours now, and those of ephemeral brokers of
    the same user. A reader that still has one mapped can put off the latter by locking its descriptor, which costs no
    more memory than the mapping does. Raises `PathNotWritable`.
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
        except OSError as error:  # the directory is everybody's
            ignored.append(f"{path.name}: {error.strerror}")
            continue
        try:
            head = ArenaHead.read(fd)
            if head is not None and not head.ephemeral and not _is_of(head, data_dir):
                continue  # a broker that may come back for it
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
    """Files with names like arenas of this user; none in a directory that does not exist."""
    try:
        return sorted(shm_dir.glob(f"kera-{os.getuid()}-*.arena"))
    except OSError as error:  # a name that is too long; pathlib takes what is not a directory, or not ours, for empty
        raise _unusable(shm_dir, error) from error


def _is_of(head: ArenaHead | None, data_dir: Path) -> bool:
    return head is not None and not head.ephemeral and head.data_dir == str(data_dir)


def _owner_is_gone(fd: int, head: ArenaHead | None, lock: str) -> bool:
    """Whether nobody writes to a file any more; takes its lock, if that can be had. `lock`: of our own data directory.

    A broker that has noted our own lock is gone: we hold that lock now. A lock on the file itself says less, as any
    reader can take one by the descriptor that it was given, and keep it for as long as it likes.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return head is not None and bool(lock) and head.lock == lock
    return True


def _refuse_opened_to_others(path: Path, data_dir: Path, error: PermissionError) -> None:
    """Raise `StartError` for memory of ours that other users have got access to. Anything else is not ours."""
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
