"""The regression gate: ratios of a few short measurements, compared with recorded ones. Three minutes.

Ratios, since absolute figures are those of a machine and of its other load: everything is compared with the machine's
speed without KerA at that minute (`bench.references`), or with another part of KerA. The best of several rounds counts
for each figure, as other load can only make it worse; ratios are made of these. (The best of the rounds' ratios would
come from a round whose denominator was disturbed.)

Exit code 1 when a ratio has lost more than ``--loss-max`` (a quarter) against ``bench/results/smoke.json``.
``--record`` writes new ones there: after a change that is meant to change them, on a quiet machine. ``--record-new``
writes only ratios that were never recorded, and keeps the others.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import epochs, references
from bench.common import describe, directory, machine, parser, say
from bench.compare.contestant import Failed
from bench.experiments.measure import Site, site
from bench.experiments.setup import RECORD_BYTES, Place, Sample, Setup
from kera.core.base.settings import GIB, KIB, MIB

RECORDED = Path("bench/results/smoke.json")
LOSS_MAX = 0.25
PLACE = Place(backups=1, arena_bytes=3 * GIB)
BACKLOG_BYTES = 400_000_000
EPOCH_MS, EPOCHS_RECORDS = 1000, 800_000
LARGE = Setup(chunk_bytes=256 * KIB, request_bytes=MIB)

Round = Mapping[str, float]
"""Figures of a round by name, with the unit last."""

BEST: dict[str, Callable[[Iterable[float]], float]] = {
    "copy_s_per_gb": min,
    "socket_mb_per_s": max,
    "large_mb_per_s": max,
    "producer_s_per_gb": min,
    "broker_s_per_gb": min,
    "replicated_mb_per_s": max,
    "small_mb_per_s": max,
    "keyed_mb_per_s": max,
    "push_s_per_gb": min,
    "pull_s_per_gb": min,
    "append_m_per_core_s": max,
    "send_m_records_per_core_s": max,
    "ping_ms": min,
    "ack_p50_ms": min,
    "plain_m_per_core_s": max,
    "epochs_m_per_core_s": max,
    "ordered_m_per_core_s": max,
    "strict_m_per_core_s": max,
}
"""For each figure, the function that picks the best of several rounds."""


def best(rounds: Sequence[Round]) -> Round:
    """The best of each figure, whichever round it is from."""
    return {name: best_of(each[name] for each in rounds) for name, best_of in BEST.items()}


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A ratio that is compared with its own value at another time."""

    title: str
    of: Callable[[Round], float]
    more_is_better: bool = True

    def loss(self, then: float, now: float) -> float:
        """The lost share; a negative value is a gain."""
        return 1 - now / then if self.more_is_better else 1 - then / now


RATIOS: dict[str, Ratio] = {
    "send_batch": Ratio(
        "send_batch, MB/s / raw unix socket", lambda found: found["large_mb_per_s"] / found["socket_mb_per_s"]
    ),
    "replicated": Ratio(
        "with one backup / without", lambda found: found["replicated_mb_per_s"] / found["large_mb_per_s"]
    ),
    "small_requests": Ratio(
        "requests of 16 KiB / of 1 MiB", lambda found: found["small_mb_per_s"] / found["large_mb_per_s"]
    ),
    "keyed": Ratio(
        "batches of 10,000 records with keys over 128 streamlets / requests of 1 MiB to one",
        lambda found: found["keyed_mb_per_s"] / found["large_mb_per_s"],
    ),
    "push": Ratio("pushed / pulled, GB per core", lambda found: found["pull_s_per_gb"] / found["push_s_per_gb"]),
    "send": Ratio(
        "send, records per core / list.append",
        lambda found: found["send_m_records_per_core_s"] / found["append_m_per_core_s"],
    ),
    "ack": Ratio(
        "ack at 1,000 records/s, p50 / raw ping-pong",
        lambda found: found["ack_p50_ms"] / found["ping_ms"],
        more_is_better=False,
    ),
    "epochs": Ratio(
        "epochs of 1 s, in the order of entries / a plain consumer, records per core",
        lambda found: found["epochs_m_per_core_s"] / found["plain_m_per_core_s"],
    ),
    "ordered": Ratio(
        "ordered consumer / strict merge, records per core",
        lambda found: found["ordered_m_per_core_s"] / found["strict_m_per_core_s"],
    ),
    "producer_cpu": Ratio(
        "producer's processor time per byte / of a copy",
        lambda found: found["producer_s_per_gb"] / found["copy_s_per_gb"],
        more_is_better=False,
    ),
    "broker_cpu": Ratio(
        "broker's processor time per byte / of a copy",
        lambda found: found["broker_s_per_gb"] / found["copy_s_per_gb"],
        more_is_better=False,
    ),
}


@dataclasses.dataclass(frozen=True)
class Line:
    """A recorded ratio and its new value."""

    name: str
    then: float | None
    """None: it was not recorded."""
    now: float
    loss: float
    ok: bool


def judge(recorded: Mapping[str, float], now: Mapping[str, float], loss_max: float) -> list[Line]:
    """Compare each ratio with the recorded one."""
    lines = []
    for name, value in now.items():
        then = recorded.get(name)
        loss = 0.0 if then is None else RATIOS[name].loss(then, value)
        lines.append(Line(name, then, value, loss, loss <= loss_max))
    return lines


