"""The slots of the memory and their users: writers, segments that come back from disk, and readers that hold them.
Pure.

* **Eviction**: when no slot is free, a slot whose segment is on disk is taken. The streams with the lowest
  `memory_priority` come first; among their segments, those that no reader still has to read (the oldest first), then
  the segment that is farthest from any reader. A segment that was loaded for a reader is kept for it, for a limited
  time.
* **Reserve**: writers and readers never occupy some slots, which are free, or have a segment that is on disk. When all
  other slots are taken, readers get copies of segments in the reserve (`may_lease`). So segments can always be loaded
  from disk, even if the disk takes no data and readers release nothing.
* **Back-pressure**: when everything in memory is open or unwritten, `allocate` raises `ArenaFull`, or `DiskFull` when
  the disk takes nothing. The event `room` tells writers when to try again.
"""

from __future__ import annotations

from kera.broker.log.arena import Arena, Slot
from kera.broker.log.segment import Segment
from kera.broker.storage.books import Books
from kera.core.push import DEFAULT_DOMAIN

RESERVE_SHARE = 4
"""The reserve is one in this many slots, but at most `RESERVE_SLOTS_MAX`."""
RESERVE_SLOTS_MAX = 3
SLOTS_PER_SPARE_SLOT = 4
"""Memory is scarce when at most one in this many slots is free, or could be freed at once."""
LOADED_SHARE_MAX = 4
"""At most one in this many slots is for segments that were read ahead and not read yet."""
WANTED_MS = 5_000
"""How long a loaded segment waits for its reader before it can be evicted like any other."""
WANTED_MS_MIN = 500
"""How long it waits if another reader needs a slot, and no other is available."""


_NO_READER = (1 << 64, 0)
"""A distance greater than that of any reader."""
_MISSED_LEAST = (0, _NO_READER)
_MISSED_MOST = (-1 << 32, (-1, -1))


