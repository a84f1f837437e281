"""The ids of segment files, and what the index remembers of the broker along with them.

An id is given once, over all launches. A start looks for files from the first one on that the index may not know.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class PhysicalIds:
    """Assigns ids to segment files, each once over all launches, and holds the index's record of the broker."""

    def __init__(self, meta: dict[str, Any]) -> None:
        """`meta`: what the index remembers, with the next id to give."""
        self._meta = meta
        self._next: int = meta["next_physical_id"]
        self._unindexed: set[int] = set()
        """Ids of possible files that the index does not know."""

    def take(self) -> int:
        """The id of a new file."""
        self._next += 1
        return self._next - 1

    def expect(self, physical_id: int) -> None:
        """There may be a file from now on that the index does not know."""
        self._unindexed.add(physical_id)

    def indexed(self, physical_ids: Iterable[int]) -> None:
        """The index knows what became of these files."""
        self._unindexed.difference_update(physical_ids)

    def remember(self, **meta: Any) -> None:
        """Have the index remember something of the broker, from the next change of `meta` on."""
        self._meta = {**self._meta, **meta}

    @property
    def meta(self) -> dict[str, Any]:
        """The broker's notes about itself for the index."""
        return self.meta_with(())

    def meta_with(self, physical_ids: Iterable[int]) -> dict[str, Any]:
        """The same once the index knows these files, too."""
        first = min(self._unindexed.difference(physical_ids), default=self._next)
        return dict(self._meta, next_physical_id=self._next, first_unsettled_id=first)
