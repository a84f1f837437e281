"""Processor time of other processes, more precise than the kernel's clock ticks where that matters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from kera.cli.bench._cpu import cpu_seconds


def run_s(pid: int) -> float:
    """The processor time of all current threads of a process, in nanoseconds.

    Threads that have ended are not included: use it for processes whose threads stay, such as daemons.
    """
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def each_s(processes: Mapping[str, int]) -> dict[str, float]:
    """Processor time so far of processes by name, in clock ticks."""
    return {name: cpu_seconds([pid]) for name, pid in processes.items()}


def tree_s(pids: Iterable[int]) -> float:
    """The same for processes, their descendants, and ended children that were waited for; in clock ticks."""
    total_s = 0.0
    for pid in pids:
        process = psutil.Process(pid)
        for each in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                total_s += times.user + times.system + times.children_user + times.children_system
    return total_s
