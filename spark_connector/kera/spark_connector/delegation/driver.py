"""Finds the driver, from a process that Spark has started on the same host.

Spark runs Python in children of the driver's JVM, or in grandchildren, which ``pyspark.daemon`` forks.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from kera.core.errors import Unavailable

PROC = Path("/proc")
_SPARKS = "pyspark."
"""Prefix of the modules that Spark's Python processes run."""


class Driver(NamedTuple):
    """A process, with its start time to distinguish it from later processes with the same id."""

    process_id: int
    started: str
    """The start time, in the kernel's ticks."""

    @property
    def keeper_address(self) -> str:
        """The socket address of the process that keeps the driver's tokens: abstract, so that it leaves no file."""
        return f"\0kera-spark-tokens/{os.geteuid()}/{self.process_id}/{self.started}"

    def lives(self, proc: Path = PROC) -> bool:
        """Return whether the driver still runs."""
        return _started(self.process_id, proc) == self.started


def driver_of(process_id: int, proc: Path = PROC) -> Driver:
    """Return the driver whose child or grandchild is `process_id`. Raises `Unavailable` if it has ended."""
    parent = _parent(process_id, proc)
    while _is_sparks_python(parent, proc):
        parent = _parent(parent, proc)
    started = _started(parent, proc)
    if not started:
        raise Unavailable("the driver of this Spark application has ended")
    return Driver(parent, started)


def _is_sparks_python(process_id: int, proc: Path) -> bool:
    """Return whether a process runs as ``python -m pyspark.…``."""
    try:
        words = (proc / str(process_id) / "cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return False
    return any(flag == "-m" and module.startswith(_SPARKS) for flag, module in pairwise(words))


def _parent(process_id: int, proc: Path) -> int:
    fields = _stat(process_id, proc)
    return int(fields[1]) if fields else 0


def _started(process_id: int, proc: Path) -> str:
    """Return the start time of a process; empty: it no longer runs."""
    fields = _stat(process_id, proc)
    return "" if not fields or fields[0] in {"Z", "X"} else fields[19]


def _stat(process_id: int, proc: Path) -> list[str]:
    """Return the fields after the command: state, parent, … (see proc(5)). The command may contain any characters."""
    try:
        text = (proc / str(process_id) / "stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
