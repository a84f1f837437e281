"""A snapshot as one document, and as tables that are printed once. Pure: the figures are those of the live view."""

from __future__ import annotations

import dataclasses
from typing import Any

from kera.cli._table import table
from kera.cli.top import ROWS
from kera.cli.top._rows import Snapshot
from kera.cli.top._text import count_text, per_s, size_text
from kera.cli.top._views import FILTERED, VIEWS, Order, shown
from kera.client.diagnosis import findings

ID_DIGITS = 8
"""Digits of a cluster's id: enough to tell clusters apart."""


def document(snapshot: Snapshot) -> dict[str, Any]:
    """Return the whole snapshot: names as in the rows, rates per second, unknown values null."""
    found = dataclasses.asdict(dataclasses.replace(snapshot, findings=()))
    found["findings"] = findings.document(list(snapshot.findings))
    return found


def heading(snapshot: Snapshot) -> tuple[str, str]:
    """Return the two lines above every view."""
    totals = snapshot.totals
    first = (
        f"kera {snapshot.cluster_id[:ID_DIGITS] or '?'}: {snapshot.health}"
        f"  brokers {totals.brokers_alive}/{totals.brokers}  backups {totals.backups_alive}/{totals.backups}"
    )
    second = (
        f"in {count_text(totals.records_in_per_s)} records/s, {per_s(size_text(totals.bytes_in_per_s))}"
        f"  out {per_s(size_text(totals.bytes_out_per_s))}"
        f"  lag {size_text(totals.replication_lag_bytes)}, groups {count_text(totals.group_lag_records)}"
    )
    return first, second


def tables(snapshot: Snapshot, wanted: str = "", rows_max: int = ROWS) -> str:
    """Return every view that has rows, as text. `wanted`: the filter of the views that have one."""
    blocks = ["\n".join((*heading(snapshot), *(f"! {note}" for note in snapshot.notes)))]
    for view in VIEWS:
        order = Order.of(view)._replace(filter=wanted if view.name in FILTERED else "")
        if view.name == "findings":
            lines = findings.lines([each for each in snapshot.findings if each.severity])
            blocks += ["\n".join(lines)] if lines else []
            continue
        found = shown(view, snapshot, order, rows_max)
        if found.rows:
            cells = [[column.text(row) for column in view.columns] for row in found.rows]
            left_out = found.matching - len(found.rows)
            more = f"\nand {left_out} more: --rows, or --json" if left_out else ""
            blocks.append(table([column.title for column in view.columns], cells) + more)
    return "\n\n".join(blocks)
