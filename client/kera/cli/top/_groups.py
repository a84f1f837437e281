"""Consumer groups and Spark's queries as rows: how far behind they are, and which consumers cause it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from kera.cli.top._rows import GroupRow, GroupStream, MemberRow
from kera.cli.top._sample import Lagging, Sample, TwoLags
from kera.cli.top._text import count_text
from kera.client import ConsumerGroupDescription, ConsumerGroupSummary, EntryProgress, MemberDescription
from kera.core.base.spans import format_ms

N = TypeVar("N", int, float)

SPARK_PREFIX = "spark-kera-source-"
"""Prefix of the names that Spark's queries generate for their cursors."""
BEHIND_MS = 10_000
"""A group is behind when its oldest unread record is older than this."""
STUCK_PART = 0.5
"""A consumer is stuck when a batch has taken more than this share of its time limit."""


def group_rows(sample: Sample) -> tuple[GroupRow, ...]:
    """Return the rows of all consumer groups, in their order."""
    return tuple(_row(each, sample.lags.get(each.consumer_group), sample) for each in sample.groups)


def _row(group: ConsumerGroupSummary, lags: TwoLags | None, sample: Sample) -> GroupRow:
    made_up = group.unnamed or group.consumer_group.startswith(SPARK_PREFIX)
    kind = "consumers" if group.members else "spark" if made_up else "cursor"
    if lags is None:
        return GroupRow(group.consumer_group, kind, "unknown", (), group.streams, group.members, idle_ms=group.idle_ms)
    now = lags.now.found
    of_streams = tuple(_of_stream(stream, now, sample.at_us) for stream in sorted({e.stream for e in now.entries}))
    unknown = [each.stream for each in of_streams if each.lag_records is None]
    lag = None if unknown else sum(each.lag_records or 0 for each in of_streams)
    behind = [each.behind_ms for each in of_streams if each.behind_ms is not None]
    per_s = _lag_per_s(lags)
    consumers = _consumers(lags)
    why = [f"brokers do not report its progress in {', '.join(unknown)}"] if unknown else []
    stuck = [each for each in now.members if each.busy_ms > STUCK_PART * each.progress_timeout_ms > 0]
    why += [f"{_called(each)} has been at one batch for {format_ms(each.busy_ms)}" for each in stuck]
    why += [
        f"{_called(each)} has been silent for {format_ms(each.silent_ms)}"
        for each in now.members
        if each.silent_ms > STUCK_PART * each.session_timeout_ms > 0
    ]
    behind_ms = max(behind, default=0) if lag is not None else None
    is_behind = bool(lag) and (behind_ms or 0) >= BEHIND_MS
    if is_behind and not group.members and group.idle_ms >= BEHIND_MS:
        why.append(f"no reads for {format_ms(group.idle_ms)}")
    elif is_behind and per_s is not None and per_s > 0:
        why.append(f"more comes than it reads: {count_text(per_s)} records/s")
    state = "unknown" if unknown else "stuck" if stuck else "behind" if is_behind else "ok" if group.members else "idle"
    if state == "idle" and group.idle_ms < BEHIND_MS:
        state = "ok"
    return GroupRow(
        name=group.consumer_group,
        kind=kind,
        state=state,
        why=tuple(why),
        streams=group.streams,
        members=group.members,
        idle_ms=group.idle_ms,
        lag_records=lag,
        lag_bytes=None if lag is None else sum(each.lag_bytes or 0 for each in of_streams),
        behind_ms=behind_ms,
        lag_per_s=per_s,
        bytes_per_s=_total(each.bytes_per_s for each in consumers),
        looked_ms=max(0, round((sample.at_s - lags.now.at_s) * 1000)),
        consumers=consumers,
        of_streams=of_streams,
    )


def _called(member: MemberDescription) -> str:
    return member.client or member.member_id[:8]


def _total(values: Iterable[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return sum(known) if known else None


def _lag_of(entries: Iterable[EntryProgress]) -> int | None:
    total = 0
    for each in entries:
        if each.lag is None:
            return None
        total += each.lag.records
    return total


def _of_stream(stream: str, found: ConsumerGroupDescription, at_us: int) -> GroupStream:
    entries = [each for each in found.entries if each.stream == stream]
    lags = [each.lag for each in entries if each.lag is not None]
    oldest_us = min((lag.oldest_us for lag in lags if lag.oldest_us), default=0)
    known = len(lags) == len(entries)
    return GroupStream(
        stream,
        len({each.streamlet for each in entries}),
        sum(lag.records for lag in lags) if known else None,
        sum(lag.bytes for lag in lags) if known else None,
        (max(0, round((at_us - oldest_us) / 1000)) if oldest_us else 0) if known else None,
    )


def _seconds(before: Lagging | None, now: Lagging) -> float | None:
    return now.at_s - before.at_s if before is not None and now.at_s > before.at_s else None


def _lag_per_s(lags: TwoLags) -> float | None:
    seconds = _seconds(*lags)
    if seconds is None or lags.before is None:
        return None
    before, now = _lag_of(lags.before.found.entries), _lag_of(lags.now.found.entries)
    return None if before is None or now is None else (now - before) / seconds


def _consumers(lags: TwoLags) -> tuple[MemberRow, ...]:
    """Return the rows of consumers; the rate of a new consumer counts all that it has consumed."""
    seconds = _seconds(*lags)
    before = {each.member_id: each.bytes_consumed for each in lags.before.found.members} if lags.before else {}
    return tuple(
        MemberRow(
            each.member_id,
            each.client,
            len(each.held),
            each.silent_ms,
            each.busy_ms,
            None if seconds is None else max(0, each.bytes_consumed - before.get(each.member_id, 0)) / seconds,
        )
        for each in lags.now.found.members
    )
