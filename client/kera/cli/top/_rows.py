"""The rows to show, of brokers, backups, streams and consumer groups, and the totals above them. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

from kera.client import LatencyHop
from kera.client.diagnosis.findings import Finding


@dataclass(frozen=True, slots=True)
class BrokerRow:
    """A broker. None: unknown, or no rate yet."""

    broker_id: int
    state: str
    """``alive``, ``no answer``, ``not asked``, ``lost``, ``stopping``, ``restarting``, ``draining``."""
    why: tuple[str, ...]
    """The broker's problems, the worst first."""
    records_in_per_s: float | None = None
    bytes_in_per_s: float | None = None
    bytes_out_per_s: float | None = None
    records_in: int | None = None
    """Records since the start of the broker."""
    bytes_in: int | None = None
    bytes_out: int | None = None
    append_ms: float | None = None
    """The time within which 99 of 100 requests to write were answered."""
    fetch_ms: float | None = None
    loop: float | None = None
    """Part of the time for which the event loop works: near 1, all clients wait for it."""
    memory_bytes: int | None = None
    """Used size of the arena."""
    memory_bytes_max: int | None = None
    process_bytes: int | None = None
    """Resident memory, including the touched pages of the arena."""
    lag_bytes: int | None = None
    """Bytes that backups do not have yet."""
    lag_ms: int | None = None
    backups_up: int | None = None
    repairs: int | None = None
    """Closed virtual segments with too few replicas."""
    streamlets: int | None = None
    streams: int | None = None
    address: str = ""
    node: str = ""
    version: str = ""
    since_us: int = 0
    """Time since when the broker has not answered; 0: it answers."""


@dataclass(frozen=True, slots=True)
class BackupRow:
    """A backup. None: unknown, or no rate yet."""

    backup_id: int
    state: str
    why: tuple[str, ...]
    bytes_in_per_s: float | None = None
    bytes_in: int | None = None
    loop: float | None = None
    memory_bytes: int | None = None
    memory_bytes_max: int | None = None
    disk_bytes: int | None = None
    disk_bytes_max: int | None = None
    replicas: int | None = None
    address: str = ""
    node: str = ""
    version: str = ""
    since_us: int = 0


@dataclass(frozen=True, slots=True)
class StreamPart:
    """The part of a stream at one broker."""

    broker_id: int
    streamlets: int
    records_in_per_s: float | None
    bytes_in_per_s: float | None
    bytes_out_per_s: float | None
    lag_bytes: int | None


@dataclass(frozen=True, slots=True)
class EpochEntry:
    """The entry that readers of epochs wait for."""

    broker_id: int
    streamlet: int
    entry: int


@dataclass(frozen=True, slots=True)
class StreamRow:
    """A stream, with sums over its brokers that have answered. None: no broker has answered, or no rate yet."""

    stream_id: int
    name: str
    state: str
    """``ok``, ``lag``, ``held up``, ``no owner``."""
    why: tuple[str, ...]
    streamlets: int
    replication: int
    durability: str
    parts: tuple[StreamPart, ...]
    records_in_per_s: float | None = None
    bytes_in_per_s: float | None = None
    bytes_out_per_s: float | None = None
    records_in: int | None = None
    """Records since its brokers have opened it."""
    bytes_in: int | None = None
    bytes_out: int | None = None
    lag_bytes: int | None = None
    lag_ms: int | None = None
    epoch_lag_ms: int | None = None
    """How far the least settled entry is behind the clock; None also for a stream without epochs."""
    epochs_held_up_ms: int | None = None
    """How much that lag exceeds the grace period."""
    epoch_entry: EpochEntry | None = None
    """The least settled entry."""


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A consumer of a consumer group."""

    member_id: str
    client: str
    groups: int
    """Number of groups of segments that it reads."""
    silent_ms: int
    busy_ms: int
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class GroupStream:
    """The lag of a consumer group in a stream."""

    stream: str
    streamlets: int
    lag_records: int | None
    lag_bytes: int | None
    behind_ms: int | None


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A consumer group, or the named cursor of a Spark query."""

    name: str
    kind: str
    """``consumers``; ``spark``: the cursor of a query that gave it this name; ``cursor``: of a query or a program."""
    state: str
    """``ok``, ``behind``, ``stuck``, ``idle``, ``unknown``."""
    why: tuple[str, ...]
    streams: tuple[str, ...]
    members: int
    idle_ms: int
    lag_records: int | None = None
    """None: it was not measured yet, or a broker gave no answer."""
    lag_bytes: int | None = None
    behind_ms: int | None = None
    """Age of the oldest record that was not read."""
    lag_per_s: float | None = None
    """Growth of the lag, in records per second; negative: it shrinks."""
    bytes_per_s: float | None = None
    """Bytes per second that its consumers read."""
    looked_ms: int | None = None
    """Age of the lag's measurement."""
    consumers: tuple[MemberRow, ...] = ()
    of_streams: tuple[GroupStream, ...] = ()


@dataclass(frozen=True, slots=True)
class ConstraintRow:
    """A latency constraint, as of its last window. None: nothing was measured in the window."""

    name: str
    state: str
    """``held``, ``violated``, ``infeasible``, ``broken``; ``unknown``: nothing was measured."""
    why: tuple[str, ...]
    path: tuple[str, ...]
    """Streams, and ``group:`` with the consumer groups between them."""
    limit_ms: float
    statistic: str
    """The statistic that the limit applies to: ``mean`` or ``p99``."""
    window_ms: int
    violations: int
    """Windows that violated it, since it was made or the coordinator began to lead."""
    mean_us: int | None = None
    """Sum over all hops that were measured."""
    p99_us: int | None = None
    used: float | None = None
    """The latency as a part of the limit: above 1, the constraint is violated."""
    least_limit_us: int | None = None
    """For an infeasible constraint: the smallest limit that could be met."""
    worst_hop: LatencyHop | None = None
    """The hop that exceeds its part most; while the constraint is met, the hop that takes most time."""
    hops: tuple[LatencyHop, ...] | None = None
    """All hops, in the order of the path; None: the constraint was not asked for in full."""


@dataclass(frozen=True, slots=True)
class Totals:
    """The totals above all views. None: no broker has answered."""

    records_in_per_s: float | None
    bytes_in_per_s: float | None
    bytes_out_per_s: float | None
    records_in: int | None
    bytes_in: int | None
    bytes_out: int | None
    replication_lag_bytes: int | None
    group_lag_records: int | None
    brokers: int
    brokers_alive: int
    backups: int
    backups_alive: int
    streams: int
    groups: int
    constraints: int
    constraints_not_held: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is shown of a cluster."""

    at_us: int
    cluster_id: str
    health: str
    """``healthy``, ``degraded``, ``broken``, ``unknown``."""
    totals: Totals
    brokers: tuple[BrokerRow, ...]
    backups: tuple[BackupRow, ...]
    streams: tuple[StreamRow, ...]
    groups: tuple[GroupRow, ...]
    constraints: tuple[ConstraintRow, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    """Notes on missing parts, as this user may not see them, or they could not be asked for."""
