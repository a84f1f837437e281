"""The costs of stages: reduced from single requests, fitted, compared with their limits, and as tables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bench.stages.part import Load, Samples
from kera.core.base.settings import KIB, MIB

QUANTILE = 0.1
SIZES = (1 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1 * MIB)
COUNTS = (1, 4, 16)
REQUEST_BYTES_MAX = 4 * MIB
LOADS = [Load(count, size) for size in SIZES for count in COUNTS if count * size <= REQUEST_BYTES_MAX]
SHOWN = (Load(1, 16 * KIB), Load(1, 1 * MIB))

WITH_COPY = "broker: frame to answer, one copy"
COPY_ALONE = "broker: the copy alone"
LIMITS: dict[str, tuple[str, ...]] = {
    "copy": (),
    "crc32c": (),
    "unix socket: send": ("copy",),
    "unix socket: receive": ("copy",),
    "tcp socket: send": ("copy",),
    "tcp socket: receive": ("copy",),
    "producer: send_batch to frame": ("copy", "crc32c"),
    "producer: records to frame": ("copy", "crc32c"),
    "producer: answer to delivery": (),
    "broker: frame to answer": ("copy", "crc32c"),
    "broker: of it verify": ("crc32c",),
    "broker: of it append": ("copy",),
    WITH_COPY: ("copy", "crc32c"),
    COPY_ALONE: (),
    "backup: frame to answer": ("copy", "crc32c"),
    "pull: answer to batches": ("crc32c",),
    "push: run to batches": ("crc32c",),
    "push: run to batches, unchecked": (),
}
"""The stages in the order of the table, each with the necessary work on its bytes."""


class Cost(NamedTuple):
    """The cost of a stage, and the error of the fit."""

    request_us: float
    chunk_us: float
    byte_s_per_gb: float
    error: float
    """Root mean square of the relative errors."""

    def of(self, load: Load) -> float:
        """Microseconds of a request."""
        return self.request_us + load.chunks * self.chunk_us + load.size_bytes * self.byte_s_per_gb / 1000


def quantile(values: Sequence[float], part: float = QUANTILE) -> float:
    """The value below which `part` of the values are."""
    return sorted(values)[int(part * len(values))]


def fit(measured_us: Mapping[Load, float], whole_us: Mapping[Load, float] | None = None) -> Cost:
    """The cost that explains the measurements best; `whole_us`: the base of relative errors, if it differs.

    If all requests have equally many chunks, the cost of chunks is not separated.
    """
    loads = list(measured_us)
    scale = np.array([max((whole_us or measured_us)[load], 1e-9) for load in loads])
    terms = np.array([[1.0, load.chunks, load.size_bytes / 1000] for load in loads]) / scale[:, None]
    wanted = np.array([measured_us[load] for load in loads]) / scale
    kept = (0, 1, 2) if len({load.chunks for load in loads}) > 1 else (0, 2)
    # The best of all fits with some terms left out that has no negative term: no other such fit is better.
    best, least = np.zeros(3), float(np.mean(wanted**2))
    for count in range(1, len(kept) + 1):
        for columns in itertools.combinations(kept, count):
            found = np.linalg.lstsq(terms[:, columns], wanted, rcond=None)[0]
            error = float(np.mean((terms[:, columns] @ found - wanted) ** 2))
            if (found >= 0).all() and error < least:
                best, least = np.zeros(3), error
                best[list(columns)] = found
    return Cost(float(best[0]), float(best[1]), float(best[2]), math.sqrt(least))


def reduced(samples: Samples) -> dict[str, dict[Load, float]]:
    """The time of each stage for each load, in microseconds; a copy is the additional time of a broker with one."""
    found = {
        stage: {load: quantile(values, _part(stage)) / 1000 for load, values in of_stage.items()}
        for stage, of_stage in samples.requests.items()
    }
    alone, copied = found["broker: frame to answer"], found[WITH_COPY]
    found[COPY_ALONE] = {load: max(0.0, copied[load] - alone[load]) for load in alone}
    return {stage: found[stage] for stage in LIMITS}


def _part(stage: str) -> float:
    return 0.5 if "socket" in stage else QUANTILE


def costs_of(measured: Mapping[str, Mapping[Load, float]]) -> dict[str, Cost]:
    """The costs of all stages."""
    return {
        stage: fit(of_stage, measured[WITH_COPY] if stage == COPY_ALONE else None)
        for stage, of_stage in measured.items()
    }


def share(stage: str, measured: Mapping[str, Mapping[Load, float]], load: Load) -> float | None:
    """The limit's share of a request's time; None without a limit."""
    taken = measured[stage].get(load)
    if not LIMITS[stage] or not taken:
        return None
    return sum(measured[limit][load] for limit in LIMITS[stage]) / taken


def byte_share(stage: str, costs: Mapping[str, Cost]) -> float | None:
    """The same share per byte."""
    if not LIMITS[stage] or not costs[stage].byte_s_per_gb:
        return None
    return sum(costs[limit].byte_s_per_gb for limit in LIMITS[stage]) / costs[stage].byte_s_per_gb


def table(measured: Mapping[str, Mapping[Load, float]], costs: Mapping[str, Cost]) -> Iterator[str]:
    """The table as lines of Markdown."""
    shown = [f"{load.chunk_bytes // KIB:,} KiB" for load in SHOWN]
    head = ["stage", "per request, us", "per chunk, us", "per byte, s/GB", "error"]
    head += [f"{size}, us" for size in shown] + ["limit", "share per byte", *(f"share, {size}" for size in shown)]
    yield _row(head)
    yield _row(["---"] * len(head))
    for stage, cost in costs.items():
        counts = {load.chunks for load in measured[stage]}
        cells = [stage, f"{cost.request_us:.1f}", f"{cost.chunk_us:.1f}" if len(counts) > 1 else ""]
        cells += [f"{cost.byte_s_per_gb:.4f}", f"{cost.error:.0%}"]
        cells += [f"{measured[stage][load]:.1f}" for load in SHOWN]
        cells += [" + ".join(LIMITS[stage]), _percent(byte_share(stage, costs))]
        cells += [_percent(share(stage, measured, load)) for load in SHOWN]
        yield _row(cells)


def record_table(records_us: Mapping[str, float], references: Mapping[str, float]) -> Iterator[str]:
    """The cost per record; the limit of `send` is a call that appends to a list."""
    yield _row(["per record of 100 bytes", "us", "million/s", "a call that appends, million/s", "share"])
    yield _row(["---"] * 5)
    for what, taken_us in records_us.items():
        limited = what.startswith("send")
        limit = references["append_m_per_s"]
        cells = [what, f"{taken_us:.3f}", f"{1 / taken_us:.2f}"]
        yield _row(cells + ([f"{limit:.1f}", f"{1 / taken_us / limit:.0%}"] if limited else ["", ""]))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _percent(part: float | None) -> str:
    return "" if part is None else f"{part:.0%}"


def plain(measured: Mapping[str, Mapping[Load, float]], costs: Mapping[str, Cost]) -> dict[str, Any]:
    """All figures, for JSON; loads as ``16x1024``: chunks, and bytes of each."""
    return {
        stage: {
            **costs[stage]._asdict(),
            "limit": LIMITS[stage],
            "share_per_byte": byte_share(stage, costs),
            "us": {f"{load.chunks}x{load.chunk_bytes}": value for load, value in of_stage.items()},
        }
        for stage, of_stage in measured.items()
    }
