"""The ids of segment files, and the index's record of the broker, which has them.

An id is given only once, over all launches. A start looks for files from the first id on that the index may not know.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class PhysicalIds:
    """Assigns ids to segment files, each once over all launches, and holds the index's record of the broker."""

    def __init__(self, meta: dict[str, Any]) -> None:
        """`meta`: the index's record of the broker, with the next id to give."""
        self._meta = meta
        self._next: int = meta["next_physical_id"]
        self._unindexed: set[int] = set()
        """Ids of possible files that the index does not know."""

    def take(self) -> int:
        """Return the id of a new file."""
        self._next += 1
        return self._next - 1

    def expect(self, physical_id: int) -> None:
        """Note that a file may exist from now on that the index does not know."""
        self._unindexed.add(physical_id)

    def indexed(self, physical_ids: Iterable[int]) -> None:
        """Note that the index knows these files, or their removal."""
        self._unindexed.difference_update(physical_ids)

    def remember(self, **meta: Any) -> None:
        """Add to the record of the broker; the index gets it with the next job that writes `meta`."""
        self._meta = {**self._meta, **meta}

    @property
    def meta(self) -> dict[str, Any]:
        """The record of the broker for the index."""
        return self.meta_with(())

    def meta_with(self, physical_ids: Iterable[int]) -> dict[str, Any]:
        """Return `meta` as it is once the index knows these files, too."""
        first = min(self._unindexed.difference(physical_ids), default=self._next)
        return dict(self._meta, next_physical_id=self._next, first_unsettled_id=first)
