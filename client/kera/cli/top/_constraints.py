"""Latency constraints as rows: the latency of records, its limit, and the hop that is worst. Pure."""

from __future__ import annotations

from kera.cli._latency_text import hop_text
from kera.cli.top._rows import ConstraintRow
from kera.cli.top._sample import Sample
from kera.cli.top._text import NOBODY_KNOWS
from kera.client import LatencyDescription

HELD = frozenset(("held", "unknown"))
"""States without a problem; a constraint is ``unknown`` when no records pass through its path."""


def constraint_rows(sample: Sample) -> tuple[ConstraintRow, ...]:
    """Return the rows of all latency constraints, in their order; those that were asked for in full have hops."""
    return tuple(_row(sample.hops.get(each.constraint.name, each)) for each in sample.constraints)


def _row(found: LatencyDescription) -> ConstraintRow:
    constraint, worst = found.constraint, found.worst_hop
    took_us = found.p99_us if constraint.statistic == "p99" else found.mean_us
    return ConstraintRow(
        name=constraint.name,
        state=found.state,
        why=(found.reason,) if found.reason else (),
        path=constraint.path,
        limit_ms=constraint.limit_ms,
        statistic=constraint.statistic,
        window_ms=constraint.window_ms,
        violations=found.violations,
        mean_us=found.mean_us if worst is not None else None,
        p99_us=found.p99_us if worst is not None else None,
        used=took_us / (constraint.limit_ms * 1000) if worst is not None and constraint.limit_ms else None,
        least_limit_us=found.least_limit_us or None,
        worst_hop=worst,
        hops=found.hops or None,
    )


def worst_text(row: ConstraintRow) -> str:
    """Return the worst hop in few words."""
    return NOBODY_KNOWS if row.worst_hop is None else hop_text(row.worst_hop, by_p99=row.statistic == "p99")


def worst_us(row: ConstraintRow) -> int | None:
    """Return the time of the worst hop, in the statistic of the limit."""
    hop = row.worst_hop
    return None if hop is None else hop.p99_us if row.statistic == "p99" else hop.mean_us
