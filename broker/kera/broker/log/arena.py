"""The arena: a broker's shared memory, cut into equal slots that segments live in.

Slots have their bytes in files, one for each memory domain (``arena_file``); there are as many as fit into the memory
that the broker may use, whichever domains they are of.

* A slot that is let go is used again, the last one first: its pages are the warmest. One of the same domain is taken
  before those of others, whose memory is cleared and moves to the file of this one.
* The row of a slot says which segment is in it and up to where. It is written after the bytes that it speaks of, so
  the next launch of a broker that was killed finds every chunk that was appended (`Arena.attach`, `Slot.content`).
* Its generation grows each time the slot is let go. A reader that maps the file compares generations before and after
  it looks, and so never takes a new segment's bytes for the old one's.
* A slot with leases is used again only when the last one is released (invariant 5 of the design). Leases of a launch
  that was killed are taken over as one, which the owner ends when those readers have had time to let go.

Invariant: a slot is either free, or in use by exactly one segment, or retired and leased; and it has memory in one file
at most.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

from kera.broker.event import Event
from kera.broker.log.arena_file import HOLE, ArenaFile
from kera.broker.log.arena_head import Geometry, Owner
from kera.core.base.blocks import FILE_CALLS, FileCalls
from kera.core.base.telemetry import get_logger
from kera.core.errors import ArenaFull, PathNotWritable, SharedMemoryTooSmall, Unavailable, invariant
from kera.core.push import DEFAULT_DOMAIN

log = get_logger("kera.arena")

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

    __slots__ = ("_arena", "_u64", "arena_offset", "file", "index", "leases", "pins", "retired", "row", "view")

    def __init__(self, arena: Arena, index: int, file: ArenaFile) -> None:
        self._arena = arena
        self.index = index
        self.arena_offset = file.geometry.slot_at(index)
        """Offset of the slot's first byte, in each file of the arena."""
        self._bind(file)
        self.leases = 0
        """Readers that still look at the slot's bytes."""
        self.pins = 0
        """Jobs of ours that read or write the slot's bytes. Unlike leases they end with the process."""
        self.retired = False
        """No segment uses the slot any more; it is free as soon as there are no leases."""

    def _bind(self, file: ArenaFile) -> None:
        row = file.row(self.index)
        self.file = file
        """In which it has its memory, if it has any."""
        self._u64 = row.cast("Q")
        self.row = row.cast("I")
        """The row of its segment, as numbers of 32 bits: the native core writes the heads."""
        self.view = file.slot_view(self.index)

    @property
    def has_memory(self) -> bool:
        """Whether it has memory in its file; else there is a hole."""
        return not self.row[HOLE]

    def move(self, file: ArenaFile) -> None:
        """Have memory in `file`, and nowhere else. Raises `OSError`; then it has none at all."""
        if self.has_memory:
            if self.file is file:
                return
            self.row[HOLE] = 1  # first: a launch that is killed now leaves one without memory
            self.file.take_memory(self.index)
        self._bind(file)
        file.give_memory(self.index)
        if not self.generation:
            self.advance_generation()
        self.row[HOLE] = 0

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
        """Publish that the bytes before `head` are there."""
        self.row[_HEAD] = head

    def write_durable_head(self, durable_head: int) -> None:
        """Publish that the bytes before `durable_head` may be read."""
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
        """Invalidate all earlier references to the slot."""
        self._u64[_GENERATION] += 1


