"""The slots of the memory and their users: writers, segments that come back from disk, and readers that hold them.
Pure.

* **Eviction**: when no slot is free, one whose segment is on disk is taken: of the streams with the lowest
  `memory_priority`, first those that no reader has before it (the oldest first), then the one that is farthest from any
  reader. What was loaded for a reader is kept until it has
  come for it, but not for ever.
* **Reserve**: some slots are never the writers', nor held by readers: they are free, or what is in them is on disk.
  When writers and readers have all others, readers get copies of what is in them (`may_lease`). So what is on disk can
  be loaded, whatever the disk takes and whoever lets go of nothing.
* **Back-pressure**: when everything in memory is open or unwritten, `allocate` says so (`ArenaFull`, or `DiskFull` when
  the disk takes nothing), and the event `room` tells when there is room.
"""

from __future__ import annotations

from kera.broker.log.arena import Arena, Slot
from kera.broker.log.segment import Segment
from kera.broker.storage.books import Books
from kera.core.push import DEFAULT_DOMAIN

RESERVE_SHARE = 4
"""One slot in so many is the reserve, and no more than `RESERVE_SLOTS_MAX`."""
RESERVE_SLOTS_MAX = 3
SLOTS_PER_SPARE_SLOT = 4
"""Memory is scarce when no more than one slot in so many is free, or could be freed at once."""
LOADED_SHARE_MAX = 4
"""At most one slot in so many is for segments that were read ahead and not yet read."""
WANTED_MS = 5_000
"""How long a loaded segment waits for its reader before it can be evicted like any other."""
WANTED_MS_MIN = 500
"""The same when another reader waits for its slot, and no other can be had."""


_NO_READER = (1 << 64, 0)
"""Farther than any is."""
_MISSED_LEAST = (0, _NO_READER)
_MISSED_MOST = (-1 << 32, (-1, -1))


class SegmentSlots:
    """Gives memory slots to writers and loads, evicts stored segments, and keeps a reserve free for loads."""

    def __init__(self, arena: Arena, books: Books, reserve_slots: int | None = None) -> None:
        """`reserve_slots`: by default a share of all."""
        self.slot_bytes = arena.slot_bytes
        """Size of a segment."""
        self.slot_count = arena.slot_count
        """How many segments fit into memory."""
        self.stored: dict[Segment, None] = {}
        """On disk and in memory, oldest first."""
        self.room_wanted = False
        """A writer was refused for want of a slot."""
        self._arena = arena
        self._books = books
        self._reserve = min(arena.slot_count // RESERVE_SHARE, RESERVE_SLOTS_MAX)
        if reserve_slots is not None:
            self._reserve = reserve_slots
        self._loading = 0
        self._kept: dict[Segment, int] = {}
        """Loaded, not read yet → until when it is kept."""

    # -- writers and readers ---------------------------------------------------------------------------------------

    def allocate(self, domain: str = DEFAULT_DOMAIN) -> Slot:
        """A slot, free or freed, for a segment of a memory domain.

        Raises `ArenaFull` or `DiskFull`; then `room` tells when it is worth trying.
        """
        if self.beyond_reserve() and self.have_free():
            return self._arena.allocate(domain)
        self.room_wanted = True
        self._books.events.disk_work()
        self._books.disk.check()
        raise self._arena.full()

    def may_lease(self, segment: Segment) -> bool:
        """Whether readers may hold the slot of a segment. If not, it is of the reserve: they get copies.

        Also while the disk takes everything: what they hold when it gets full, they may hold for ever.
        """
        if segment.slot.leases > 0 or segment not in self.stored:
            return True
        return self.beyond_reserve()

    def is_in_place(self, segment: Segment) -> bool:
        """Whether a segment is where new ones of its memory domain are."""
        return self._arena.is_of(segment.slot.file, segment.entry.memory_domain)

    def touched(self, segment: Segment) -> None:
        """A reader has got something of a segment: if it was loaded for that, it is one like the others now."""
        self._kept.pop(segment, None)

    def tell_room(self) -> None:
        """A slot has come free, or could: writers who were refused one may try again."""
        if self.room_wanted:
            self.room_wanted = False
            self._books.events.room()

    # -- what is left ----------------------------------------------------------------------------------------------

    def beyond_reserve(self) -> bool:
        """Whether the reserve is there without one of the slots that are free, or could be at once."""
        left = self._reserve - self._arena.free_slots - self._loading
        for segment in self.stored if left >= 0 else ():
            if not (segment.slot.leases or segment.slot.pins):
                left -= 1
                if left < 0:
                    break
        return left < 0

    @property
    def scarce(self) -> bool:
        """Whether memory is so short that nothing may stay there alone."""
        spare = self._arena.free_slots + len(self.stored)
        return self.room_wanted or spare * SLOTS_PER_SPARE_SLOT <= self.slot_count

    @property
    def reserve_used(self) -> bool:
        """Whether all that is free is the reserve."""
        return self._arena.free_slots <= self._reserve

    @property
    def available(self) -> bool:
        """Whether a slot is free, or could be."""
        return bool(self._arena.free_slots or self.stored)

    def have_free(self) -> bool:
        """Have a slot free, if that can be; whether there is one."""
        return bool(self._arena.free_slots) or self.evict()

    def evict(self) -> bool:
        """Free the slot that will be missed least. Returns whether there was one."""
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
        """A stored segment is not in memory any more."""
        self.stored.pop(segment, None)
        self._kept.pop(segment, None)
        _leave_memory(segment)

    # -- what was loaded -------------------------------------------------------------------------------------------

    def begin_load(self, domain: str = DEFAULT_DOMAIN) -> Slot:
        """A free slot for a segment of a memory domain that comes back from disk. Raises `ArenaFull`."""
        slot = self._arena.allocate(domain)
        self._loading += 1
        return slot

    def end_load(self, segment: Segment, now_ms: int, *, loaded: bool) -> None:
        """It is there, and is kept for its reader; or its slot is not needed."""
        self._loading -= 1
        if loaded:
            self._kept[segment] = now_ms + WANTED_MS
            self.stored[segment] = None
        else:
            _leave_memory(segment)
            segment.slot.retire()

    @property
    def may_read_ahead(self) -> bool:
        """Whether there is memory for what nobody waits for yet."""
        return len(self._kept) < max(1, self.slot_count // LOADED_SHARE_MAX) and self.beyond_reserve()

    def expire(self, now_ms: int) -> None:
        """Keep nothing for readers who do not come."""
        for segment in [segment for segment, until in self._kept.items() if now_ms >= until]:
            del self._kept[segment]

    def hurry(self, now_ms: int) -> bool:
        """Others wait: keep nothing for readers who have not come at once. Returns whether there was something."""
        late = [segment for segment, until in self._kept.items() if now_ms >= until - WANTED_MS + WANTED_MS_MIN]
        for segment in late:
            del self._kept[segment]
        return bool(late)


def _leave_memory(segment: Segment) -> None:
    resident = segment.entry.resident
    if resident.get(segment.key) is segment:
        del resident[segment.key]
