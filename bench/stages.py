"""What each stage of a chunk's way costs: per request, per chunk and per byte, beside what the machine can do.

The stages run one after the other in this process, each alone (`bench.stage_parts`): the classes are the real ones, the
connections are not. So no cores have to be quiet, and the figures come out again. Measured is the processor time of
the thread for each single request; of many, in rounds spread over the whole run, the low quantile counts (`QUANTILE`):
it is of requests that nobody disturbed. Everything is warm then: a broker that does something else between two
requests, or sleeps, pays more. What the kernel does is in the rows of the sockets alone, and there the median counts:
of a thread that sleeps and is woken, virtual machines now and then count too little.

From requests of 1 to 16 chunks of 1 KiB to 1 MiB

    cost = per request + chunks x per chunk + bytes x per byte

is fitted by least squares of the relative errors, none of the three below 0; "error" is what remains, the root of the
mean square. The error of a difference of two stages is relative to the larger one. Where all requests have one chunk,
what it costs is in what a request costs.

The limit of a stage is what has to be done to its bytes, however it is programmed: to copy them, to take their
checksum. Both are measured in the same rounds, for the same sizes. The share is the limit's part of the stage's cost:
per byte of the fitted costs, else of requests of one chunk as they were measured. 100 % is all that the machine can do;
somewhat more is possible, for what a stage copies to may be warmer than what the limit copied to.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop

from bench.common import describe, directory, machine, parser, say
from bench.references import append_m_per_s, copy_s_per_gb, socket_mb_per_s
from bench.stage_parts import (
    Batches,
    Load,
    Memory,
    Part,
    Pulls,
    Pushes,
    Records,
    Replicas,
    Samples,
    Sockets,
    Writes,
    be_other_end,
)
from kera.core.process import die_with_parent
from kera.core.settings import KIB, MIB

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
    "push: run to batches, no checksums": (),
}
"""The stages in the order of the table, each with what has to be done to its bytes."""


class Cost(NamedTuple):
    """What a stage takes, and how far the fit is off."""

    request_us: float
    chunk_us: float
    byte_s_per_gb: float
    error: float
    """Root mean square of the relative errors."""

    def of(self, load: Load) -> float:
        """Microseconds of a request."""
        return self.request_us + load.chunks * self.chunk_us + load.size_bytes * self.byte_s_per_gb / 1000


def quantile(values: Sequence[float], part: float = QUANTILE) -> float:
    """The value below which `part` of them are."""
    return sorted(values)[int(part * len(values))]


def fit(measured_us: Mapping[Load, float], whole_us: Mapping[Load, float] | None = None) -> Cost:
    """The cost that explains best what was measured; `whole_us`: what errors are relative to, if it is something else.

    When all requests have as many chunks, none of the cost is said to be theirs.
    """
    loads = list(measured_us)
    scale = np.array([max((whole_us or measured_us)[load], 1e-9) for load in loads])
    terms = np.array([[1.0, load.chunks, load.size_bytes / 1000] for load in loads]) / scale[:, None]
    wanted = np.array([measured_us[load] for load in loads]) / scale
    kept = (0, 1, 2) if len({load.chunks for load in loads}) > 1 else (0, 2)
    # Of all fits without some of the terms, the best that has no negative one: no other such fit is better.
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
    """What each stage takes for each load, in microseconds; a copy what a broker takes longer that has one made."""
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
    """Of all stages."""
    return {
        stage: fit(of_stage, measured[WITH_COPY] if stage == COPY_ALONE else None)
        for stage, of_stage in measured.items()
    }


def share(stage: str, measured: Mapping[str, Mapping[Load, float]], load: Load) -> float | None:
    """The limit's part of what a request takes; None without a limit."""
    taken = measured[stage].get(load)
    if not LIMITS[stage] or not taken:
        return None
    return sum(measured[limit][load] for limit in LIMITS[stage]) / taken


def byte_share(stage: str, costs: Mapping[str, Cost]) -> float | None:
    """The same per byte."""
    if not LIMITS[stage] or not costs[stage].byte_s_per_gb:
        return None
    return sum(costs[limit].byte_s_per_gb for limit in LIMITS[stage]) / costs[stage].byte_s_per_gb


def table(measured: Mapping[str, Mapping[Load, float]], costs: Mapping[str, Cost]) -> Iterator[str]:
    """Lines of Markdown."""
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
    """What is done once per record; the limit of `send` is a call that appends to a list."""
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


# -- measuring -----------------------------------------------------------------------------------------------------


async def measure(root: Path, seconds: float) -> tuple[Samples, int]:
    """Rounds of all parts in turn, for so long; and how often each had its turn."""
    samples, passes = Samples(), -1
    async with contextlib.AsyncExitStack() as stack:
        parts: list[Part] = [Memory(LOADS)]
        parts += [stack.enter_context(Sockets.connected(kind, LOADS)) for kind in ("unix", "tcp")]
        parts += [Batches(LOADS), Records(LOADS), Replicas(LOADS), Pulls(LOADS)]
        broker = Writes(root, LOADS)
        stack.push_async_callback(broker.close)
        parts.append(broker)
        parts += [Pushes(LOADS, verify=verify) for verify in (True, False)]
        end_s = time.monotonic() + seconds
        while passes < 1 or time.monotonic() < end_s:
            for part in parts:
                for load in part.loads:
                    await part.rounds(load, samples)
            passes += 1
            if not passes:
                samples = Samples()  # caches, pages and connections were made: that one does not count
    return samples, passes


def main() -> int:
    """Measure, or be the other end of a socket."""
    made = parser(__doc__)
    made.add_argument("--seconds", type=float, default=60.0, help="for all rounds")
    made.add_argument("--out", type=Path, default=None, help="also write the figures there, as JSON")
    made.add_argument("--other-end", type=int, default=None, help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.other_end is not None:
        die_with_parent()
        be_other_end(arguments.other_end)
        return 0
    with directory(arguments) as root:
        where = machine(root)
        samples, passes = uvloop.run(measure(root, arguments.seconds))
    references = {
        "copy_s_per_gb": min(copy_s_per_gb() for _ in range(3)),
        "socket_mb_per_s": max(socket_mb_per_s() for _ in range(3)),
        "append_m_per_s": max(append_m_per_s() for _ in range(3)),
    }
    say(f"{passes} passes")
    measured = reduced(samples)
    costs = costs_of(measured)
    records = {what: quantile(values) / 1000 for what, values in samples.records.items()}
    turn_us = quantile(samples.turns) / 1000
    print(f"## stages\n\n{describe(where)}; {passes} passes\n")
    print("\n".join(table(measured, costs)))
    print("\n".join(["", *record_table(records, references)]))
    print(
        f"\nWhole blocks (`bench.references`): copied in {references['copy_s_per_gb']:.4f} s/GB; through a unix socket"
        f" {references['socket_mb_per_s']:,.0f} MB/s. A turn of the event loop with nothing to do, of which stages that"
        f" wait have some: {turn_us:.1f} us."
    )
    found = {"bench": "stages", "machine": where, "passes": passes, "references": references, "turn_us": turn_us}
    text = json.dumps({**found, "records_us": records, "stages": plain(measured, costs)})
    print(f"\n{text}", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
