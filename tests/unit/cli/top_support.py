"""Samples of an imaginary cluster for the tests of `kera top`."""

import dataclasses
from typing import Any, cast

from kera.cli.top._sample import Lagging, Sample, Two, TwoLags
from kera.client import (
    BackupDescription,
    BrokerDescription,
    ClusterDescription,
    ConsumerGroupDescription,
    ConsumerGroupSummary,
    LatencyConstraint,
    LatencyDescription,
    LatencyHop,
)
from kera.client.admin.consumer_groups import ConsumerLag, EntryProgress, MemberDescription
from kera.client.admin.daemons import DaemonFigures, Labels, StreamFigures
from kera.client.admin.watching import StreamSummary
from kera.core.base.ids import Position

GIB = 1 << 30
NOW_US = 1_700_000_000_000_000
SECOND_US = 1_000_000


def broker(broker_id: int, **fields: Any) -> BrokerDescription:
    made = BrokerDescription(broker_id, "node/boot", f"b:{broker_id}", "", "", 8 << 20, 1 << 28, alive=True)
    return dataclasses.replace(made, **fields)


def backup(backup_id: int, **fields: Any) -> BackupDescription:
    made = BackupDescription(
        backup_id, "node/boot", "", f"k:{backup_id}", "", "", 8 << 20, GIB, 2 * GIB, GIB // 2, GIB, alive=True
    )
    return dataclasses.replace(made, **fields)


def cluster(brokers: int = 1, backups: int = 0) -> ClusterDescription:
    return ClusterDescription(
        "c" * 32,
        [broker(broker_id) for broker_id in range(1, brokers + 1)],
        [backup(backup_id) for backup_id in range(1, backups + 1)],
    )


def figures(
    uptime_s: float, launch: str = "a", streams: dict[int, StreamFigures] | None = None, **values: float
) -> DaemonFigures:
    """`values`: values of figures without labels, by name without ``kera_broker_`` and ``_total``."""
    named: dict[str, dict[Labels, float]] = {f"kera_broker_{name}_total": {(): value} for name, value in values.items()}
    return DaemonFigures(launch, round(uptime_s * SECOND_US), named, streams or {})


def with_figure(found: DaemonFigures, name: str, value: float, *labels: str) -> DaemonFigures:
    return dataclasses.replace(found, figures={**found.figures, name: {**found.figures.get(name, {}), labels: value}})


def counted(
    records: int, bytes_appended: int = 0, read: int = 0, streamlets: int = 1, lag_ms: int = 0
) -> StreamFigures:
    return StreamFigures(records, bytes_appended, read, streamlets, 10 * lag_ms, lag_ms)


def stream(stream_id: int, name: str, *owners: int, replication: int = 0) -> StreamSummary:
    owned = {owner: owners.count(owner) for owner in owners}
    return StreamSummary(stream_id, name, len(owners), replication, "leader", owned, frozenset(owners))


def sample(**fields: Any) -> Sample:
    return Sample(**{"at_s": 100.0, "at_us": NOW_US, "cluster": cluster(), **fields})


def two(before: DaemonFigures | None, now: DaemonFigures) -> Two:
    return Two(before, now)


def entry(stream_name: str, records: int | None, *, age_s: float = 0.0, streamlet: int = 0) -> EntryProgress:
    lag = None if records is None else ConsumerLag(records, 10 * records, NOW_US - round(age_s * SECOND_US))
    return EntryProgress(stream_name, streamlet, 0, Position(0, 0, 0), 1, "m", lag)


def member(consumed: int = 0, **fields: Any) -> MemberDescription:
    made = MemberDescription("m1234567890", "host:1", (), 100, 0, consumed, 10_000, 60_000)
    return dataclasses.replace(made, **fields)


def group(name: str, members: int = 1, idle_ms: int = 0, streams: tuple[str, ...] = ("s",)) -> ConsumerGroupSummary:
    return ConsumerGroupSummary(name, streams, members, idle_ms)


def hop(stream_name: str, name: str, mean_us: int, reader: str = "", **fields: Any) -> LatencyHop:
    made = LatencyHop(stream_name, name, reader, 9, mean_us, 2 * mean_us, 3 * mean_us, 7, mean_us, 0, violates=False)
    return dataclasses.replace(made, **fields)


def constraint(name: str, state: str = "held", mean_us: int = 150_000, **fields: Any) -> LatencyDescription:
    """A constraint with a limit of 300 ms, as in a list, without hops by default; a mean of 0 is unmeasured."""
    of = LatencyConstraint(name, ("clicks", "group:enrich", "visits"), 300.0, 15_000, fields.pop("statistic", "mean"))
    made = LatencyDescription(of, cast("Any", state), "", mean_us, 2 * mean_us, 0, 0, ())
    worst = hop("clicks", "work", mean_us, "enrich") if mean_us else None
    return dataclasses.replace(made, **{"worst_hop": worst, **fields})


def looks(
    name: str,
    now: list[EntryProgress],
    before: list[EntryProgress] | None = None,
    members: tuple[MemberDescription, ...] = (),
    members_before: tuple[MemberDescription, ...] = (),
) -> TwoLags:
    """Two looks at a group, a second apart."""
    earlier = None if before is None else Lagging(99.0, ConsumerGroupDescription(name, members_before, tuple(before)))
    return TwoLags(earlier, Lagging(100.0, ConsumerGroupDescription(name, members, tuple(now))))
