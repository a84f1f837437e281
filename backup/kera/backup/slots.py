"""The memory of a backup: a fixed number of slots in one piece, each for one replica. It never grows."""

from __future__ import annotations

import heapq
import mmap

from kera.server.populating import populate


class Slots:
    """`count` slots of `slot_bytes` (whole blocks, so each is aligned as writing around the page cache asks for)."""

    def __init__(self, count: int, slot_bytes: int) -> None:
        """Takes the memory at once: later it might not be there."""
        self.count = count
        self.slot_bytes = slot_bytes
        self._memory = mmap.mmap(-1, count * slot_bytes)
        populate(self._memory)
        self._free = list(range(count))

    @property
    def free(self) -> int:
        """How many are free."""
        return len(self._free)

    def take(self) -> int:
        """A free slot, of which there must be one. The lowest: memory in use is hot in the caches."""
        return heapq.heappop(self._free)

    def release(self, slot: int) -> None:
        """A slot is free again; nobody may look at it any more."""
        heapq.heappush(self._free, slot)

    def view(self, slot: int) -> memoryview:
        """All of a slot."""
        start = slot * self.slot_bytes
        return memoryview(self._memory)[start : start + self.slot_bytes]
