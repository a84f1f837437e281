"""KerA as contestants: ``kera`` keeps its log on disk, as deployed; ``kera-memory`` keeps it in the broker's memory.

Both run one broker, a coordinator, and as many backups as there are replicas, with default settings except for memory
sizes. For ``kera-memory``, flushes are put off, and streams have a retention, which removes segments before they are
due.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.common import IN_MEMORY
from bench.compare.contestant import Command, Failed, Role
from bench.compare.workload import Workload
from kera.client import Client
from kera.core.base.settings import GIB, MIB
from kera.core.errors import KeraError
from kera.local.cluster import LocalCluster, RunningCluster

SEGMENT_BYTES = 8 * MIB
MEMORY_BYTES = 2 * GIB
"""Memory of a broker and of a backup, as a workload at full speed needs it: as much as the page cache gives to
others by itself.
"""
MEMORY_AT_RATE_BYTES = GIB // 2
RETAINED_PART = 6
"""In memory alone, what streams keep is so small a part of it: between two looks of retention there is up to a second's
more, and with a quarter left the broker begins to write."""
OVERHEAD = 1.5
"""Ratio of chunks to values in memory, for a backlog."""


class Kera:
    """With the log on disk. A workload's table ``[settings.kera]`` has arguments of `LocalCluster`; those of
    ``admin.create_stream`` are in ``stream`` below it, of ``client.producer`` in ``producer``, of ``client.consumer``
    in ``consumer``.
    """

    name = "kera"
    on_disk = True

    @property
    def title(self) -> str:
        """As in tables."""
        return "KerA"

    def missing(self) -> str | None:
        """Nothing is missing in an environment of this tree."""
        return None

    def versions(self) -> dict[str, str]:
        """Versions of the project, and of the libraries that do most of its work."""
        return {name: version(name) for name in ("kera", "pyarrow", "uvloop", "crc32c")}

    def supports(self, workload: Workload) -> str | None:
        """All workloads, except persisted ones without a disk."""
        if workload.durability == "persisted" and not self.on_disk:
            return "without a disk nothing is persisted"
        return None

    def durability(self, workload: Workload) -> str:
        """The durability in words."""
        where = "segments go to disk in the background"
        if workload.durability == "persisted":
            where = "group commit: what is acknowledged is on disk"
        elif not self.on_disk:
            where = "segments and replicas stay in memory (flush_delay_ms), where the oldest go"
        copies = f", replicas on {workload.replicas} backup(s)" if workload.replicas else ""
        return f"level {workload.durability}{copies}; {where}"

    @contextlib.contextmanager
    def start(self, workload: Workload, folder: Path) -> Iterator[_Running]:
        """A cluster of processes on this machine."""
        settings = dict(workload.settings.get("kera", {}))
        of_streams, of_producers, of_consumers = (settings.pop(key, {}) for key in ("stream", "producer", "consumer"))
        arguments: dict[str, Any] = {
            "backups": workload.replicas,
            "arena_bytes": memory_bytes(workload),
            "backup_memory_bytes": memory_bytes(workload),
            "segment_bytes": SEGMENT_BYTES,
            "data_dir": folder / "data" if self.on_disk else None,
        }
        if not self.on_disk:
            kept = max(MEMORY_BYTES // 2, int(workload.backlog_bytes * OVERHEAD))
            of_streams = {"retention_bytes": max(kept // workload.partitions, 2 * SEGMENT_BYTES), **of_streams}
            arguments["arena_bytes"] = max(RETAINED_PART * kept, memory_bytes(workload))
            arguments["backup_memory_bytes"] = arguments["arena_bytes"]
            arguments["broker_settings"] = arguments["backup_settings"] = IN_MEMORY
        try:
            with LocalCluster.running(**arguments | settings) as cluster:
                yield _Running(workload, cluster, of_streams, of_producers, of_consumers)
        except KeraError as error:
            raise Failed(error.message) from error


class KeraMemory(Kera):
    """In memory only: retention removes segments before they are flushed to disk."""

    name = "kera-memory"
    on_disk = False

    @property
    def title(self) -> str:
        """As in tables."""
        return "KerA, in memory"


class _Running:
    """See `bench.compare.contestant.Running`."""

    def __init__(
        self,
        workload: Workload,
        cluster: RunningCluster,
        of_streams: dict[str, Any],
        of_producers: dict[str, Any],
        of_consumers: dict[str, Any],
    ) -> None:
        self._workload = workload
        self._cluster = cluster
        self._of_streams = of_streams
        self._settings = {"producer": of_producers, "consumer": of_consumers}
        self._streams: list[str] = []

    def processes(self) -> dict[str, int]:
        """Broker, coordinator and backups."""
        return self._cluster.processes

    def prepare(self, number: int) -> None:
        """Create new streams in place of the old ones."""
        made = [f"round-{number}-{each}" for each in range(self._workload.streams)]
        try:
            asyncio.run(self._replace(made))
        except KeraError as error:
            raise Failed(error.message) from error
        self._streams = made

    async def _replace(self, made: list[str]) -> None:
        async with await Client.connect(self._cluster.bootstrap) as client:
            for name in self._streams:
                await client.admin.delete_stream(name)
            for name in made:
                await client.admin.create_stream(
                    name,
                    streamlets=self._workload.streamlets,
                    replication=self._workload.replicas,
                    durability=self._workload.durability,
                    **self._of_streams,
                )

    def worker(self, role: Role, index: int) -> Command:  # noqa: ARG002 - all have the same
        """A process of `bench.compare.kera_worker`."""
        settings = {"bootstrap": self._cluster.bootstrap, "streams": self._streams, **self._settings}
        return Command([sys.executable, "-m", "bench.compare.kera_worker"], settings)


def memory_bytes(workload: Workload) -> int:
    """Memory of a broker or a backup: a backlog fits, and so do two open segments of each partition."""
    least = MEMORY_AT_RATE_BYTES if workload.rate else MEMORY_BYTES
    wanted = int(workload.backlog_bytes * OVERHEAD) + workload.partitions * 2 * SEGMENT_BYTES
    return -(-max(least, wanted) // SEGMENT_BYTES) * SEGMENT_BYTES
