"""Directories in shared memory, each with its process in its name: what a killed one has left is removed later."""

import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def make_directory(kind: str, parent: Path = SHARED_MEMORY) -> Path:
    """A new directory ``kera-<kind>-<process>-…``; those of the kind that no process has any more go first."""
    _clear(kind, parent)
    return Path(tempfile.mkdtemp(prefix=f"kera-{kind}-{os.getpid()}-", dir=parent))


@cache
def _clear(kind: str, parent: Path) -> None:
    prefix = f"kera-{kind}-"
    for path in parent.glob(f"{prefix}*-*"):
        process = path.name.removeprefix(prefix).partition("-")[0]
        if process.isdecimal() and not Path("/proc", process).exists():
            shutil.rmtree(path, ignore_errors=True)
