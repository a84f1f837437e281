"""The coordinator's metrics: an adapter from its hooks to Prometheus."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kera.coordinator.consumer_groups.lags import GroupLags
from kera.coordinator.consumer_groups.registry import ConsumerGroupRegistry
from kera.coordinator.coordinator import Coordinator
from kera.coordinator.latency.planning import Planning
from kera.coordinator.operations.stored import StoredBytes
from kera.coordinator.recovery.decide import word
from kera.core.latency.hop import Hop
from kera.server.monitoring.access import PRINCIPALS_MAX
from kera.server.monitoring.sources import Steps
from kera.v1 import common_pb2, coordinator_pb2

CONSUMER_GROUPS_MAX = 1000
"""Maximum number of consumer groups that have series: the first ones by name. All groups are counted."""

HOPS_MAX = 5_000
"""Maximum number of hops of latency constraints that have series: the hops of the first constraints by name."""

PHASES = [word(phase) for phase in coordinator_pb2.RecoveryPhase.values() if phase]


class CoordinatorMetrics:
    """Made once per registry; `observe` is the hook of the service.

    For a coordinator that does not lead, everything but its own requests is 0.
    """

    def __init__(self, registry: CollectorRegistry, *, consumer_groups_max: int = CONSUMER_GROUPS_MAX) -> None:
        self._leading: Coordinator | None = None
        self._consumer_groups_max = consumer_groups_max
        registry.register(_OfRecoveries(lambda: self._leading))

        def of_leader(look: Callable[[Coordinator], float]) -> Callable[[], float]:
            return lambda: 0.0 if self._leading is None else look(self._leading)

        self._requests = Counter(
            "kera_coordinator_requests",
            "Requests answered, by method and outcome: ok, the code of the error, or cancelled by the caller.",
            ("method", "outcome"),
            registry=registry,
        )
        brokers = Gauge("kera_coordinator_brokers_alive", "Brokers whose heartbeats arrive.", registry=registry)
        brokers.set_function(of_leader(lambda leader: len(leader.state.brokers.live_ids())))
        backups = Gauge("kera_coordinator_backups_alive", "Backups whose heartbeats arrive.", registry=registry)
        backups.set_function(of_leader(lambda leader: len(leader.state.backups.live_ids())))
        lost = "that neither live nor restart, and have not been forgotten."
        brokers_lost = Gauge("kera_coordinator_brokers_lost", f"Brokers {lost}", registry=registry)
        brokers_lost.set_function(of_leader(lambda leader: _lost(leader.state.brokers.describe_all())))
        backups_lost = Gauge("kera_coordinator_backups_lost", f"Backups {lost}", registry=registry)
        backups_lost.set_function(of_leader(lambda leader: _lost(leader.state.backups.describe_all())))
        restarting = Gauge(
            "kera_coordinator_members_restarting",
            "Brokers and backups that stop, or have stopped, in order to start again.",
            registry=registry,
        )
        restarting.set_function(of_leader(_members_restarting))
        streams = Gauge("kera_coordinator_streams", "Streams that exist.", registry=registry)
        streams.set_function(of_leader(lambda leader: len(leader.state.catalog)))
        subjects = Gauge("kera_coordinator_schema_subjects", "Subjects of the registry of schemas.", registry=registry)
        subjects.set_function(of_leader(lambda leader: leader.schemas.subject_count))
        schema_bytes = Gauge(
            "kera_coordinator_schema_bytes",
            "Bytes that all schemas of the registry take, about; it takes no more beyond 24 MiB.",
            registry=registry,
        )
        schema_bytes.set_function(of_leader(lambda leader: leader.schemas.size_bytes))
        unknown = Gauge(
            "kera_coordinator_unknown_streams",
            "Streams that brokers hold and that are not in the metadata; kera cluster adopt takes them up again.",
            registry=registry,
        )
        unknown.set_function(of_leader(lambda leader: len(leader.unknown.describe_all())))
        catching_up = Gauge(
            "kera_coordinator_catching_up",
            "1 while nothing is recovered, moved or deleted, as the metadata are older than the cluster; else 0.",
            registry=registry,
        )
        catching_up.set_function(of_leader(lambda leader: bool(leader.state.catching_up)))
        self._phases = Histogram(
            "kera_coordinator_recovery_phase_seconds",
            "How long the phases of recoveries took.",
            ("phase",),
            buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300, 1800),
            registry=registry,
        )
        self._moves = Counter(
            "kera_coordinator_moves",
            "Streamlets that were to move to another broker, by outcome: ok or the code of the error.",
            ("outcome",),
            registry=registry,
        )
        self._stalls = Histogram(
            "kera_coordinator_move_stall_seconds",
            "For how long no broker took chunks for a streamlet that moved.",
            buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5),
            registry=registry,
        )

        leading = Gauge("kera_coordinator_leading", "1 for the coordinator that leads, else 0.", registry=registry)
        leading.set_function(of_leader(lambda _: 1.0))

    def steps(self, *, everything: bool) -> Steps:
        """See `Source`. The registry has the metrics that are counted as events happen."""
        leader = self._leading
        consumer_groups = leader.consumer_groups.registry if leader is not None else None
        families: list[Metric] = [
            GaugeMetricFamily(
                "kera_coordinator_consumer_groups",
                "Consumer groups that exist.",
                value=len(consumer_groups) if consumer_groups is not None else 0,
            ),
            GaugeMetricFamily(
                "kera_latency_constraints",
                "Latency constraints.",
                value=leader.latency.planning.count if leader is not None else 0,
            ),
            GaugeMetricFamily(
                "kera_latency_constraints_not_held",
                "Those that were not held over their last window, or that name a stream that is not there.",
                value=leader.latency.planning.not_held if leader is not None else 0,
            ),
        ]
        yield
        if everything and leader is not None and consumer_groups is not None:
            families += _of_consumer_groups(consumer_groups, self._consumer_groups_max)
            yield
            families += _of_lags(leader.group_lags, self._consumer_groups_max)
            families.append(_of_stored(leader.stored))
            yield
            families += _of_latency(leader.latency.planning, HOPS_MAX)
        return families

    def catching_up(self) -> str:
        """Return what the metadata of a leader wait for; empty if for nothing."""
        return self._leading.state.catching_up if self._leading is not None else ""

    def changed_by_others(self) -> str:
        """Return in words which records somebody else changed in the leader's store; empty if none."""
        return self._leading.rereading.problem if self._leading is not None else ""

    @contextmanager
    def leading(self, coordinator: Coordinator) -> Iterator[None]:
        """Show the state of `coordinator`, which leads, within the block."""
        self._leading = coordinator
        try:
            yield
        finally:
            self._leading = None

    def observe(self, method: str, outcome: str) -> None:
        """Count a request."""
        self._requests.labels(method, outcome).inc()

    def observe_phase(self, phase: str, seconds: float) -> None:
        """Record how long a phase of a recovery took."""
        self._phases.labels(phase).observe(seconds)

    def observe_move(self, outcome: str, stall_s: float) -> None:
        """Count a move."""
        self._moves.labels(outcome).inc()
        if outcome == "ok":
            self._stalls.observe(stall_s)


