"""The backup's counters. The hot path adds to plain integers; a scrape reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kera.backup.engine import Engine
from kera.core.errors import KeraError
from kera.server.monitoring.sources import Steps


@dataclass(slots=True)
class RequestCounters:
    """Counts since the start."""

    replicate_requests: int = 0
    bytes_read: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Refused requests by the code of the error."""

    def refuse(self, error: KeraError) -> None:
        """Count a request that was answered with an error."""
        self.refused[error.code] += 1


_HELP = {
    "replicate_requests": "Replicate requests",
    "bytes_read": "bytes of chunks returned to recovery",
}
_TOTALS_HELP = {
    "chunks_appended": "chunks verified and copied to replicas in memory",
    "bytes_appended": "bytes of the chunks that were copied, headers included",
    "commits": "group commits of requests that wait for the disk",
    "bytes_committed": "bytes written to disk by group commits",
    "replicas_flushed": "replicas written to disk completely, whose memory was freed",
    "bytes_flushed": "bytes written to disk when nothing could be appended any more",
    "syncs": "times that a disk was asked to make data durable",
    "disk_errors": "writes that failed",
    "replicas_freed": "replicas deleted because their broker has retired them",
}
_FOUND_HELP = {
    "replicas": "replicas found on disk",
    "unclosed": "replicas found open, and read",
    "torn_replicas": "replicas whose last write was never finished",
    "torn_bytes": "bytes cut with them",
    "chunks_damaged": "chunks that do not match their checksums",
    "headers_damaged": "headers that do not match their checksums, whose replicas are lost",
    "frames_superseded": "frames that held nothing, or an older version of a replica",
}


REPLICAS_AT_ONCE = 256
"""Number of replicas that are counted before other work of the loop gets a turn."""


class BackupCollector:
    """Counters and gauges of one backup."""

    def __init__(self, counters: RequestCounters, engine: Engine) -> None:
        self._counters = counters
        self._engine = engine

    def steps(self, *, everything: bool) -> Steps:
        """See `Source`. `everything` adds nothing: there are few disks, and brokers have the metrics of streams."""
        del everything
        families = list(self._totals())
        yield
        families.append((yield from self._replicas()))
        return families

    def _totals(self) -> Iterator[Metric]:
        engine, store = self._engine, self._engine.store
        for name, text in _HELP.items():
            yield CounterMetricFamily(f"kera_backup_{name}", text, value=getattr(self._counters, name))
        refused = CounterMetricFamily(
            "kera_backup_requests_refused", "requests answered with an error, by its code", labels=["reason"]
        )
        for reason, count in sorted(self._counters.refused.copy().items()):
            refused.add_metric([reason], count)
        yield refused
        for name, text in _TOTALS_HELP.items():
            yield CounterMetricFamily(f"kera_backup_{name}", text, value=getattr(store.persistence.totals, name))
        yield GaugeMetricFamily("kera_backup_slots", "replicas that fit into memory", value=store.slots.count)
        yield GaugeMetricFamily("kera_backup_slots_free", "slots of memory that are free", value=store.slots.free)
        yield GaugeMetricFamily(
            "kera_backup_headers_bytes",
            "headers in memory of chunks that are on disk only",
            value=store.headers.bytes_kept,
        )
        yield from self._disks()
        for name, text in _FOUND_HELP.items():
            yield GaugeMetricFamily(f"kera_backup_start_{name}", text, value=getattr(engine.found, name))
        yield CounterMetricFamily(
            "kera_backup_chunks_damaged",
            "chunks that do not match their checksums, found by readers",
            value=engine.reader.chunks_damaged,
        )

    def _replicas(self) -> Generator[None, None, Metric]:
        states = GaugeMetricFamily("kera_backup_replicas", "replicas, by state and place", labels=["state", "place"])
        counts: Counter[tuple[str, str]] = Counter()
        for number, replica in enumerate(list(self._engine.store.replicas)):
            if number % REPLICAS_AT_ONCE == 0:
                yield
            state = "closed" if replica.closed else "sealed" if replica.sealed else "open"
            counts[state, "disk" if replica.slot is None else "memory"] += 1
        for state in ("open", "sealed", "closed"):
            for place in ("memory", "disk"):
                states.add_metric([state, place], counts[state, place])
        return states

    def _disks(self) -> Iterator[Metric]:
        gauges = {
            "used_bytes": "bytes that replicas take on a disk, open ones whole",
            "free_bytes": "bytes that replicas may still take",
            "failing": "1 while the disk takes no data",
        }
        for name, text in gauges.items():
            family = GaugeMetricFamily(f"kera_backup_disk_{name}", text, labels=["path"])
            for disk in self._engine.store.persistence.disks:
                values = {
                    "used_bytes": disk.used_bytes,
                    "free_bytes": disk.room_bytes,
                    "failing": int(disk.error is not None),
                }
                family.add_metric([disk.name], values[name])
            yield family