class SegmentSlots:
    """Gives memory slots to writers and loads, evicts stored segments, and keeps a reserve free for loads."""

    def __init__(self, arena: Arena, books: Books, reserve_slots: int | None = None) -> None:
        """`reserve_slots`: by default a share of all slots."""
        self.slot_bytes = arena.slot_bytes
        """The size of a segment."""
        self.slot_count = arena.slot_count
        """The number of segments that fit into memory."""
        self.stored: dict[Segment, None] = {}
        """Segments that are on disk and in memory, oldest first."""
        self.room_wanted = False
        """Whether a writer was refused because no slot was available."""
        self._arena = arena
        self._books = books
        self._reserve = min(arena.slot_count // RESERVE_SHARE, RESERVE_SLOTS_MAX)
        if reserve_slots is not None:
            self._reserve = reserve_slots
        self._loading = 0
        self._kept: dict[Segment, int] = {}
        """Segments that were loaded and not read yet, each with the time until which it is kept."""

    # -- writers and readers ---------------------------------------------------------------------------------------

    def allocate(self, domain: str = DEFAULT_DOMAIN) -> Slot:
        """Allocate a slot for a segment of a memory domain, by eviction if necessary.

        Raises `ArenaFull` or `DiskFull`; the event `room` then tells when to try again.
        """
        if self.beyond_reserve() and self.have_free():
            return self._arena.allocate(domain)
        self.room_wanted = True
        self._books.events.disk_work()
        self._books.disk.check()
        raise self._arena.full()

    def may_lease(self, segment: Segment) -> bool:
        """Whether readers may hold the slot of a segment. If not, it belongs to the reserve, and they get copies.

        The reserve also counts while the disk works, because readers may hold slots for ever when it gets full.
        """
        if segment.slot.leases > 0 or segment not in self.stored:
            return True
        return self.beyond_reserve()

    def is_in_place(self, segment: Segment) -> bool:
        """Whether a segment's slot is in the file that new segments of its memory domain get."""
        return self._arena.is_of(segment.slot.file, segment.entry.memory_domain)

    def touched(self, segment: Segment) -> None:
        """Note that a reader has read from a segment, so it is not kept for that reader any more."""
        self._kept.pop(segment, None)

    def tell_room(self) -> None:
        """Emit `room` if writers were refused: a slot is free now, or can be freed."""
        if self.room_wanted:
            self.room_wanted = False
            self._books.events.room()

    # -- free slots and eviction -----------------------------------------------------------------------------------

    def beyond_reserve(self) -> bool:
        """Whether more slots than the reserve are free, or could be freed at once."""
        left = self._reserve - self._arena.free_slots - self._loading
        for segment in self.stored if left >= 0 else ():
            if not (segment.slot.leases or segment.slot.pins):
                left -= 1
                if left < 0:
                    break
        return left < 0

    @property
    def scarce(self) -> bool:
        """Whether memory is so scarce that delayed flushes must not wait."""
        spare = self._arena.free_slots + len(self.stored)
        return self.room_wanted or spare * SLOTS_PER_SPARE_SLOT <= self.slot_count

    @property
    def reserve_used(self) -> bool:
        """Whether no more slots than the reserve are free."""
        return self._arena.free_slots <= self._reserve

    @property
    def available(self) -> bool:
        """Whether a slot is free, or might be freed."""
        return bool(self._arena.free_slots or self.stored)

    def have_free(self) -> bool:
        """Evict a segment if no slot is free; return whether one is free now."""
        return bool(self._arena.free_slots) or self.evict()

    def evict(self) -> bool:
        """Free the slot whose segment will be missed least. Return whether there was one."""
        missed_least: Segment | None = None
        found = _MISSED_MOST
        for segment in self.stored:
            if segment.slot.leases or segment.slot.pins or segment in self._kept:
                continue
            priority = segment.entry.memory_priority
            if priority > -found[0]:
                continue
            rank = (-priority, segment.entry.distance(segment.key) or _NO_READER)
            if rank > found:
                missed_least, found = segment, rank
                if rank == _MISSED_LEAST:
                    break
        if missed_least is None:
            return False
        self.forget(missed_least)
        missed_least.slot.retire()
        self._books.totals.segments_evicted += 1
        return True

    def forget(self, segment: Segment) -> None:
        """Remove a stored segment from memory."""
        self.stored.pop(segment, None)
        self._kept.pop(segment, None)
        _leave_memory(segment)

    # -- loaded segments -------------------------------------------------------------------------------------------

    def begin_load(self, domain: str = DEFAULT_DOMAIN) -> Slot:
        """Allocate a free slot for a segment of a memory domain that is loaded from disk. Raises `ArenaFull`."""
        slot = self._arena.allocate(domain)
        self._loading += 1
        return slot

    def end_load(self, segment: Segment, now_ms: int, *, loaded: bool) -> None:
        """Keep a loaded segment for its reader; or free its slot, if it was not `loaded`."""
        self._loading -= 1
        if loaded:
            self._kept[segment] = now_ms + WANTED_MS
            self.stored[segment] = None
        else:
            _leave_memory(segment)
            segment.slot.retire()

    @property
    def may_read_ahead(self) -> bool:
        """Whether memory is available for segments that no reader waits for yet."""
        return len(self._kept) < max(1, self.slot_count // LOADED_SHARE_MAX) and self.beyond_reserve()

    def expire(self, now_ms: int) -> None:
        """Stop keeping segments whose readers have not come in time."""
        for segment in [segment for segment, until in self._kept.items() if now_ms >= until]:
            del self._kept[segment]

    def hurry(self, now_ms: int) -> bool:
        """Stop keeping segments whose readers have not come soon: others wait. Return whether there were any."""
        late = [segment for segment, until in self._kept.items() if now_ms >= until - WANTED_MS + WANTED_MS_MIN]
        for segment in late:
            del self._kept[segment]
        return bool(late)


def _leave_memory(segment: Segment) -> None:
    resident = segment.entry.resident
    if resident.get(segment.key) is segment:
        del resident[segment.key]
