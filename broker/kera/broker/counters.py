"""The broker's counts on its hot path: plain integers, which ``kera.broker.metrics`` reads on demand."""

from __future__ import annotations

from dataclasses import dataclass, field

from kera.server.monitoring.histogram import LatencyHistogram
from kera.v1 import push_pb2


@dataclass(slots=True)
class Counters:
    """Counts since the start."""

    write_requests: int = 0
    chunks_appended: int = 0
    records_appended: int = 0
    bytes_appended: int = 0
    chunks_duplicate: int = 0
    chunks_refused: int = 0
    promises: int = 0
    punctuations: int = 0
    read_requests: int = 0
    bytes_read: int = 0
    not_owner: int = 0
    writes_without_lease: int = 0


@dataclass(slots=True)
class Latencies:
    """How long requests took, from the start of their handling to their answers."""

    appends: LatencyHistogram = field(default_factory=LatencyHistogram)
    """Write requests that were answered at once."""
    appends_waited: LatencyHistogram = field(default_factory=LatencyHistogram)
    reads: LatencyHistogram = field(default_factory=LatencyHistogram)
    reads_waited: LatencyHistogram = field(default_factory=LatencyHistogram)


@dataclass(slots=True)
class PushTotals:
    """Counts of pushes to readers on this node since the start, and the present numbers of readers and ranges."""

    connections: int = 0
    subscriptions: int = 0
    runs: int = 0
    bytes: int = 0
    refused: int = 0
    ends: dict[str, int] = field(
        default_factory=lambda: {name.lower(): 0 for name, reason in push_pb2.PushEnd.Reason.items() if reason}
    )
    """Ended subscriptions, by reason."""
