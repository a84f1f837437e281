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
* The owner holds a lock on each. So files whose owner has died are recognised: they are taken over by the next launch
  of the same broker; those of an ephemeral broker, which never comes back, are removed by the next start of any broker
  of the same user.

Who maps a file can have the kernel put empty pages into its holes, by looking there: so much more memory is used, up to
the size of the arena for each file, until slots get memory there, or want some elsewhere and there is none, or the file
goes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from kera.core.blocks import FILE_CALLS, FileCalls
from kera.core.errors import PathNotWritable, SharedMemoryTooSmall, invariant
from kera.core.populating import populate
from kera.core.push import DEFAULT_DOMAIN
from kera.core.telemetry import get_logger

log = get_logger("kera.arena")

FORMAT = 2
DOMAIN_FORMAT = 3
"""Of files of other domains: who knows only one does not take them for its arena."""
_GIVEN, _YES = b'"given": ', ord("1")
"""In the head, and what is behind it of a file that is."""
HEAD_BYTES = 4096
PAGE_BYTES = 4096
ROW_BYTES = 64
HOLE = 15
"""Place in a row, counted in u32, that is not 0 when the slot has no memory in this file."""


class Geometry(NamedTuple):
    """How the files of an arena are cut; all of them are alike."""

    slot_bytes: int
    slots: int

    @property
    def slots_at(self) -> int:
        """Offset of the first slot."""
        return -(-(HEAD_BYTES + ROW_BYTES * self.slots) // PAGE_BYTES) * PAGE_BYTES

    @property
    def file_bytes(self) -> int:
        """Size of a file."""
        return self.slots_at + self.slots * self.slot_bytes

    def slot_at(self, index: int) -> int:
        """Offset of a slot."""
        return self.slots_at + index * self.slot_bytes


class Owner(NamedTuple):
    """Whose files they are."""

    data_dir: Path
    ephemeral: bool


class ArenaFile:
    """See the head of this module."""

    def __init__(self, path: Path, fd: int, geometry: Geometry, domain: str, number: int, calls: FileCalls) -> None:
        """Map the file behind `fd`, which is its own from now on. Raises `OSError`."""
        self.path = path
        self.domain = domain
        self.number = number
        """Of the files of its domain that there have been: the last one is in use."""
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
        head = {
            "given": 0,
            "format": FORMAT,
            "data_dir": str(owner.data_dir),
            "ephemeral": owner.ephemeral,
            "slot_bytes": geometry.slot_bytes,
            "slots": geometry.slots,
            "slots_at": geometry.slots_at,
        }
        if not reserved:
            head |= {"format": DOMAIN_FORMAT, "domain": domain, "number": number}
            for index in range(geometry.slots):
                file.row(index).cast("I")[HOLE] = 1
        text = json.dumps(head).encode()
        invariant(len(text) < HEAD_BYTES, "the arena's head is larger than its page", data_dir=str(owner.data_dir))
        file._memory[: len(text)] = text  # last: a file without a head was never used
        file._given_at = file._find_given()
        return file

    @classmethod
    def left_by(cls, shm_dir: Path, data_dir: Path, calls: FileCalls = FILE_CALLS) -> list[Self]:
        """Take over the files that a killed launch with this data directory has left. Raises `PathNotWritable`."""
        found = []
        for path in _arenas_in(shm_dir):
            try:
                fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                head = _read_head(fd) or {}
                if (
                    head.get("data_dir") == str(data_dir)
                    and not head.get("ephemeral")
                    and head.get("format") in (FORMAT, DOMAIN_FORMAT)
                ):
                    geometry = Geometry(head["slot_bytes"], head["slots"])
                    if geometry.slots_at == head["slots_at"] and os.fstat(fd).st_size == geometry.file_bytes:
                        domain = head.get("domain", DEFAULT_DOMAIN)
                        found.append(cls(path, fd, geometry, domain, head.get("number", 0), calls))
                        continue
            except (OSError, KeyError):
                pass  # another broker's, or none that we know: `remove_orphans` deals with it
            os.close(fd)
        return found

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
        """What is written of a slot."""
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
        return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

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
        path = shm_dir / f"kera-{os.getuid()}-{secrets.token_hex(4)}.arena"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            calls.lock(fd, fcntl.LOCK_EX)  # who holds it is looking for orphans, which is soon done
            if os.fstat(fd).st_nlink:
                return path, fd
        except OSError:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        os.close(fd)  # taken for an orphan between its creation and its lock


def _arenas_in(shm_dir: Path) -> list[Path]:
    """What is called as arenas of this user are; nothing in a directory that is not there."""
    try:
        return sorted(shm_dir.glob(f"kera-{os.getuid()}-*.arena"))
    except OSError as error:  # a name that is too long; pathlib takes what is no directory, or not ours, for empty
        raise _unusable(shm_dir, error) from error


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


def remove_orphans(shm_dir: Path, data_dir: Path) -> list[Path]:
    """Remove the arenas of dead brokers that are ours to remove; returns their paths.

    Ours are those of an earlier launch with the same `data_dir`, and those of ephemeral brokers of the same user.
    Raises `PathNotWritable`.
    """
    removed = []
    for path in _arenas_in(shm_dir):
        with _locked(path) as fd:
            if fd is None:
                continue  # its owner is alive
            try:
                head = _read_head(fd)
                if head is not None and not head.get("ephemeral") and head.get("data_dir") != str(data_dir):
                    continue  # a broker that may come back for it
                path.unlink(missing_ok=True)
            except OSError as error:  # the directory is everybody's: what is called so need not be an arena, nor ours
                log.warning("cannot remove what looks like an arena", path=str(path), error=str(error))
                continue
            removed.append(path)
            log.info("removed the arena of a dead broker", path=str(path))
    return removed


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe by that name must not hold us up
    except OSError:
        yield None
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield None
        else:
            yield fd
    finally:
        os.close(fd)


def _read_head(fd: int) -> dict[str, Any] | None:
    """The head of an arena file; None when its maker died before it wrote one."""
    try:
        head = json.loads(os.pread(fd, HEAD_BYTES, 0).rstrip(b"\0"))
    except ValueError:
        return None
    return head if isinstance(head, dict) else None
