"""The files and the shared memory of a process, which outlive its kill.

All processes of a simulation are a single one for the kernel: files that a killed process has open or locked stay so.
So its directory is moved aside, and the next launch gets a copy with the state at the moment of the kill. Later
actions of the killed process then have no effect.
"""

from __future__ import annotations

import os
import shutil
import stat
from itertools import count
from pathlib import Path
from random import Random

KEPT_BYTES = 4096
"""The size of a file's header, which must stay intact: a start refuses a file with a damaged header."""
MEMORY = "shm"
"""The folder for shared memory in a process's directory."""


class Directories:
    """The directories of a simulation, below one directory in shared memory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._aside = count(1)

    def of(self, name: str) -> Path:
        """The directory of a process."""
        path = self._root / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def renew(self, name: str) -> None:
        """The process is gone; give its next launch a copy of the directory."""
        path, aside = self._root / name, self._root / f"{name}.gone-{next(self._aside)}"
        if path.exists():
            path.rename(aside)
            _copy(aside, path)

    def forget_memory(self, name: str) -> None:
        """Delete a process's shared memory."""
        shutil.rmtree(self._root / name / MEMORY, ignore_errors=True)

    def flip_bits(self, name: str, count: int, random: Random) -> int:
        """Flip bits in files of replicas and segments; return their number, which may be 0."""
        data = self._root / name / "data"
        flipped = 0
        for path in sorted([*data.rglob("*.log"), *data.rglob("*.segment")]):
            content = path.read_bytes()
            places = [at for at in range(KEPT_BYTES, len(content)) if content[at]]
            for at in random.sample(places, min(count, len(places))):
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(bytes([content[at] ^ 1 << random.randrange(8)]))
                flipped += 1
        return flipped


def _copy(source: Path, target: Path) -> None:
    target.mkdir()
    for entry in sorted(os.scandir(source), key=lambda each: each.name):
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            _copy(Path(entry.path), target / entry.name)
        elif stat.S_ISREG(mode):
            shutil.copy2(entry.path, target / entry.name)
