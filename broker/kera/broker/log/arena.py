"""The arena: one file of shared memory per broker, cut into equal slots that segments live in.

    0            4096                     slots_at
    ┌────────────┬────────────────────────┬──────────┬──────────┬─────
    │ JSON head  │ 64-byte row × slots    │ slot 0   │ slot 1   │ …
    └────────────┴────────────────────────┴──────────┴──────────┴─────

* The file is reserved and faulted in when it is made (a fresh page costs ten times a reused one), so it never grows,
  and a full file system shows at the start and not as SIGBUS later.
* A slot that is let go is used again, the last one first: its pages are the warmest.
* The row of a slot says which segment is in it and up to where. It is written after the bytes that it speaks of, so
  the next launch of a broker that was killed finds every chunk that was appended (`Arena.attach`, `Slot.content`).
* Its generation grows each time the slot is let go. A reader that maps the file compares generations before and after
  it looks, and so never takes a new segment's bytes for the old one's.
* A slot with leases is used again only when the last one is released (invariant 5 of the design). Leases of a launch
  that was killed are taken over as one, which the owner ends when those readers have had time to let go.
* The owner holds a lock on the file. So an arena whose owner has died is recognised: it is taken over by the next
  launch of the same broker; one of an ephemeral broker, which never comes back, is removed by the next start of any
  broker of the same user.

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
from typing import Any, NamedTuple

from kera.broker.event import Event
from kera.core.blocks import FILE_CALLS, FileCalls
from kera.core.errors import ArenaFull, PathNotWritable, SharedMemoryTooSmall, invariant
from kera.core.populating import populate
from kera.core.telemetry import get_logger

log = get_logger("kera.arena")

FORMAT = 2
HEAD_BYTES = 4096
PAGE_BYTES = 4096
ROW_BYTES = 64

# A row, as columns of u64 and of u32.
_GENERATION, _STREAM_ID, _GROUP_ID, _FIRST_RECORD = range(4)
_STREAMLET_ID, _ENTRY, _SEGMENT_ID, _STATE, _HEAD, _DURABLE_HEAD, _LEASES = range(8, 15)
_FREE, _OPEN, _CLOSED = range(3)


class SlotContent(NamedTuple):
    """The segment that a slot holds."""

    stream_id: int
    streamlet_id: int
    entry: int
    group_id: int
    segment_id: int
    first_record: int
    """Ordinal of its first record within the entry."""
    head: int
    durable_head: int
    closed: bool


class Slot:
    """Memory for one segment."""

    __slots__ = ("_arena", "_u64", "arena_offset", "index", "leases", "pins", "retired", "row", "view")

    def __init__(self, arena: Arena, index: int, arena_offset: int, row: memoryview, view: memoryview) -> None:
        self._arena = arena
        self._u64 = row.cast("Q")
        self.row = row.cast("I")
        """What it says of its segment, as numbers of 32 bits: the native core writes the heads."""
        self.index = index
        self.arena_offset = arena_offset
        """Of the slot's first byte, in the arena file."""
        self.view = view
        self.leases = 0
        """Readers that still look at the slot's bytes."""
        self.pins = 0
        """Jobs of ours that read or write the slot's bytes. Unlike leases they end with the process."""
        self.retired = False
        """No segment uses the slot any more; it is free as soon as there are no leases."""

    @property
    def generation(self) -> int:
        """How many segments have been here, this one included."""
        return self._u64[_GENERATION]

    @property
    def content(self) -> SlotContent | None:
        """The segment in this slot, as its row says; None for a free slot."""
        u64, u32 = self._u64, self.row
        if u32[_STATE] == _FREE:
            return None
        return SlotContent(
            u64[_STREAM_ID],
            u32[_STREAMLET_ID],
            u32[_ENTRY],
            u64[_GROUP_ID],
            u32[_SEGMENT_ID],
            u64[_FIRST_RECORD],
            u32[_HEAD],
            u32[_DURABLE_HEAD],
            u32[_STATE] == _CLOSED,
        )

    @property
    def open(self) -> bool:
        """Whether its segment is still being written to."""
        return self.row[_STATE] == _OPEN

    def assign(self, content: SlotContent) -> None:
        """Write down whose slot this is now."""
        u64, u32 = self._u64, self.row
        u64[_STREAM_ID], u64[_GROUP_ID], u64[_FIRST_RECORD] = content.stream_id, content.group_id, content.first_record
        u32[_STREAMLET_ID], u32[_ENTRY], u32[_SEGMENT_ID] = content.streamlet_id, content.entry, content.segment_id
        u32[_HEAD], u32[_DURABLE_HEAD] = content.head, content.durable_head
        u32[_STATE] = _CLOSED if content.closed else _OPEN  # last: from here on the row counts

    def write_head(self, head: int) -> None:
        """What is before `head` is there."""
        self.row[_HEAD] = head

    def write_durable_head(self, durable_head: int) -> None:
        """What is before `durable_head` may be read."""
        self.row[_DURABLE_HEAD] = durable_head

    def write_closed(self) -> None:
        """The segment takes no more appends."""
        self.row[_STATE] = _CLOSED

    def lease(self) -> None:
        """Keep the slot's bytes as they are until `release`."""
        self.leases += 1
        if self.leases == 1:
            self._arena.leased_slots += 1
        self.row[_LEASES] = self.leases

    def release(self, count: int = 1) -> None:
        """End one lease, or several."""
        invariant(self.leases >= count, "a lease was released twice", slot=self.index)
        self.leases -= count
        self.row[_LEASES] = self.leases
        if not self.leases:
            self._arena.leased_slots -= 1
            self._let_go()

    def pin(self) -> None:
        """Keep the slot until `unpin`, for a job of ours."""
        self.pins += 1

    def unpin(self) -> None:
        """End one pin."""
        invariant(self.pins > 0, "a slot was unpinned twice", slot=self.index)
        self.pins -= 1
        self._let_go()

    def _let_go(self) -> None:
        if self.leases or self.pins:
            return
        if self.retired:
            self._arena.reuse(self)
        else:
            self._arena.released()

    def retire(self) -> None:
        """The segment is gone: free the slot, now or when the last lease ends."""
        invariant(not self.retired, "a slot was retired twice", slot=self.index)
        self.retired = True
        self.row[_STATE] = _FREE
        if not self.leases and not self.pins:
            self._arena.reuse(self)

    def take_over(self) -> bool:
        """After `Arena.attach`: count the leases of the last launch as one. Returns whether there were any."""
        self.leases = 1 if self.row[_LEASES] else 0
        self._arena.leased_slots += self.leases
        self.row[_LEASES] = self.leases
        return bool(self.leases)

    def advance_generation(self) -> None:
        """What was referred to before is gone."""
        self._u64[_GENERATION] += 1


