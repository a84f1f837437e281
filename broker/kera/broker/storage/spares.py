"""Files of removed segments, kept to be overwritten: that costs a disk half as much as a new file, and no removal.

    <root>/spare/000000002b1f.segment      content without meaning; the name is the last one that the file had

A whole segment is written here first, over a spare or to a new file, and then moved to its place durably. So the file
in a segment's place always has all of that segment, and no remains of another one, even after a crash. When the disk is
full, the spares are removed (`clear`). A start continues with the spares that it finds.

Everything here blocks; several threads may use it at once. Errors are those of the operating system (``OSError``).
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from kera.broker.storage.disk import Disk
from kera.core.base.settings import MIB

SEGMENT_NAME = re.compile(r"([0-9a-f]{12})\.segment")
"""Files with other names are not the broker's, and are left alone."""
SPARE_BYTES_MIN = MIB
"""Smaller files are not kept: they are quick to create and remove."""
SPARES_BYTES_MAX = 512 * MIB
"""Maximum size of all spares: about the data of one second, which is how often retention removes."""


class Spares:
    """Files of removed segments for reuse. A new segment reaches its place only when it is written completely."""

    def __init__(self, directory: Path, disk: Disk, bytes_min: int = SPARE_BYTES_MIN) -> None:
        self._directory = directory
        self._disk = disk
        self._bytes_min = bytes_min
        self._paths = [directory / name for name in disk.names(directory) if SEGMENT_NAME.fullmatch(name)]

    def write(self, path: Path, data: memoryview) -> None:
        """Write a file with `data`, whole blocks, durably; it gets the name `path` when it is complete."""
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
        """Remove a file, if it exists, or keep it as a spare; keeping it is durable."""
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
        """Remove all spares, to make room."""
        with contextlib.suppress(IndexError):  # another thread may have taken the last one
            while True:
                self._disk.remove(self._paths.pop())
