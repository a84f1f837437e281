"""The rows to show: brokers, backups, streams and consumer groups, and the line above them. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

from kera.client import LatencyHop
from kera.client.diagnosis.findings import Finding


@dataclass(frozen=True, slots=True)
class BrokerRow:
    """A broker. None: nobody knows, or there is no rate yet."""

    broker_id: int
    state: str
    """``alive``, ``no answer``, ``not asked``, ``lost``, ``stopping``, ``restarting``, ``draining``."""
    why: tuple[str, ...]
    """Its problems, the worst first."""
    records_in_per_s: float | None = None
    bytes_in_per_s: float | None = None
    bytes_out_per_s: float | None = None
    records_in: int | None = None
    """Since its start."""
    bytes_in: int | None = None
    bytes_out: int | None = None
    append_ms: float | None = None
    """99 of 100 requests to write were answered within it."""
    fetch_ms: float | None = None
    loop: float | None = None
    """Part of the time for which its event loop is at work: at 1, everybody waits for it."""
    memory_bytes: int | None = None
    """Used size of the arena."""
    memory_bytes_max: int | None = None
    process_bytes: int | None = None
    """Resident, the pages of the arena that it has touched included."""
    lag_bytes: int | None = None
    """That backups do not have yet."""
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
    """Since when it has not answered; 0: it does."""


@dataclass(frozen=True, slots=True)
class BackupRow:
    """A backup. None: as of brokers."""

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
    """For which readers of epochs wait."""

    broker_id: int
    streamlet: int
    entry: int


@dataclass(frozen=True, slots=True)
class StreamRow:
    """A stream, over all its brokers. None: one of them has not told, or there is no rate yet."""

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
    """Since its brokers have opened it."""
    bytes_in: int | None = None
    bytes_out: int | None = None
    lag_bytes: int | None = None
    lag_ms: int | None = None
    epoch_lag_ms: int | None = None
    """How far the entry that is settled least for its epochs is behind the clock; None as well: it has no epochs."""
    epochs_held_up_ms: int | None = None
    """By how much more than the grace."""
    epoch_entry: EpochEntry | None = None
    """Which one that is."""


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A consumer of a consumer group."""

    member_id: str
    client: str
    groups: int
    """Groups of segments that it reads."""
    silent_ms: int
    busy_ms: int
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class GroupStream:
    """How far a consumer group is behind in a stream."""

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
    """None: it was not looked at yet, or a broker gave no answer."""
    lag_bytes: int | None = None
    behind_ms: int | None = None
    """Age of the oldest record that is not read."""
    lag_per_s: float | None = None
    """By so many records a second the lag grows; negative: it shrinks."""
    bytes_per_s: float | None = None
    """That its consumers have read."""
    looked_ms: int | None = None
    """How old the lag is."""
    consumers: tuple[MemberRow, ...] = ()
    of_streams: tuple[GroupStream, ...] = ()


@dataclass(frozen=True, slots=True)
class ConstraintRow:
    """A latency constraint, as of its last window. None: nothing was measured in it."""

    name: str
    state: str
    """``held``, ``violated``, ``infeasible``, ``broken``; ``unknown``: nothing was measured."""
    why: tuple[str, ...]
    path: tuple[str, ...]
    """Streams, and ``group:`` with the consumer groups between them."""
    limit_ms: float
    statistic: str
    """That the limit is of: ``mean`` or ``p99``."""
    window_ms: int
    violations: int
    """Windows in which it was not held, since the coordinator leads, or it was made."""
    mean_us: int | None = None
    """Sum over all hops that were measured."""
    p99_us: int | None = None
    used: float | None = None
    """Part of the limit: at more than 1 it is not held."""
    least_limit_us: int | None = None
    """For an infeasible constraint: the smallest limit that could be held."""
    worst_hop: LatencyHop | None = None
    """That is furthest beyond its part; while it is held, that takes most."""
    hops: tuple[LatencyHop, ...] | None = None
    """In the order of the path; None: it was not looked at in full."""


@dataclass(frozen=True, slots=True)
class Totals:
    """The line above everything. None: no broker has told."""

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
    """A cluster as it is shown."""

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
    """Notes on missing parts: those that this user may not see, and daemons that do not answer."""
