"""The arena: a broker's shared memory, cut into equal slots that hold segments.

Slots have their bytes in files, one for each memory domain (``arena_file``). The number of slots, over all domains, is
what fits into the memory that the broker may use.

* The arena reuses the slot that was freed last, because its pages are the warmest. It prefers a slot of the same
  domain; the memory of another domain's slot is cleared, and moves to the file of this domain.
* The row of a slot says which segment is in it, and up to where. It is written after the bytes that it describes, so
  the next launch of a killed broker finds every appended chunk (`Arena.attach`, `Slot.content`).
* The generation of a slot grows each time it is freed. A reader that maps the file compares generations before and
  after it reads, so it never takes a new segment's bytes for the old one's.
* A leased slot is reused only after its last lease is released (invariant 5 of the design). The next launch takes over
  the leases of a killed one as a single lease per slot, and ends it when the readers have had time to release theirs.

Invariant: a slot is either free, or in use by exactly one segment, or retired and leased or pinned; and it has memory
in at most one file.
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
        """Number of leases of readers that may still read the slot's bytes."""
        self.pins = 0
        """Number of the broker's own jobs that read or write the slot's bytes. Unlike leases, they end with the
        process."""
        self.retired = False
        """Whether the slot has no segment any more; it becomes free when it has no leases and pins."""

    def _bind(self, file: ArenaFile) -> None:
        row = file.row(self.index)
        self.file = file
        """The file in which the slot has its memory, if it has any."""
        self._u64 = row.cast("Q")
        self.row = row.cast("I")
        """The row of the slot as 32-bit numbers; the native core writes the heads there."""
        self.view = file.slot_view(self.index)

    @property
    def has_memory(self) -> bool:
        """Whether the slot has memory in its file, and not a hole."""
        return not self.row[HOLE]

    def move(self, file: ArenaFile) -> None:
        """Move the slot's memory to `file`. Raises `OSError`; then the slot has no memory."""
        if self.has_memory:
            if self.file is file:
                return
            self.row[HOLE] = 1  # first: if the broker is killed now, the slot counts as one without memory
            self.file.take_memory(self.index)
        self._bind(file)
        file.give_memory(self.index)
        if not self.generation:
            self.advance_generation()
        self.row[HOLE] = 0

    @property
    def generation(self) -> int:
        """The number of segments that the slot has had, the present one included."""
        return self._u64[_GENERATION]

    @property
    def content(self) -> SlotContent | None:
        """The segment in this slot, according to its row; None for a free slot."""
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
        """Whether the segment in this slot still takes appends."""
        return self.row[_STATE] == _OPEN

    def assign(self, content: SlotContent) -> None:
        """Write into the row which segment the slot holds now."""
        u64, u32 = self._u64, self.row
        u64[_STREAM_ID], u64[_GROUP_ID], u64[_FIRST_RECORD] = content.stream_id, content.group_id, content.first_record
        u32[_STREAMLET_ID], u32[_ENTRY], u32[_SEGMENT_ID] = content.streamlet_id, content.entry, content.segment_id
        u32[_HEAD], u32[_DURABLE_HEAD] = content.head, content.durable_head
        u32[_STATE] = _CLOSED if content.closed else _OPEN  # last: this makes the row valid

    def write_head(self, head: int) -> None:
        """Record that the bytes before `head` are written."""
        self.row[_HEAD] = head

    def write_durable_head(self, durable_head: int) -> None:
        """Record that readers may read the bytes before `durable_head`."""
        self.row[_DURABLE_HEAD] = durable_head

    def write_closed(self) -> None:
        """Record that the segment takes no more appends."""
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
        """Keep the slot until `unpin`, for one of the broker's own jobs."""
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
        """Free the slot, whose segment is gone: now, or when its last lease or pin ends."""
        invariant(not self.retired, "a slot was retired twice", slot=self.index)
        self.retired = True
        self.row[_STATE] = _FREE
        if not self.leases and not self.pins:
            self._arena.reuse(self)

    def take_over(self) -> bool:
        """Count the leases of the last launch as one, after `Arena.attach`. Return whether there were any."""
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
        """`files`: at least one; `left`: whether an earlier launch has left them."""
        self.released = Event[[]]()
        """Emitted when a slot has become free, or may now be freed because its last lease or pin has ended."""
        self._shm_dir = shm_dir
        self._owner = owner
        self._calls = calls
        self._files: dict[ArenaFile, list[Slot]] = {file: [] for file in sorted(files, key=_age)}
        """The files, each with the free slots that have memory in it."""
        self._current = {file.domain: file for file in self._files if not (left and file.is_given)}
        """The file of each domain that gives memory to slots. All other files are renewed; so are files that only an
        earlier launch knew the readers of."""
        first, *_ = self._files
        self._geometry = first.geometry
        self.path = self._current.get(DEFAULT_DOMAIN, first).path
        self.slot_bytes = first.geometry.slot_bytes
        self._bare: list[Slot] = []
        """The free slots without memory."""
        self._slots = [Slot(self, index, self._found_in(index)) for index in range(first.geometry.slots)]
        self._slots_in = dict.fromkeys(self._files, 0)
        """Number of slots that have their memory in each file."""
        self.free_slots = 0
        """Number of slots that can be allocated now."""
        self._short: set[str] = set()
        """Domains whose failure to get memory was logged already."""
        self.leased_slots = 0
        """Number of slots with at least one lease."""
        self.inherited: list[Slot] = []
        """Slots that readers of the last launch may still read; each has one lease, which the owner has to release."""
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
        """Create an arena of `arena_bytes` // `slot_bytes` slots in `shm_dir`; takes half a second for each GiB.

        Raises `SharedMemoryTooSmall` or `PathNotWritable`.
        """
        geometry, owner = Geometry(slot_bytes, arena_bytes // slot_bytes), Owner(data_dir, ephemeral)
        file = ArenaFile.create(shm_dir, geometry, owner, domain=DEFAULT_DOMAIN, reserved=True, calls=calls)
        return cls(shm_dir, owner, [file], calls)

    @classmethod
    def attach(cls, shm_dir: Path, data_dir: Path) -> Self | None:
        """Take over the arena that a killed launch with this data directory has left; return None if there is none.

        Slots that hold segments are not free: the caller reads their `content`, and keeps or retires each. Raises
        `PathNotWritable` and `StartError`, see `ArenaFile.left_by`.
        """
        files = ArenaFile.left_by(shm_dir, data_dir)
        alike = [file for file in files if file.geometry == files[0].geometry]
        for file in files:
            if file not in alike:
                file.close(keep=True)
        return cls(shm_dir, Owner(data_dir, ephemeral=False), alike, FILE_CALLS, left=True) if alike else None

    def _found_in(self, index: int) -> ArenaFile:
        """Return the file in which a slot has its memory; the first file if it has none."""
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
        """The paths of all files."""
        return [file.path for file in self._files]

    @property
    def slot_count(self) -> int:
        """The number of slots."""
        return len(self._slots)

    def slots(self) -> Iterator[Slot]:
        """Iterate over all slots."""
        return iter(self._slots)

    def slot(self, index: int) -> Slot:
        """Return the slot with this index."""
        return self._slots[index]

    def allocate(self, domain: str = DEFAULT_DOMAIN) -> Slot:
        """Allocate a slot with memory in the file of `domain`. Raises `ArenaFull`."""
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
        """Return the free slots of another file: a renewed file if possible, otherwise the one with the most."""
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
        """Free the pages that readers have brought into holes by reading them: that memory is needed now."""
        for file in self._files:
            if file.is_given:
                file.clear_holes()

    def full(self) -> ArenaFull:
        """Return the error that no slot is free."""
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
        """Make a slot available again; the slot calls this when it has no segment, lease or pin any more."""
        slot.advance_generation()
        self._add_free(slot)
        self.released()

    def _add_free(self, slot: Slot) -> None:
        (self._files[slot.file] if slot.has_memory else self._bare).append(slot)
        self.free_slots += 1

    # -- domains ---------------------------------------------------------------------------------------------------

    def file(self, domain: str = DEFAULT_DOMAIN) -> ArenaFile:
        """Return the file in which slots of a domain get memory. Raises `SharedMemoryTooSmall`, `PathNotWritable`."""
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
        """Return the file of a domain, as `file`. Raises `Unavailable` if it cannot be created now."""
        try:
            return self.file(domain)
        except (PathNotWritable, SharedMemoryTooSmall) as error:
            raise Unavailable(
                f"memory domain {domain!r} has no file in {self._shm_dir} yet: {error.message}", domain=domain
            ) from error

    def is_renewed(self, file: ArenaFile) -> bool:
        """Whether slots of the file's domain no longer get memory in this file."""
        return not self.is_of(file, file.domain)

    def is_of(self, file: ArenaFile, domain: str) -> bool:
        """Whether slots of a domain get memory in this file now."""
        return self._current.get(domain) is file

    def renew(self, domain: str) -> None:
        """Let further slots of a domain get memory in a new file, which no reader has mapped yet."""
        file = self._current.pop(domain, None)
        if file is not None:
            self._drop_if_empty(file)

    def _drop_if_empty(self, file: ArenaFile) -> None:
        if not self._slots_in[file] and self.is_renewed(file):
            del self._files[file], self._slots_in[file]
            file.close()

    def close(self, *, keep: bool = False) -> None:
        """Close the files, and remove them unless `keep`: the next launch then finds them. See `ArenaFile.close`."""
        for file in self._files:
            file.close(keep=keep)


def _age(file: ArenaFile) -> int:
    return file.number
