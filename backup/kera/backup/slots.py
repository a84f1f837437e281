"""The memory of a backup: a fixed number of slots in one piece, each for one replica. It never grows."""

from __future__ import annotations

import heapq
import mmap

from kera.server.populating import populate


class Slots:
    """`count` slots of `slot_bytes` (whole blocks, so each is aligned as writing around the page cache requires)."""

    def __init__(self, count: int, slot_bytes: int) -> None:
        """Allocate the memory at once, as it might not be available later."""
        self.count = count
        self.slot_bytes = slot_bytes
        self._memory = mmap.mmap(-1, count * slot_bytes)
        populate(self._memory)
        self._free = list(range(count))

    @property
    def free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def take(self) -> int:
        """Take the lowest free slot, so that memory in use stays in the caches. At least one slot must be free."""
        return heapq.heappop(self._free)

    def release(self, slot: int) -> None:
        """Free a slot, whose memory must not be used any more."""
        heapq.heappush(self._free, slot)

    def view(self, slot: int) -> memoryview:
        """Return the memory of a slot."""
        start = slot * self.slot_bytes
        return memoryview(self._memory)[start : start + self.slot_bytes]