def _lost(members: Sequence[common_pb2.BrokerInfo] | Sequence[common_pb2.BackupInfo]) -> int:
    return sum(not (one.alive or one.restarting) for one in members)


def _members_restarting(leader: Coordinator) -> int:
    brokers, backups = leader.state.brokers.describe_all(), leader.state.backups.describe_all()
    return sum(one.restarting for one in brokers) + sum(one.restarting for one in backups)


def _of_consumer_groups(consumer_groups: ConsumerGroupRegistry, groups_max: int) -> list[Metric]:
    """A series for each consumer group, up to the limit."""
    consumers = GaugeMetricFamily(
        "kera_coordinator_consumer_group_members", "Consumers that take part.", labels=("consumer_group",)
    )
    held = GaugeMetricFamily(
        "kera_coordinator_consumer_group_leases",
        "Groups of segments that consumers read now.",
        labels=("consumer_group",),
    )
    for name, members, groups in consumer_groups.holdings(groups_max):
        consumers.add_metric([name], members)
        held.add_metric([name], groups)
    left_out = GaugeMetricFamily(
        "kera_coordinator_consumer_groups_left_out",
        "Consumer groups without series of their own, as there are too many.",
        value=max(0, len(consumer_groups) - groups_max),
    )
    return [consumers, held, left_out]