def with_new(recorded: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """The recorded ratios, with the measured ones that are not in them, and their inputs."""
    new = {name: value for name, value in measured["ratios"].items() if name not in recorded["ratios"]}
    if not new:
        return dict(recorded)
    return {
        **recorded,
        "ratios": {**recorded["ratios"], **new},
        "added": [*recorded.get("added", []), {**measured, "ratios": new}],
    }


def table(lines: Sequence[Line]) -> str:
    """As Markdown."""
    rows = ["| ratio | better | then | now | as good | |", "|---|---|---|---|---|---|"]
    for line in lines:
        ratio = RATIOS[line.name]
        then = "" if line.then is None else f"{line.then:.3g}"
        change = "new" if line.then is None else f"{1 - line.loss:.2f} ×"
        verdict = "ok" if line.ok else "**lost**"
        better = "more" if ratio.more_is_better else "less"
        rows.append(f"| {ratio.title} | {better} | {then} | {line.now:.3g} | {change} | {verdict} |")
    return "\n".join(rows)


# -- the measurement ---------------------------------------------------------------------------------------------


def measure(cluster: Site, seconds: float) -> Round:
    """Measure one round of everything."""

    def sample(setup: Setup, **more: Any) -> Sample:
        return cluster.measure(setup, seconds=seconds, **more)

    found = {"copy_s_per_gb": references.copy_s_per_gb(), "socket_mb_per_s": references.socket_mb_per_s()}
    large = sample(LARGE)
    found |= {
        "large_mb_per_s": large.produced_mb_per_s,
        "producer_s_per_gb": large.producers_s_per_gb,
        "broker_s_per_gb": large.brokers_s_per_gb,
    }
    found["replicated_mb_per_s"] = sample(dataclasses.replace(LARGE, replication=1)).produced_mb_per_s
    small = Setup(chunk_bytes=16 * KIB, request_bytes=16 * KIB, requests_in_flight=64)
    found["small_mb_per_s"] = sample(small).produced_mb_per_s
    keyed = Setup(streamlets=128, chunk_bytes=256 * KIB, batch_records=10_000, keys="random")
    found["keyed_mb_per_s"] = sample(keyed).produced_mb_per_s
    pushed = sample(dataclasses.replace(LARGE, consumer="push"), read_backlog_bytes=BACKLOG_BYTES)
    pulled = sample(dataclasses.replace(LARGE, consumer="pull"), read_backlog_bytes=BACKLOG_BYTES)
    found["push_s_per_gb"] = pushed.brokers_s_per_gb + pushed.consumers_s_per_gb
    found["pull_s_per_gb"] = pulled.brokers_s_per_gb + pulled.consumers_s_per_gb
    found["append_m_per_core_s"] = references.append_m_per_s()
    one_by_one = sample(dataclasses.replace(LARGE, send="record"))
    found["send_m_records_per_core_s"] = 1e3 / RECORD_BYTES / one_by_one.producers_s_per_gb
    found["ping_ms"] = references.ping_ms()
    found["ack_p50_ms"] = sample(Setup(rate=1000.0)).ack_p50_ms or float("inf")
    speeds = epochs.core_speeds(cluster.cluster, EPOCH_MS, EPOCHS_RECORDS)
    found["plain_m_per_core_s"], found["strict_m_per_core_s"] = speeds[epochs.PLAIN], speeds[epochs.STRICT]
    found["epochs_m_per_core_s"], found["ordered_m_per_core_s"] = speeds[epochs.ENTRY_ORDER], speeds[epochs.ORDERED]
    return found


def run(rounds: int, seconds: float, folder: Path) -> list[Round]:
    """Run all rounds, on one cluster."""
    found = []
    with site(PLACE, folder) as cluster:
        for number in range(rounds):
            begun_s = time.monotonic()
            found.append(measure(cluster, seconds))
            say(f"round {number + 1} of {rounds}: {time.monotonic() - begun_s:.0f} s")
    return found


def main() -> int:
    """Measure, compare, and perhaps record."""
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=3, help="of which each figure's best counts")
    made.add_argument("--seconds", type=float, default=1.5, help="of each measurement")
    made.add_argument("--loss-max", type=float, default=LOSS_MAX, help="share of a ratio that may be lost")
    made.add_argument("--recorded", type=Path, default=RECORDED, help="the file of the recorded ratios")
    writing = made.add_mutually_exclusive_group()
    writing.add_argument("--record", action="store_true", help="write what is measured there")
    writing.add_argument("--record-new", action="store_true", help="write there only what was never recorded")
    arguments = made.parse_args()
    recorded: dict[str, Any] = {"ratios": {}}
    if arguments.recorded.exists():
        recorded = json.loads(arguments.recorded.read_text(encoding="utf-8"))
    with directory(arguments) as folder:
        where = machine(folder)
        try:
            rounds = run(arguments.rounds, arguments.seconds, folder)
        except Failed as error:
            say(f"the measurement has failed: {error}")
            return 1
    figures = best(rounds)
    now = {name: float(f"{ratio.of(figures):.4g}") for name, ratio in RATIOS.items()}
    lines = judge(recorded["ratios"], now, arguments.loss_max)
    print(f"{describe(where)}\n\n{table(lines)}\n")
    for name in figures:
        print(f"{name}: {', '.join(f'{each[name]:.4g}' for each in rounds)}")
    if arguments.record or arguments.record_new:
        document: dict[str, Any] = {"machine": where, "ratios": now, "rounds": rounds}
        if arguments.record_new:
            document = with_new(recorded, document)
        arguments.recorded.parent.mkdir(parents=True, exist_ok=True)
        arguments.recorded.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        say(f"recorded in {arguments.recorded}")
        return 0
    if not recorded["ratios"]:
        say(f"nothing to compare with: {arguments.recorded} is made by --record")
    return 0 if all(line.ok for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
