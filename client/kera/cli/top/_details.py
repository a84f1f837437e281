"""One broker, backup, stream, consumer group, finding or latency constraint in full, as text of 80 columns. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kera.cli._latency_text import bars, known_to_within, own_lingers
from kera.cli._table import fields, table
from kera.cli.top._rows import BackupRow, BrokerRow, ConstraintRow, GroupRow, Snapshot, StreamPart, StreamRow
from kera.cli.top._text import count_text, ms_text, part_text, per_s, size_text, time_of_day, us_text
from kera.cli.top._views import View
from kera.client.diagnosis.findings import Finding
from kera.core.base.spans import format_ms
from kera.core.base.spelling import plural

ROWS_MAX = 50
"""Maximum of rows of a table within the details."""
WIDTH = 77
"""Width of the text within 80 columns, with a border of one on each side and a scroll bar."""


def details(view: View, key: str, snapshot: Snapshot) -> str:
    """Return the details of the row called `key`, or a note that it is gone."""
    row = next((each for each in view.rows(snapshot) if view.key(each) == key), None)
    if row is None:
        noun = "latency constraint" if view.name == "latency" else view.title.lower().removesuffix("s")
        return f"{noun} {key} is not there any more"
    return "\n\n".join(block for block in _OF[view.name](row, snapshot) if block)


def _why(why: Sequence[str]) -> str:
    lines: list[str] = []
    for each in why:
        lines += textwrap.wrap(each, WIDTH - 2, initial_indent="! ", subsequent_indent="  ")
    return "\n".join(lines)


def _some(heading: Sequence[str], rows: Iterable[Sequence[object]], noun: str) -> str:
    """Return a table of at most `ROWS_MAX` rows, with the number of those left out."""
    rows = list(rows)
    if not rows:
        return ""
    left_out = len(rows) - ROWS_MAX
    return table(heading, rows[:ROWS_MAX]) + (f"\nand {left_out} more {noun}" if left_out > 0 else "")


def _used(used: int | None, limit: int | None) -> str:
    if not limit:
        return size_text(used)
    return f"{size_text(used)} of {size_text(limit)}" + (f", {used / limit:.0%}" if used is not None else "")


def _broker(row: BrokerRow, snapshot: Snapshot) -> Iterable[str]:
    yield f"broker {row.broker_id}: {row.state}, version {row.version or '?'}, at {row.address} on {row.node or '?'}"
    yield _why(row.why)
    seen = f"; figures are from before {time_of_day(row.since_us)}" if row.since_us else ""
    yield fields(
        [
            ("records in", f"{per_s(count_text(row.records_in_per_s))}, {count_text(row.records_in)} since its start"),
            ("bytes in", f"{per_s(size_text(row.bytes_in_per_s))}, {size_text(row.bytes_in)} since its start{seen}"),
            ("bytes out", f"{per_s(size_text(row.bytes_out_per_s))}, {size_text(row.bytes_out)} since its start"),
            ("writes, p99", ms_text(row.append_ms)),
            ("reads, p99", ms_text(row.fetch_ms)),
            ("event loop", f"busy for {part_text(row.loop)} of the time"),
            ("arena", _used(row.memory_bytes, row.memory_bytes_max)),
            ("process", size_text(row.process_bytes)),
            ("replication", _replication(row)),
            ("streams", f"{count_text(row.streams)}, {count_text(row.streamlets)} streamlets owned here"),
        ]
    )
    here = [(stream, part) for stream in snapshot.streams for part in stream.parts if part.broker_id == row.broker_id]
    here.sort(key=lambda each: (-(each[1].bytes_in_per_s or 0.0), each[0].name))
    yield _some(
        ("STREAM", "STREAMLETS", "REC/S", "IN/S", "OUT/S", "LAG"),
        [(stream.name, part.streamlets, *_rates(part)) for stream, part in here],
        "streams",
    )


def _replication(row: BrokerRow) -> str:
    lag = f"{size_text(row.lag_bytes)} behind" + (f", the oldest for {format_ms(row.lag_ms)}" if row.lag_ms else "")
    return f"{lag}; {count_text(row.backups_up)} backups can be used"


def _rates(part: StreamPart) -> tuple[str, ...]:
    return (
        count_text(part.records_in_per_s),
        size_text(part.bytes_in_per_s),
        size_text(part.bytes_out_per_s),
        size_text(part.lag_bytes),
    )


def _backup(row: BackupRow, _: Snapshot) -> Iterable[str]:
    yield f"backup {row.backup_id}: {row.state}, version {row.version or '?'}, at {row.address} on {row.node or '?'}"
    yield _why(row.why)
    yield fields(
        [
            ("bytes in", f"{per_s(size_text(row.bytes_in_per_s))}, {size_text(row.bytes_in)} since its start"),
            ("event loop", f"busy for {part_text(row.loop)} of the time"),
            ("memory", _used(row.memory_bytes, row.memory_bytes_max)),
            ("disk", _used(row.disk_bytes, row.disk_bytes_max)),
            ("replicas", count_text(row.replicas)),
        ]
    )


def _stream(row: StreamRow, snapshot: Snapshot) -> Iterable[str]:
    yield f"stream {row.name}: {row.state}"
    yield _why(row.why)
    yield fields(
        [
            ("records in", f"{per_s(count_text(row.records_in_per_s))}, {count_text(row.records_in)} since opened"),
            ("bytes in", f"{per_s(size_text(row.bytes_in_per_s))}, {size_text(row.bytes_in)} since opened"),
            ("bytes out", f"{per_s(size_text(row.bytes_out_per_s))}, {size_text(row.bytes_out)} since opened"),
            ("replication", f"{plural(row.replication, 'backup')}, {size_text(row.lag_bytes)} behind"),
            ("durability", row.durability),
            *_epochs(row),
        ]
    )
    yield _some(
        ("BROKER", "STREAMLETS", "REC/S", "IN/S", "OUT/S", "LAG"),
        [(part.broker_id, part.streamlets, *_rates(part)) for part in row.parts],
        "brokers",
    )
    readers = [
        (group.name, group.state, count_text(part.lag_records), size_text(part.lag_bytes), ms_text(part.behind_ms))
        for group in snapshot.groups
        for part in group.of_streams
        if part.stream == row.name
    ]
    yield _some(("GROUP", "STATE", "LAG", "LAG BYTES", "BEHIND"), readers, "groups")


def _epochs(row: StreamRow) -> Iterable[tuple[str, str]]:
    first = row.epoch_entry
    if first is not None:
        where = f"entry {first.entry} of streamlet {first.streamlet} at broker {first.broker_id}"
        yield "next epoch", f"waits for {where}, {ms_text(row.epoch_lag_ms)} behind the clock"


def _group(row: GroupRow, _: Snapshot) -> Iterable[str]:
    kinds = {
        "consumers": "consumers that share streams",
        "spark": "a Spark query",
        "cursor": "a named cursor, of a Spark query or a program",
    }
    yield f"group {row.name}: {row.state}, {kinds[row.kind]}"
    yield _why(row.why)
    looked = "" if row.looked_ms is None else f", as of {format_ms(row.looked_ms)} ago"
    yield fields(
        [
            ("lag", f"{count_text(row.lag_records)} records, {size_text(row.lag_bytes)}{looked}"),
            ("behind", ms_text(row.behind_ms)),
            ("lag grows by", per_s(count_text(row.lag_per_s))),
            ("read", per_s(size_text(row.bytes_per_s))),
            ("last used", f"{format_ms(row.idle_ms)} ago" if not row.members else "now"),
        ]
    )
    yield _some(
        ("STREAM", "STREAMLETS", "LAG", "LAG BYTES", "BEHIND"),
        [
            (
                part.stream,
                part.streamlets,
                count_text(part.lag_records),
                size_text(part.lag_bytes),
                ms_text(part.behind_ms),
            )
            for part in row.of_streams
        ],
        "streams",
    )
    yield _some(
        ("CONSUMER", "CLIENT", "GROUPS", "READ/S", "LAST HEARTBEAT", "PROCESSING FOR"),
        [
            (
                member.member_id[:8],
                member.client,
                member.groups,
                size_text(member.bytes_per_s),
                f"{format_ms(member.silent_ms)} ago",
                format_ms(member.busy_ms) if member.busy_ms else "",
            )
            for member in row.consumers
        ],
        "consumers",
    )


def _finding(row: Finding, _: Snapshot) -> Iterable[str]:
    yield f"{row.severity.word}: {row.subject}"
    yield textwrap.fill(row.text, WIDTH)
    yield textwrap.fill(row.advice, WIDTH, initial_indent="→ ", subsequent_indent="  ")


def _constraint(row: ConstraintRow, _: Snapshot) -> Iterable[str]:
    yield f"latency constraint {row.name}: {row.state}"
    yield _why(row.why)
    yield textwrap.fill(", ".join(row.path), WIDTH, subsequent_indent="  ")
    which = "the mean" if row.statistic == "mean" else "the 99th percentile"
    yield fields(
        [
            ("limit", f"{us_text(row.limit_ms * 1000)}, for {which} over {format_ms(row.window_ms)}"),
            ("took", f"mean {us_text(row.mean_us)}, p99 {us_text(row.p99_us)} at most; {part_text(row.used)} of it"),
            *([("least limit", us_text(row.least_limit_us))] if row.least_limit_us else []),
            *([("clocks", clocks)] if (clocks := known_to_within(row.hops or ())) else []),
            ("violations", plural(row.violations, "window")),
        ]
    )
    yield _why(list(own_lingers(row.hops or ())))
    if row.hops is None:
        yield "its hops come with the next refresh"
        return
    if row.worst_hop is not None:
        yield "\n".join(bars(row.hops, row.limit_ms * 1000, by_p99=row.statistic == "p99", width=WIDTH))
    yield table(
        ("STREAM", "HOP", "GROUP", "MEAN", "P99", "WORST", "PART", "WAITS", ""),
        [
            (
                hop.stream,
                hop.hop,
                hop.consumer_group,
                us_text(hop.mean_us) if hop.chunks else "",
                us_text(hop.p99_us) if hop.chunks else "",
                f"{hop.worst_streamlet_id}: {us_text(hop.worst_mean_us)}" if hop.chunks else "",
                us_text(hop.allowed_us) if hop.allowed_us else "",
                us_text(hop.advised_us) if hop.advised_us else "",
                "!" if hop.violates else " ",
            )
            for hop in row.hops
        ],
    )


_OF: dict[str, Callable[[Any, Snapshot], Iterable[str]]] = {
    "brokers": _broker,
    "backups": _backup,
    "streams": _stream,
    "groups": _group,
    "findings": _finding,
    "latency": _constraint,
}
