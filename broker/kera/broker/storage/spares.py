"""Files of segments that were removed, kept to be written over: that costs disks half of a new file, and no removal.

    <root>/spare/000000002b1f.segment      content without meaning; the name is the one that the file had last

A whole segment is written here first, over a spare or to a new file, and then moved to its place, durably. So what is
in the place of a segment is all of that segment, and nothing of the one before it, wherever a crash comes. A full
disk gets its spares back (`clear`), and a start goes on with those that it finds.

Everything here blocks; threads may use it at once. Errors are those of the operating system (``OSError``).
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from kera.broker.storage.disk import Disk
from kera.core.base.settings import MIB

SEGMENT_NAME = re.compile(r"([0-9a-f]{12})\.segment")
"""Files with other names are somebody else's, and stay as they are."""
SPARE_BYTES_MIN = MIB
"""Smaller files are made and removed in no time."""
SPARES_BYTES_MAX = 512 * MIB
"""About the size that a retention removes of one second: it looks as often."""


class Spares:
    """Files of removed segments for reuse. A new segment reaches its place only when it is written whole."""

    def __init__(self, directory: Path, disk: Disk, bytes_min: int = SPARE_BYTES_MIN) -> None:
        self._directory = directory
        self._disk = disk
        self._bytes_min = bytes_min
        self._paths = [directory / name for name in disk.names(directory) if SEGMENT_NAME.fullmatch(name)]

    def write(self, path: Path, data: memoryview) -> None:
        """Make a file of `data`, whole blocks; durable, and at `path` when all of it is there."""
        spare = self._directory / path.name
        if len(data) >= self._bytes_min:
            with contextlib.suppress(IndexError):
                spare = self._paths.pop()
        try:
            self._disk.overwrite(spare, data)
            self._disk.move(spare, path)
        except OSError:
            with contextlib.suppress(OSError):
                self._disk.remove(spare)
            raise

    def remove(self, path: Path) -> None:
        """Remove a file, which may be gone, or keep it as a spare; durable if so."""
        try:
            length = self._disk.length(path)
        except FileNotFoundError:
            return
        if length < self._bytes_min or (len(self._paths) + 1) * length > SPARES_BYTES_MAX:
            self._disk.remove(path)
            return
        spare = self._directory / path.name
        self._disk.move(path, spare)
        self._paths.append(spare)

    def clear(self) -> None:
        """Make room."""
        with contextlib.suppress(IndexError):  # another thread may have taken the last one
            while True:
                self._disk.remove(self._paths.pop())