def _of_lags(lags: GroupLags, series_max: int) -> list[Metric]:
    """A series for each consumer group in each stream, up to the limit."""
    family = GaugeMetricFamily(
        "kera_coordinator_consumer_group_lag_records",
        "Records that a consumer group whose consumers share streams has not read, as of the last time brokers were"
        " asked.",
        labels=("consumer_group", "stream"),
    )
    records = lags.records
    for key in heapq.nsmallest(series_max, records):
        family.add_metric([*key], records[key])
    left_out = GaugeMetricFamily(
        "kera_coordinator_consumer_group_lags_left_out",
        "Lags that are left out, and consumer groups without lags, as there are too many.",
        value=max(0, len(records) - series_max) + lags.left_out,
    )
    return [family, left_out]


def _of_stored(stored: StoredBytes) -> Metric:
    """A series for each of the principals that store the most."""
    family = GaugeMetricFamily(
        "kera_principal_stored_bytes",
        "Bytes of chunks in the streams that a principal has created, each counted once.",
        labels=("principal",),
    )
    for principal, size in stored.most(PRINCIPALS_MAX):
        family.add_metric([principal], size)
    return family


def _of_latency(planning: Planning, hops_max: int) -> list[Metric]:
    """A series for each constraint, of which there are 1,000 at most, and for each hop, up to the limit."""
    limits = GaugeMetricFamily(
        "kera_latency_limit_seconds",
        "How late records may be on the path of a latency constraint: the mean, or the 99th percentile.",
        labels=("constraint", "statistic"),
    )
    violations = CounterMetricFamily(
        "kera_latency_violations",
        "Windows that violated a latency constraint since this coordinator leads.",
        labels=("constraint",),
    )
    not_held = GaugeMetricFamily(
        "kera_latency_not_held",
        "1: records took longer over the last window of a latency constraint than it allows.",
        labels=("constraint",),
    )
    clocks = GaugeMetricFamily(
        "kera_latency_clock_error_seconds",
        "Error bound of the time on the path, as the clocks of writers and readers are not known exactly.",
        labels=("constraint",),
    )
    hops = GaugeMetricFamily(
        "kera_latency_hop_seconds",
        "Latency of a hop of a stream over the last window of a constraint: the mean, or the 99th percentile.",
        labels=("constraint", "stream", "hop"),
    )
    shown = planning.shown
    left, left_out = hops_max, 0
    for name in sorted(shown):
        each = shown[name]
        limits.add_metric([name, "p99" if each.by_p99 else "mean"], each.limit_us / 1e6)
        violations.add_metric([name], each.violations)
        not_held.add_metric([name], each.not_held)
        clocks.add_metric([name], sum(figures.clock_error_us for _, figures in each.hops) / 1e6)
        if len(each.hops) > left:
            left_out += len(each.hops)
            continue
        left -= len(each.hops)
        for hop, figures in each.hops:
            took_us = figures.p99_us if each.by_p99 else figures.mean_us
            hops.add_metric([name, hop.stream, Hop(hop.hop).word], took_us / 1e6)
    hops_left_out = GaugeMetricFamily(
        "kera_latency_hops_left_out", "Hops without series of their own, as there are too many.", value=left_out
    )
    return [limits, violations, not_held, clocks, hops, hops_left_out]


class _OfRecoveries(Collector):
    """Describes the recoveries once per scrape, for all families: with many streams a description takes time."""

    def __init__(self, coordinator: Callable[[], Coordinator | None]) -> None:
        self._coordinator = coordinator

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the families."""
        coordinator = self._coordinator()
        found = coordinator.recoveries.describe_all() if coordinator is not None else []
        phases = GaugeMetricFamily(
            "kera_coordinator_recoveries",
            "Recoveries of lost brokers, under way and recent, by the phase they are in.",
            labels=("phase",),
        )
        for phase in PHASES:
            phases.add_metric([phase], sum(word(one.phase) == phase for one in found))
        yield phases
        yield GaugeMetricFamily(
            "kera_coordinator_recoveries_waiting",
            "Recoveries of lost brokers that wait; kera cluster recoveries shows for what.",
            value=sum(bool(one.waits_for) for one in found),
        )
        for name, field, text in (
            ("total_bytes", "bytes_total", "Bytes of chunks that backups had"),
            ("recovered_bytes", "bytes_recovered", "Bytes that can be read again"),
            ("restored_bytes", "bytes_restored", "Bytes that have their replicas again"),
            ("records_lost", "records_lost", "Records that no replica has, though they may have been acknowledged"),
        ):
            yield GaugeMetricFamily(
                f"kera_coordinator_recovery_{name}",
                f"{text}, in the listed recoveries.",
                value=sum(getattr(one, field) for one in found),
            )
