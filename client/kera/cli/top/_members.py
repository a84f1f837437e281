"""Brokers and backups as rows: which are slow or do not answer, and why. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from kera.cli.top._rates import quantile_s, rate, rate_of
from kera.cli.top._rows import BackupRow, BrokerRow
from kera.cli.top._sample import Sample, Trouble, Two
from kera.cli.top._text import time_of_day
from kera.client import BackupDescription, BrokerDescription
from kera.client.admin.daemons import DaemonFigures
from kera.client.diagnosis.findings import Finding, Severity
from kera.core.base.sizes import format_size
from kera.core.base.spans import format_ms
from kera.core.base.spelling import plural

N = TypeVar("N", int, float)

BUSY = 0.9
"""An event loop that works for at least this part of the time delays others."""
LAG_MS = 1_000
"""Replication with at least this lag is too slow for the incoming records."""
APPEND_MS = 500.0
"""Requests to write that take this long wait for backups, a disk, or memory."""
ANSWER_MS = 500.0
"""A backup that takes this long to answer is too slow."""
ANSWER_MS_WAITING = 100.0
"""Likewise, if the broker that waits for it is slow."""
OUT = ("kera_broker_bytes_read_total", "kera_broker_push_bytes_total")
"""Counters of bytes that are read as copies, and in place."""


def total(values: Iterable[N | None]) -> N | None:
    """Return the sum of the known values; None: no value is known."""
    known = [each for each in values if each is not None]
    return sum(known[1:], known[0]) if known else None


def since(trouble: Trouble) -> str:
    """Describe since when there is trouble, and why."""
    return f"since {time_of_day(trouble.since_us)}: {trouble.text}"


def _state(member: BrokerDescription | BackupDescription, trouble: Trouble | None, *, told: bool) -> str:
    if member.restarting:
        return "stopping" if member.alive else "restarting"
    if not member.alive:
        return "lost"
    if trouble is not None:
        return "not asked" if trouble.refused else "no answer"
    if member.draining:
        return "draining"
    return "alive" if told else "not asked"


def _found(findings: Sequence[Finding] | None, subject: str) -> list[str]:
    """Return the findings about a subject that are not ok, the worst first."""
    mine = [each for each in findings or () if each.subject == subject and each.severity is not Severity.OK]
    return [each.text for each in sorted(mine, key=lambda each: -each.severity)]


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _counted(figures: DaemonFigures, *names: str) -> int | None:
    """Return the sum of counters; None: the daemon has none of them."""
    return _whole(total(value for name in names for value in figures.figures.get(name, {}).values()))


def broker_row(broker: BrokerDescription, sample: Sample) -> BrokerRow:
    """Return the row of a broker that the coordinator knows, alive or not."""
    name = f"broker {broker.broker_id}"
    trouble, two = sample.troubles.get(name), sample.figures.get(name)
    state = _state(broker, trouble, told=two is not None)
    unanswered = trouble if state == "no answer" else None
    row = BrokerRow(
        broker_id=broker.broker_id,
        state=state,
        why=(*_unanswered(unanswered), *_found(sample.findings, name)),
        address=broker.grpc_address,
        node=broker.node_id.partition("/")[0],
        version=broker.version,
        since_us=unanswered.since_us if unanswered is not None else 0,
        memory_bytes_max=broker.arena_bytes,
    )
    if two is None:
        return row
    now = two.now
    live = two if trouble is None and broker.alive else Two(None, now)
    slots, free = now.value("kera_broker_arena_slots"), now.value("kera_broker_arena_slots_free")
    used = None if slots is None or free is None else (slots - free) * (now.value("kera_broker_arena_slot_bytes") or 0)
    row = replace(
        row,
        records_in_per_s=rate(live, "kera_broker_records_appended_total"),
        bytes_in_per_s=rate(live, "kera_broker_bytes_appended_total"),
        bytes_out_per_s=rate(live, *OUT),
        records_in=_counted(now, "kera_broker_records_appended_total"),
        bytes_in=_counted(now, "kera_broker_bytes_appended_total"),
        bytes_out=_counted(now, *OUT),
        append_ms=_ms(quantile_s(live, "kera_broker_append_seconds", 0.99)),
        fetch_ms=_ms(quantile_s(live, "kera_broker_fetch_seconds", 0.99)),
        loop=rate_of(live, "kera_processor_seconds_total", "of", "loop"),
        memory_bytes=_whole(used),
        process_bytes=_whole(now.value("process_resident_memory_bytes")),
        lag_bytes=_whole(now.value("kera_broker_replication_lag_bytes")),
        lag_ms=_whole(now.value("kera_broker_replication_lag_ms")),
        backups_up=_whole(now.value("kera_broker_backups_up")),
        repairs=_whole(now.value("kera_broker_virtual_segments_deficient")),
        streamlets=_whole(now.value("kera_broker_streamlets", "state", "owned")),
        streams=_whole(now.value("kera_broker_streams")),
    )
    return row if trouble is not None else replace(row, why=(*_slow_broker(row, live), *row.why))


def _unanswered(trouble: Trouble | None) -> tuple[str, ...]:
    return (f"no answer {since(trouble)}",) if trouble is not None else ()


def _slow_broker(row: BrokerRow, two: Two) -> Iterable[str]:
    if two.now.value("kera_broker_disk_failing"):
        yield "its disk takes no data"
    if row.lag_ms is not None and row.lag_ms >= LAG_MS:
        yield f"its backups are {format_ms(row.lag_ms)} behind, {format_size(row.lag_bytes or 0)}"
    waits = any(slow is not None and slow >= ms for slow, ms in ((row.lag_ms, LAG_MS), (row.append_ms, APPEND_MS)))
    backup_id, answer_ms = max(_answers_of(two.now).items(), key=lambda item: item[1], default=("", 0.0))
    if answer_ms >= (ANSWER_MS_WAITING if waits else ANSWER_MS):
        yield f"waits for backup {backup_id}, which takes {format_ms(round(answer_ms))} to answer"
    if row.loop is not None and row.loop >= BUSY:
        yield f"its event loop is busy for {row.loop:.0%} of the time"
    if row.append_ms is not None and row.append_ms >= APPEND_MS:
        yield f"one write in a hundred takes {format_ms(round(row.append_ms))} or longer"
    if row.repairs:
        yield f"{plural(row.repairs, 'virtual segment')} with too few replicas"
    refused = rate(two, "kera_broker_chunks_refused_total")
    if refused:
        yield f"refuses {refused:.3g} chunks/s"


def _answers_of(broker: DaemonFigures) -> dict[str, float]:
    """Return how long backups take to answer a broker, in milliseconds, by id."""
    answers = broker.figures.get("kera_broker_backup_answer_ms", {})
    return {labels[1]: ms for labels, ms in answers.items() if labels[:1] == ("backup",)}


def _waiting(backup_id: int, sample: Sample) -> Iterable[str]:
    """Name the broker that waits longest for a backup, if it waits too long."""
    answers = {name: _answers_of(two.now).get(str(backup_id), 0.0) for name, two in sample.figures.items()}
    broker = max(answers, key=answers.__getitem__, default="")
    if broker and answers[broker] >= ANSWER_MS:
        yield f"{broker} waits {format_ms(round(answers[broker]))} for an answer; look at its disk"


def backup_row(backup: BackupDescription, sample: Sample) -> BackupRow:
    """Return the row of a backup that the coordinator knows, alive or not."""
    name = f"backup {backup.backup_id}"
    trouble, two = sample.troubles.get(name), sample.figures.get(name)
    state = _state(backup, trouble, told=two is not None)
    unanswered = trouble if state == "no answer" else None
    why = [*_unanswered(unanswered), *(_waiting(backup.backup_id, sample) if backup.alive else ())]
    live = None if two is None else Two(None, two.now) if trouble is not None or not backup.alive else two
    loop = None if live is None else rate_of(live, "kera_processor_seconds_total", "of", "loop")
    if loop is not None and loop >= BUSY:
        why.append(f"its event loop is busy for {loop:.0%} of the time")
    used = backup.memory_bytes - backup.free_memory_bytes, backup.disk_bytes - backup.free_disk_bytes
    return BackupRow(
        backup_id=backup.backup_id,
        state=state,
        why=(*why, *_found(sample.findings, name)),
        bytes_in_per_s=None if live is None else rate(live, "kera_backup_bytes_appended_total"),
        bytes_in=None if two is None else _counted(two.now, "kera_backup_bytes_appended_total"),
        loop=loop,
        memory_bytes=max(0, used[0]) if backup.alive else None,
        memory_bytes_max=backup.memory_bytes,
        disk_bytes=max(0, used[1]) if backup.alive else None,
        disk_bytes_max=backup.disk_bytes,
        replicas=None if two is None else _counted(two.now, "kera_backup_replicas"),
        address=backup.grpc_address,
        node=backup.node_id.partition("/")[0],
        version=backup.version,
        since_us=unanswered.since_us if unanswered is not None else 0,
    )
