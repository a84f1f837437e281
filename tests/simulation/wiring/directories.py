"""What a process has on its disk and in its shared memory, when it is killed.

All processes of a simulation are one for the kernel: what a killed one has open or locked stays so. So the directory
of one that is gone is put aside, with all that is open in it, and a copy takes its place for the next launch: it has
what was there at the moment of the death, and whatever the rest of the dead one might still do is of no consequence.
"""

from __future__ import annotations

import os
import shutil
import stat
from itertools import count
from pathlib import Path
from random import Random

KEPT_BYTES = 4096
"""At the beginning of a file, which says what it is: a start refuses it when that is damaged."""
MEMORY = "shm"
"""Where a process has shared memory, in its directory."""


class Directories:
    """Of one simulation; below one directory on shared memory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._aside = count(1)

    def of(self, name: str) -> Path:
        """That of a process."""
        path = self._root / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def renew(self, name: str) -> None:
        """The process is gone, and another one may begin with what it has left."""
        path, aside = self._root / name, self._root / f"{name}.gone-{next(self._aside)}"
        if path.exists():
            path.rename(aside)
            _copy(aside, path)

    def forget_memory(self, name: str) -> None:
        """What a process has in shared memory is gone."""
        shutil.rmtree(self._root / name / MEMORY, ignore_errors=True)

    def flip_bits(self, name: str, count: int, random: Random) -> int:
        """Flip bits in what is written of replicas and segments; returns how many, as there may be none."""
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