class Arena:
    """See the head of this module."""

    def __init__(
        self,
        path: Path,
        fd: int,
        memory: mmap.mmap,
        slot_bytes: int,
        slots: int,
        slots_at: int,
    ) -> None:
        self.path = path
        self.slot_bytes = slot_bytes
        self.released = Event[[]]()
        """A slot has come free, or could: its last lease has ended."""
        self._fd = fd
        self._memory = memory
        self._view = memoryview(memory)
        rows = self._view[HEAD_BYTES : HEAD_BYTES + ROW_BYTES * slots]
        self._slots = [
            Slot(
                self,
                index,
                at,
                rows[index * ROW_BYTES : (index + 1) * ROW_BYTES],
                self._view[at : at + slot_bytes],
            )
            for index, at in enumerate(range(slots_at, slots_at + slots * slot_bytes, slot_bytes))
        ]
        self._free: list[Slot] = []
        self.leased_slots = 0
        """With at least one lease."""
        self.inherited: list[Slot] = []
        """Slots that readers of the last launch may still look at; each has one lease, to be released in the end."""

    @classmethod
    def create(
        cls,
        shm_dir: Path,
        *,
        arena_bytes: int,
        slot_bytes: int,
        data_dir: Path,
        ephemeral: bool,
        calls: FileCalls = FILE_CALLS,
    ) -> Arena:
        """Make an arena of `arena_bytes` // `slot_bytes` slots in `shm_dir` and lock it. Half a second for each GiB.

        Raises `SharedMemoryTooSmall` or `PathNotWritable`.
        """
        slots = arena_bytes // slot_bytes
        slots_at = -(-(HEAD_BYTES + ROW_BYTES * slots) // PAGE_BYTES) * PAGE_BYTES
        size = slots_at + slots * slot_bytes
        try:
            status = os.statvfs(shm_dir)
            available = status.f_bavail * status.f_frsize
            path, fd = _create_locked(shm_dir, calls)
        except OSError as error:
            raise _unusable(shm_dir, error) from error
        try:
            if available < size:
                raise _too_small(shm_dir, size, available)
            calls.reserve(fd, 0, size)
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
        populate(memory)
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
        arena = cls(path, fd, memory, slot_bytes, slots, slots_at)
        for slot in arena._slots:
            slot.advance_generation()
        arena._free = list(reversed(arena._slots))
        memory[: len(text)] = text  # last: an arena without a head was never used
        return arena

    @classmethod
    def attach(cls, shm_dir: Path, data_dir: Path) -> Arena | None:
        """Take over the arena that a killed launch with this data directory has left; None when there is none.

        Slots that hold segments are not free: the caller looks at their `content` and keeps or retires each. Raises
        `PathNotWritable`.
        """
        for path in _arenas_in(shm_dir):
            try:
                fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                head = _read_head(fd)
                if (
                    head is not None
                    and head.get("data_dir") == str(data_dir)
                    and not head.get("ephemeral")
                    and head.get("format") == FORMAT
                    and os.fstat(fd).st_size == head["slots_at"] + head["slots"] * head["slot_bytes"]
                ):
                    memory = mmap.mmap(fd, 0)
                    arena = cls(path, fd, memory, head["slot_bytes"], head["slots"], head["slots_at"])
                    arena._take_over()
                    return arena
            except (OSError, KeyError):
                pass  # another broker's, or none that we know: `remove_orphans` deals with it
            os.close(fd)
        return None

    def _take_over(self) -> None:
        for slot in reversed(self._slots):
            if slot.take_over():
                self.inherited.append(slot)
            if slot.content is None:
                slot.retired = True
                if not slot.leases:
                    self._free.append(slot)

    @property
    def slot_count(self) -> int:
        """How many slots there are."""
        return len(self._slots)

    @property
    def free_slots(self) -> int:
        """How many slots can be allocated now."""
        return len(self._free)

    def slots(self) -> Iterator[Slot]:
        """All slots."""
        return iter(self._slots)

    def slot(self, index: int) -> Slot:
        """The slot with this index."""
        return self._slots[index]

    def allocate(self) -> Slot:
        """A free slot. Raises `ArenaFull`."""
        if not self._free:
            raise self.full()
        slot = self._free.pop()
        slot.retired = False
        return slot

    def full(self) -> ArenaFull:
        """The error for want of a slot."""
        return ArenaFull(
            f"the {len(self._slots)} segments of the broker's memory are in use;"
            " it goes on when some are written to disk or let go by their readers",
            slots=len(self._slots),
            slot_bytes=self.slot_bytes,
        )

    def reuse(self, slot: Slot) -> None:
        """Called by the slot itself when nobody uses it any more."""
        slot.advance_generation()
        self._free.append(slot)
        self.released()

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