class Arena:
    """The slots of a broker's shared memory. Each holds one segment at most, and is not reused while leased."""

    def __init__(
        self, shm_dir: Path, owner: Owner, files: Iterable[ArenaFile], calls: FileCalls, *, left: bool = False
    ) -> None:
        """`files`: one at least, of which `left` says whether an earlier launch has left them."""
        self.released = Event[[]]()
        """A slot has come free, or could: its last lease has ended."""
        self._shm_dir = shm_dir
        self._owner = owner
        self._calls = calls
        self._files: dict[ArenaFile, list[Slot]] = {file: [] for file in sorted(files, key=_age)}
        """With the free slots that have memory there."""
        self._current = {file.domain: file for file in self._files if not (left and file.is_given)}
        """The last one of each domain; the others are renewed, as are those of which only an earlier launch knew who
        has mapped them."""
        first, *_ = self._files
        self._geometry = first.geometry
        self.path = self._current.get(DEFAULT_DOMAIN, first).path
        self.slot_bytes = first.geometry.slot_bytes
        self._bare: list[Slot] = []
        """Free, and without memory."""
        self._slots = [Slot(self, index, self._found_in(index)) for index in range(first.geometry.slots)]
        self._slots_in = dict.fromkeys(self._files, 0)
        """How many have their memory in each file."""
        self.free_slots = 0
        """How many slots can be allocated now."""
        self._short: set[str] = set()
        """Domains of which slots could not have memory where it was wanted, and that was told."""
        self.leased_slots = 0
        """With at least one lease."""
        self.inherited: list[Slot] = []
        """Slots that readers of the last launch may still look at; each has one lease, to be released in the end."""
        for slot in reversed(self._slots):
            self._slots_in[slot.file] += slot.has_memory
            if not left:
                slot.advance_generation()
                self._add_free(slot)
            else:
                self._take_over(slot)
        for file in list(self._files):
            self._drop_if_empty(file)

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
    ) -> Self:
        """Make an arena of `arena_bytes` // `slot_bytes` slots in `shm_dir`. Half a second for each GiB.

        Raises `SharedMemoryTooSmall` or `PathNotWritable`.
        """
        geometry, owner = Geometry(slot_bytes, arena_bytes // slot_bytes), Owner(data_dir, ephemeral)
        file = ArenaFile.create(shm_dir, geometry, owner, domain=DEFAULT_DOMAIN, reserved=True, calls=calls)
        return cls(shm_dir, owner, [file], calls)

    @classmethod
    def attach(cls, shm_dir: Path, data_dir: Path) -> Self | None:
        """Take over the arena that a killed launch with this data directory has left; None when there is none.

        Slots that hold segments are not free: the caller looks at their `content` and keeps or retires each. Raises
        `PathNotWritable` and `StartError`, see `ArenaFile.left_by`.
        """
        files = ArenaFile.left_by(shm_dir, data_dir)
        alike = [file for file in files if file.geometry == files[0].geometry]
        for file in files:
            if file not in alike:
                file.close(keep=True)
        return cls(shm_dir, Owner(data_dir, ephemeral=False), alike, FILE_CALLS, left=True) if alike else None

    def _found_in(self, index: int) -> ArenaFile:
        """Where a slot has its memory."""
        with_memory = (file for file in self._files if file.has_memory(index))
        return next(with_memory, next(iter(self._files)))

    def _take_over(self, slot: Slot) -> None:
        if slot.take_over():
            self.inherited.append(slot)
        if slot.content is None:
            slot.retired = True
            if not slot.leases:
                self._add_free(slot)

    @property
    def paths(self) -> list[Path]:
        """Paths of its files."""
        return [file.path for file in self._files]

    @property
    def slot_count(self) -> int:
        """How many slots there are."""
        return len(self._slots)

    def slots(self) -> Iterator[Slot]:
        """All slots."""
        return iter(self._slots)

    def slot(self, index: int) -> Slot:
        """The slot with this index."""
        return self._slots[index]

    def allocate(self, domain: str = DEFAULT_DOMAIN) -> Slot:
        """A free slot, with memory in the file of `domain`. Raises `ArenaFull`."""
        if not self.free_slots:
            raise self.full()
        with contextlib.suppress(OSError, PathNotWritable, SharedMemoryTooSmall):
            return self._allocate(domain)
        self._take_back()
        try:
            return self._allocate(domain)
        except (PathNotWritable, SharedMemoryTooSmall) as error:
            raise self._short_of(domain, error.message) from error
        except OSError as error:
            raise self._short_of(domain, error.strerror or "") from error

    def _allocate(self, domain: str) -> Slot:
        file = self.file(domain)
        slot = (self._files[file] or self._bare or self._others()).pop()
        self.free_slots -= 1
        if slot.file is not file or not slot.has_memory:
            self._move(slot, file)
        slot.retired = False
        return slot

    def _others(self) -> list[Slot]:
        """Free slots that have their memory in another file: those of one that was renewed, or else of the most."""
        return max(self._files.items(), key=lambda item: (bool(item[1]) and self.is_renewed(item[0]), len(item[1])))[1]

    def _move(self, slot: Slot, file: ArenaFile) -> None:
        before = slot.file if slot.has_memory else None
        try:
            slot.move(file)
        except OSError:
            self._add_free(slot)
            raise
        finally:
            if before is not None:
                self._slots_in[before] -= 1
                self._drop_if_empty(before)
        self._slots_in[file] += 1
        self._short.discard(file.domain)

    def _take_back(self) -> None:
        """Have the memory that readers have put into holes, by looking there: it is missing now."""
        for file in self._files:
            if file.is_given:
                file.clear_holes()

    def full(self) -> ArenaFull:
        """The error for want of a slot."""
        return ArenaFull(
            f"the {len(self._slots)} segments of the broker's memory are in use;"
            " writing resumes when some are written to disk or released by their readers",
            slots=len(self._slots),
            slot_bytes=self.slot_bytes,
        )

    def _short_of(self, domain: str, reason: str) -> ArenaFull:
        text = f"cannot allocate memory in {self._shm_dir} for memory domain {domain!r}: {reason}"
        if domain not in self._short:
            self._short.add(domain)
            log.error("cannot allocate a segment in the file of its memory domain", domain=domain, reason=reason)
        return ArenaFull(text, domain=domain, slot_bytes=self.slot_bytes)

    def reuse(self, slot: Slot) -> None:
        """Called by the slot itself when nobody uses it any more."""
        slot.advance_generation()
        self._add_free(slot)
        self.released()

    def _add_free(self, slot: Slot) -> None:
        (self._files[slot.file] if slot.has_memory else self._bare).append(slot)
        self.free_slots += 1

    # -- domains ---------------------------------------------------------------------------------------------------

    def file(self, domain: str = DEFAULT_DOMAIN) -> ArenaFile:
        """In which slots of a domain get their memory. Raises `SharedMemoryTooSmall` or `PathNotWritable`."""
        file = self._current.get(domain)
        if file is None:
            number = 1 + max((each.number for each in self._files if each.domain == domain), default=-1)
            file = ArenaFile.create(
                self._shm_dir, self._geometry, self._owner, domain=domain, number=number, calls=self._calls
            )
            self._files[file], self._slots_in[file] = [], 0
            self._current[domain] = file
        return file

    def file_for_readers(self, domain: str) -> ArenaFile:
        """The same. Raises `Unavailable`: there may be room for it later."""
        try:
            return self.file(domain)
        except (PathNotWritable, SharedMemoryTooSmall) as error:
            raise Unavailable(
                f"memory domain {domain!r} has no file in {self._shm_dir} yet: {error.message}", domain=domain
            ) from error

    def is_renewed(self, file: ArenaFile) -> bool:
        """Whether slots of its domain get their memory in another file by now."""
        return not self.is_of(file, file.domain)

    def is_of(self, file: ArenaFile, domain: str) -> bool:
        """Whether slots of a domain get their memory there now."""
        return self._current.get(domain) is file

    def renew(self, domain: str) -> None:
        """From now on, slots of a domain get their memory in a file that nobody has mapped."""
        file = self._current.pop(domain, None)
        if file is not None:
            self._drop_if_empty(file)

    def _drop_if_empty(self, file: ArenaFile) -> None:
        if not self._slots_in[file] and self.is_renewed(file):
            del self._files[file], self._slots_in[file]
            file.close()

    def close(self, *, keep: bool = False) -> None:
        """Remove the files, unless the next launch is to find them. See `ArenaFile.close`."""
        for file in self._files:
            file.close(keep=keep)


def _age(file: ArenaFile) -> int:
    return file.number
