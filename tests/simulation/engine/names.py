"""Names that are not durable yet: created, renamed and removed files, in the order of a journal."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import NamedTuple


class _Change(NamedTuple):
    directory: Path
    undo: Callable[[], None]
    kept: Path | None
    """Another name of a file that has lost its name, until the loss is durable."""


class Names:
    """See the head of this module."""

    def __init__(self, root: Path) -> None:
        """`root`: the folder of files that may come back."""
        self._root = root
        self._numbers = count(1)
        self._changes: list[_Change] = []

    def keep(self, path: Path) -> Path | None:
        """Give another name to a file that is about to lose its own; None: the file is missing."""
        kept = self._root / f"{next(self._numbers)}"
        self._root.mkdir(exist_ok=True)
        try:
            os.link(path, kept)
        except FileNotFoundError:
            return None
        return kept

    def changed(self, path: Path, undo: Callable[[], None], kept: Path | None = None) -> None:
        """A name was added or removed."""
        self._changes.append(_Change(path.parent, undo, kept))

    def synced(self, directory: Path) -> None:
        """The names in a directory are durable, with all changes before the last one there."""
        found = [number for number, change in enumerate(self._changes) if change.directory == directory]
        if found:
            _forget(self._changes[: found[-1] + 1])
            del self._changes[: found[-1] + 1]

    def lost(self, random: Random) -> int:
        """Power is lost: undo some of the last changes; return their number."""
        kept = random.randint(0, len(self._changes))
        undone = self._changes[kept:]
        for change in reversed(undone):
            change.undo()
        _forget(self._changes[:kept])
        self._changes.clear()
        return len(undone)


def _forget(changes: list[_Change]) -> None:
    for change in changes:
        if change.kept is not None:
            with suppress(FileNotFoundError):
                change.kept.unlink()
