"""Collects metrics: those of the daemon in its loop, in slices, and those of the process, which need no loop."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from kera.core.base.build import this_build

T = TypeVar("T")

SAMPLES_AT_ONCE = 100
"""Samples rendered in one go, which takes some 0.3 ms."""
PAUSE_S = 0.0002
_HEADING = re.compile(rb"^# .*\n", re.MULTILINE)

Steps = Generator[None, None, list[Metric]]
"""Yields wherever it may be interrupted; see ``kera.core.base.turns``."""


class Source(Protocol):
    """Metrics of a daemon."""

    def steps(self, *, everything: bool) -> Steps:
        """Collect totals, in the daemon's loop; with `everything`, also metrics of each stream and the like."""
        ...


class Registered:
    """A registry as a source, whose families are collected one by one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def steps(self, *, everything: bool) -> Steps:
        """See `Source`."""
        del everything
        families = []
        for family in self._registry.collect():
            families.append(family)
            yield
        return families


class Fixed:
    """Collected metrics, in the form that Prometheus' renderer expects."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        yield from self._families


def rendered(families: Iterable[Metric]) -> bytes:
    """Return metrics as text for Prometheus.

    Call it on a separate thread. It releases the interpreter every few samples: otherwise each turn of other threads
    would wait for Python's switch interval, 5 ms.
    """
    parts = []
    for family in families:
        for start in range(0, max(1, len(family.samples)), SAMPLES_AT_ONCE):
            part = copy.copy(family)
            part.samples = family.samples[start : start + SAMPLES_AT_ONCE]
            text = generate_latest(Fixed([part]))
            parts.append(text if not start else _HEADING.sub(b"", text))
            if len(family.samples) > SAMPLES_AT_ONCE:
                time.sleep(PAUSE_S)
    return b"".join(parts)


class FileSystemRoom(NamedTuple):
    """The room of a directory's file system."""

    path: str
    size_bytes: int
    free_bytes: int


def room_of(directories: Iterable[Path]) -> list[FileSystemRoom]:
    """Return the room of all directories that can be read. May hang, if a file system does."""
    rooms = []
    for path in directories:
        with contextlib.suppress(OSError):  # it does not exist yet, or is gone; readiness and the log report that
            found = os.statvfs(path)
            rooms.append(FileSystemRoom(str(path), found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize))
    return rooms


class Aside:
    """Runs functions that may hang on a thread, one at a time, so that a hanging one takes a single thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None

    async def run(self, function: Callable[[], Iterable[T]], timeout_s: float) -> list[T]:
        """Return the results of `function`; none if they are late, or if the last call still hangs."""
        if self._thread is not None and self._thread.is_alive():
            return []
        loop = asyncio.get_running_loop()
        found: list[T] = []
        done = asyncio.Event()

        def look() -> None:
            result = list(function())
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(tell, result)

        def tell(result: list[T]) -> None:
            found.extend(result)
            done.set()

        self._thread = threading.Thread(target=look, name=self._name, daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(timeout_s):
                await done.wait()
        except TimeoutError:
            return []
        return found


class OfProcess(Collector):
    """Metrics of the build, the process and file systems; from any thread, possibly slow, as a file system may hang."""

    def __init__(self, directories: Sequence[Path]) -> None:
        """`directories`: directories to which the daemon writes."""
        self._directories = directories
        self._process = ProcessCollector(registry=CollectorRegistry())

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        build = this_build()
        labels = {"version": build.version, "commit": build.commit, "python": build.python}
        # A gauge that is 1, and not an Info metric, whose name would get a suffix: people look for this name.
        info = GaugeMetricFamily("kera_build_info", "1: which program this is.", labels=[*labels, "native"])
        info.add_metric([*labels.values(), str(build.native).lower()], 1)
        yield info
        yield GaugeMetricFamily(
            "kera_native", "1: the native core runs; 0: all is done in Python.", value=int(build.native)
        )
        yield from self.process()
        yield from self._disks()

    def process(self) -> Iterable[Metric]:
        """Return processor time, memory and files of this process; from any thread, and quick."""
        return self._process.collect()

    def _disks(self) -> Iterator[Metric]:
        free = GaugeMetricFamily(
            "kera_filesystem_free_bytes", "free bytes of the file system of a directory", labels=["path"]
        )
        size = GaugeMetricFamily("kera_filesystem_size_bytes", "size of that file system", labels=["path"])
        for room in room_of(self._directories):
            free.add_metric([room.path], room.free_bytes)
            size.add_metric([room.path], room.size_bytes)
        yield from (free, size)
