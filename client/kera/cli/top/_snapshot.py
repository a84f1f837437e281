"""Turns the figures of a sample into the rows to show. Pure: a `Sample` in, a `Snapshot` out.

A daemon that does not answer is shown as such, with its last figures and without rates. A sum covers the daemons that
have answered: it would be useless if one silent daemon of ten made it unknown.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kera.cli.top._constraints import HELD, constraint_rows
from kera.cli.top._groups import group_rows
from kera.cli.top._members import LAG_MS, backup_row, broker_row, since, total
from kera.cli.top._rates import StreamRates, stream_rates
from kera.cli.top._rows import EpochEntry, Snapshot, StreamPart, StreamRow, Totals
from kera.cli.top._sample import Sample
from kera.client.admin.daemons import DaemonFigures, StreamFigures
from kera.client.admin.watching import StreamSummary
from kera.client.diagnosis.findings import worst
from kera.core.base.spans import format_ms
from kera.core.base.spelling import plural

HELD_UP_MS = 10_000
"""After this time, a stream whose epochs are held up is shown as such, with the reason."""
HEALTH_WORDS = ("healthy", "degraded", "broken")


def snapshot(sample: Sample) -> Snapshot:
    """Return the figures that `kera top` displays for a sample."""
    cluster = sample.cluster
    brokers = tuple(broker_row(each, sample) for each in cluster.brokers) if cluster is not None else ()
    backups = tuple(backup_row(each, sample) for each in cluster.backups) if cluster is not None else ()
    streams = _streams(sample)
    groups = group_rows(sample)
    constraints = constraint_rows(sample)
    findings = tuple(sorted(sample.findings or (), key=lambda each: -each.severity))
    return Snapshot(
        at_us=sample.at_us,
        cluster_id=cluster.cluster_id if cluster is not None else "",
        health=_health(sample),
        totals=Totals(
            records_in_per_s=total(row.records_in_per_s for row in brokers),
            bytes_in_per_s=total(row.bytes_in_per_s for row in brokers),
            bytes_out_per_s=total(row.bytes_out_per_s for row in brokers),
            records_in=total(row.records_in for row in brokers),
            bytes_in=total(row.bytes_in for row in brokers),
            bytes_out=total(row.bytes_out for row in brokers),
            replication_lag_bytes=total(row.lag_bytes for row in brokers),
            group_lag_records=total(row.lag_records for row in groups),
            brokers=len(brokers),
            brokers_alive=sum(each.alive for each in cluster.brokers) if cluster is not None else 0,
            backups=len(backups),
            backups_alive=sum(each.alive for each in cluster.backups) if cluster is not None else 0,
            streams=len(streams),
            groups=len(groups),
            constraints=len(constraints),
            constraints_not_held=sum(row.state not in HELD for row in constraints),
        ),
        brokers=brokers,
        backups=backups,
        streams=streams,
        groups=groups,
        constraints=constraints,
        findings=findings,
        notes=tuple(_notes(sample)),
    )


def _health(sample: Sample) -> str:
    if sample.cluster_trouble is not None and not sample.cluster_trouble.refused:
        return "broken"
    return "unknown" if sample.findings is None else HEALTH_WORDS[worst(sample.findings)]


def _notes(sample: Sample) -> Iterable[str]:
    if sample.cluster_trouble is not None:
        if sample.cluster_trouble.refused:
            yield f"you may not see brokers and backups: {sample.cluster_trouble.text}"
        else:
            kept = "; what is shown was last heard before that" if sample.cluster is not None else ""
            yield f"no coordinator answers {since(sample.cluster_trouble)}{kept}"
    refused = [name for name, trouble in sample.troubles.items() if trouble.refused]
    if refused:
        yield f"you may not see figures of daemons: {sample.troubles[refused[0]].text}"
    for what, trouble in (
        ("streams", sample.streams_trouble),
        ("consumer groups", sample.groups_trouble),
        ("latency constraints", sample.constraints_trouble),
        ("findings", sample.findings_trouble),
    ):
        if trouble is not None and trouble.refused:
            yield f"you may not see {what}: {trouble.text}"
        elif trouble is not None and sample.cluster_trouble is None:
            yield f"{what} are not reported {since(trouble)}"


def _streams(sample: Sample) -> tuple[StreamRow, ...]:
    brokers = {each.broker_id: each for each in sample.cluster.brokers} if sample.cluster is not None else None
    alive = None if brokers is None else {broker_id for broker_id, each in brokers.items() if each.alive}
    rates, figures, silent = {}, {}, set()
    for name, two in sample.figures.items():
        kind, _, number = name.partition(" ")
        if kind != "broker":
            continue
        figures[int(number)] = two.now
        if name in sample.troubles or (alive is not None and int(number) not in alive):
            silent.add(int(number))
        else:
            rates[int(number)] = stream_rates(two)
    return tuple(_stream(each, rates, figures, alive, silent) for each in sample.streams)


def _stream(
    stream: StreamSummary,
    rates: dict[int, dict[int, StreamRates]],
    figures: dict[int, DaemonFigures],
    alive: set[int] | None,
    silent: set[int],
) -> StreamRow:
    parts, records, size, read, lag_ms = [], 0, 0, 0, 0
    epochs = _Epochs()
    told = False
    for broker_id in sorted(stream.holders):
        here = figures[broker_id].streams.get(stream.stream_id) if broker_id in figures else None
        made = rates.get(broker_id, {}).get(stream.stream_id)
        if here is not None:
            told = True
            records += here.records_appended
            size += here.bytes_appended
            read += here.bytes_read
            lag_ms = max(lag_ms, here.lag_ms)
            epochs = max(epochs, _epochs_at(broker_id, here))
        parts.append(
            StreamPart(
                broker_id,
                stream.owners.get(broker_id, 0),
                made.records if made is not None else None,
                made.bytes if made is not None else None,
                made.bytes_read if made is not None else None,
                here.lag_bytes if here is not None else None,
            )
        )
    why, state = [], "ok"
    absent = sorted(set(stream.owners) - alive) if alive is not None else []
    if lag_ms >= LAG_MS:
        state = "lag"
        why.append(f"backups are {format_ms(lag_ms)} behind")
    if epochs.held_up_ms >= HELD_UP_MS:
        state = "held up"
        where = f"streamlet {epochs.streamlet} at broker {epochs.broker_id}"
        why.append(f"epochs wait for {where}, which is {format_ms(epochs.lag_ms)} behind")
    for broker_id in sorted(set(stream.owners) & silent - set(absent)):
        state = "no answer"
        why.append(f"broker {broker_id}, which has {plural(stream.owners[broker_id], 'streamlet')}, does not answer")
    for broker_id in absent:
        state = "no owner"
        why.append(f"broker {broker_id}, which has {plural(stream.owners[broker_id], 'streamlet')}, is not alive")
    return StreamRow(
        stream_id=stream.stream_id,
        name=stream.name,
        state=state,
        why=tuple(why),
        streamlets=stream.streamlets,
        replication=stream.replication,
        durability=stream.durability,
        parts=tuple(parts),
        records_in_per_s=total(part.records_in_per_s for part in parts),
        bytes_in_per_s=total(part.bytes_in_per_s for part in parts),
        bytes_out_per_s=total(part.bytes_out_per_s for part in parts),
        records_in=records if told else None,
        bytes_in=size if told else None,
        bytes_out=read if told else None,
        lag_bytes=total(part.lag_bytes for part in parts),
        lag_ms=lag_ms if told else None,
        epoch_lag_ms=epochs.lag_ms if epochs.broker_id else None,
        epochs_held_up_ms=epochs.held_up_ms if epochs.broker_id else None,
        epoch_entry=EpochEntry(epochs.broker_id, epochs.streamlet, epochs.entry) if epochs.broker_id else None,
    )


class _Epochs(NamedTuple):
    """The least settled entry of a stream; without a broker, the stream has no epochs."""

    lag_ms: int = -1
    held_up_ms: int = 0
    broker_id: int = 0
    streamlet: int = 0
    entry: int = 0


def _epochs_at(broker_id: int, here: StreamFigures) -> _Epochs:
    if here.epoch_lag_ms is None or here.epoch_entry is None:
        return _Epochs()
    return _Epochs(here.epoch_lag_ms, here.epochs_held_up_ms, broker_id, *here.epoch_entry)
