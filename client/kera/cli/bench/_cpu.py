"""Processor time of other processes, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_UTIME, _STIME = 11, 12  # counted from the field after the name, as the name may contain spaces


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the user and system time that the processes have taken so far, in steps of a clock tick."""
    return sum(_of(pid) for pid in pids)


def _of(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_S


def cpu_model() -> str:
    """Return the processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
