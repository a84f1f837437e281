"""CPUs of a host: lists as the kernel writes them (``0-3,8``), how they are grouped, and running on some of them only.

``/sys/devices/system`` says which CPUs belong together: the threads of a core, and the CPUs of a NUMA node, which are
nearer to one part of the memory than the others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from kera.core.errors import InvalidArgument

SYSTEM = Path("/sys/devices/system")
CPUS_MAX = 1 << 13
"""The maximum for which Linux is built."""
Per = Literal["core", "numa"]

_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?", re.ASCII)


def parse_cpus(text: str) -> frozenset[int]:
    """Return the CPUs of a list like ``0-3,8``. Raises `InvalidArgument`, also if the list is empty."""
    found: set[int] = set()
    for part in text.strip().split(","):
        match = _RANGE.fullmatch(part.strip())
        first = int(match[1]) if match is not None else 0
        last = int(match[2] or first) if match is not None else 0
        if match is None or not first <= last < CPUS_MAX:
            raise InvalidArgument(f"{text!r} is not a list of CPUs; write it as 0-3,8", cpus=text)
        found.update(range(first, last + 1))
    return frozenset(found)


def format_cpus(cpus: Iterable[int]) -> str:
    """Return `cpus` as a list like ``0-3,8``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if first < last else str(first) for first, last in runs)


def allowed_cpus() -> frozenset[int]:
    """Return the CPUs on which this process may run."""
    return frozenset(os.sched_getaffinity(0))


def run_on(cpus: frozenset[int]) -> None:
    """Have the calling thread, and threads that it starts, run only on `cpus`. Raises `InvalidArgument`."""
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"cannot run on CPUs {format_cpus(cpus)}: {getattr(error, 'strerror', None) or error}; this process may run"
            f" on {format_cpus(allowed_cpus())}",
            cpus=format_cpus(cpus),
        ) from error


def grouped(cpus: frozenset[int], per: Per, system: Path = SYSTEM) -> list[frozenset[int]]:
    """Group `cpus` by core or by NUMA node; the groups are in the order of their lowest CPUs.

    If the kernel does not say where some CPUs belong, each of them counts as its own core, and all of them as one node.
    """
    lists = (
        (system / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list" for cpu in sorted(cpus))
        if per == "core"
        else sorted((system / "node").glob("node[0-9]*/cpulist"))
    )
    groups: list[frozenset[int]] = []
    for path in lists:
        group = _read(path) & cpus
        if group and group not in groups:
            groups.append(group)
    left = cpus.difference(*groups)
    groups += [frozenset({cpu}) for cpu in left] if per == "core" else [left] * bool(left)
    return sorted(groups, key=min)


def _read(path: Path) -> frozenset[int]:
    try:
        return parse_cpus(path.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError, InvalidArgument):  # also a node that has memory only: its list is empty
        return frozenset()
