"""The slots of memory that one reader of this node holds: a slot that is leased is not used for anything else."""

from __future__ import annotations

from collections import Counter

from kera.broker.log.arena import Arena, Slot
from kera.core.errors import ProtocolError


class ReaderLeases:
    """Belongs to one connection."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._counts: Counter[int] = Counter()
        """By slot; none is 0."""

    def add(self, slot: Slot) -> None:
        """The reader gets another run of chunks in this slot."""
        slot.lease()
        self._counts[slot.index] += 1

    def release(self, index: int) -> None:
        """The reader has let go of one. Raises `ProtocolError` if it had none."""
        left = self._counts[index] - 1
        if left < 0:
            raise ProtocolError(f"slot {index} is not leased to this reader", slot=index)
        if left:
            self._counts[index] = left
        else:
            del self._counts[index]
        self._arena.slot(index).release()

    def release_all(self) -> None:
        """The reader is gone; may be repeated."""
        counts, self._counts = self._counts, Counter()
        for index, count in counts.items():
            self._arena.slot(index).release(count)

    @property
    def too_many(self) -> bool:
        """Whether all readers hold half of the memory, or this one a quarter.

        Of the latter, what is being written to does not count: it is in memory in any case, and many subscriptions that
        follow their entries lease all of it for a moment.
        """
        arena, mine = self._arena, self._counts
        slots = arena.slot_count
        if 2 * arena.leased_slots > slots:
            return True
        return 4 * len(mine) > slots and 4 * sum([not arena.slot(index).open for index in mine]) > slots
