"""The arena: one file of shared memory per broker, cut into equal slots that segments live in.

    0            4096                     slots_at
    ┌────────────┬────────────────────────┬──────────┬──────────┬─────
    │ JSON head  │ generation u64 × slots │ slot 0   │ slot 1   │ …
    └────────────┴────────────────────────┴──────────┴──────────┴─────

* The file is reserved and faulted in when it is made (a fresh page costs ten times a reused one), so it never grows,
  and a full file system shows at the start and not as SIGBUS later.
* A slot that is let go is used again, the last one first: its pages are the warmest.
* Its generation grows each time it is let go. A reader that maps the file compares generations before and after it
  looks, and so never takes a new segment's bytes for the old one's.
* A slot with leases is used again only when the last one is released (invariant 5 of the design).
* The owner holds a lock on the file. So an arena whose owner has died is recognised, and removed by the next start of
  the same broker; one of an ephemeral broker, which never comes back, by the next start of any broker of the same user.

Invariant: a slot is either free, or in use by exactly one segment, or retired and leased.
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
from typing import Any

from kera.core.errors import ArenaFull, PathNotWritable, SharedMemoryTooSmall, invariant
from kera.core.telemetry import get_logger

log = get_logger("kera.arena")

FORMAT = 1
HEAD_BYTES = 4096
PAGE_BYTES = 4096
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; not in the mmap module


class Slot:
    """Memory for one segment."""

    __slots__ = ("_arena", "arena_offset", "generation", "index", "leases", "retired", "view")

    def __init__(self, arena: Arena, index: int, arena_offset: int, view: memoryview) -> None:
        self._arena = arena
        self.index = index
        self.arena_offset = arena_offset
        """Of the slot's first byte, in the arena file."""
        self.view = view
        self.generation = 1
        self.leases = 0
        """Readers that still look at the slot's bytes."""
        self.retired = False
        """No segment uses the slot any more; it is free as soon as there are no leases."""

    def lease(self) -> None:
        """Keep the slot's bytes as they are until `release`."""
        self.leases += 1

    def release(self) -> None:
        """End one lease."""
        invariant(self.leases > 0, "a lease was released twice", slot=self.index)
        self.leases -= 1
        if self.retired and not self.leases:
            self._arena.reuse(self)

    def retire(self) -> None:
        """The segment is gone: free the slot, now or when the last lease ends."""
        invariant(not self.retired, "a slot was retired twice", slot=self.index)
        self.retired = True
        if not self.leases:
            self._arena.reuse(self)


class Arena:
    """See the head of this module."""

    def __init__(self, path: Path, fd: int, memory: mmap.mmap, slot_bytes: int, slots: int, slots_at: int) -> None:
        self.path = path
        self.slot_bytes = slot_bytes
        self._fd = fd
        self._memory = memory
        self._view = memoryview(memory)
        self._generations = self._view[HEAD_BYTES : HEAD_BYTES + 8 * slots].cast("Q")
        self._slots = [
            Slot(self, index, at, self._view[at : at + slot_bytes])
            for index, at in enumerate(range(slots_at, slots_at + slots * slot_bytes, slot_bytes))
        ]
        for slot in self._slots:
            self._generations[slot.index] = slot.generation
        self._free = list(reversed(self._slots))

    @classmethod
    def create(cls, shm_dir: Path, *, arena_bytes: int, slot_bytes: int, data_dir: Path, ephemeral: bool) -> Arena:
        """Make an arena of `arena_bytes` // `slot_bytes` slots in `shm_dir` and lock it.

        Raises `SharedMemoryTooSmall` or `PathNotWritable`.
        """
        slots = arena_bytes // slot_bytes
        slots_at = -(-(HEAD_BYTES + 8 * slots) // PAGE_BYTES) * PAGE_BYTES
        size = slots_at + slots * slot_bytes
        try:
            status = os.statvfs(shm_dir)
            available = status.f_bavail * status.f_frsize
            path, fd = _create_locked(shm_dir)
        except OSError as error:
            raise PathNotWritable(f"cannot make an arena in {shm_dir}: {error.strerror}", path=str(shm_dir)) from error
        try:
            if available < size:
                raise _too_small(shm_dir, size, available)
            os.posix_fallocate(fd, 0, size)
            memory = mmap.mmap(fd, size)
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
        with contextlib.suppress(OSError, ValueError):  # an older kernel faults the pages in on their first use
            memory.madvise(_MADV_POPULATE_WRITE)
        head = {
            "format": FORMAT,
            "data_dir": str(data_dir),
            "ephemeral": ephemeral,
            "slot_bytes": slot_bytes,
            "slots": slots,
            "slots_at": slots_at,
        }
        text = json.dumps(head).encode()
        invariant(len(text) < HEAD_BYTES, "the arena's head is larger than its page", data_dir=str(data_dir))
        memory[: len(text)] = text
        return cls(path, fd, memory, slot_bytes, slots, slots_at)

    @property
    def slot_count(self) -> int:
        """How many slots there are."""
        return len(self._slots)

    @property
    def free_slots(self) -> int:
        """How many slots can be allocated now."""
        return len(self._free)

    def slot(self, index: int) -> Slot:
        """The slot with this index."""
        return self._slots[index]

    def allocate(self) -> Slot:
        """A free slot. Raises `ArenaFull`."""
        if not self._free:
            raise ArenaFull(
                f"all {len(self._slots)} segments of the broker's memory are in use;"
                " delete streams, or start the broker with a larger --arena-bytes",
                slots=len(self._slots),
                slot_bytes=self.slot_bytes,
            )
        slot = self._free.pop()
        slot.retired = False
        return slot

    def reuse(self, slot: Slot) -> None:
        """Called by the slot itself when nobody uses it any more."""
        slot.generation += 1
        self._generations[slot.index] = slot.generation
        self._free.append(slot)

    def close(self) -> None:
        """Remove the file. The memory itself goes when the last one who maps it lets it go."""
        self.path.unlink(missing_ok=True)
        os.close(self._fd)


def _create_locked(shm_dir: Path) -> tuple[Path, int]:
    """A new file and its descriptor, which holds the lock."""
    while True:
        path = shm_dir / f"kera-{os.getuid()}-{secrets.token_hex(4)}.arena"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # who holds it is looking for orphans, which is soon done
            if os.fstat(fd).st_nlink:
                return path, fd
        except OSError:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        os.close(fd)  # taken for an orphan between its creation and its lock


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
    """
    removed = []
    for path in sorted(shm_dir.glob(f"kera-{os.getuid()}-*.arena")):
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
