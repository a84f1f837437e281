"""The results of the experiments: a JSON file each, and one page of tables and verdicts made from all files.

So a run of a few experiments leaves the others unchanged, and the page can be made again without measuring.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from bench.common import describe
from bench.experiments.checksum import ChecksumCost
from bench.experiments.setup import (
    RECORD_BYTES,
    Experiment,
    Metric,
    Point,
    Sample,
    Setup,
    State,
    Verdict,
    judge,
    million_records,
)
from kera.cli.bench._payload import records_per_chunk

PAGE = "README.md"
CHECKSUM = "checksum_cost"
INTRODUCTION = """\
Made by `python -m bench experiments`; what is set for each point is in the JSON files. Records of 100 bytes, no keys,
given to the SDK in batches of 8,192 that it divides into chunks; where a note speaks of a call for each chunk, a batch
fills one chunk. Throughput is that of values, as median (least-most) of the rounds. Producers, brokers, backups and
consumers share this machine. A claim is what the thesis saw, as a ratio between the medians of two points: by
throughput (or latency), and beside it by what all processes bring for a second of processor time (or take of it for a
record). The ratio that decides is bold."""
OF: dict[Metric, str] = {
    "produced": "MB/s",
    "consumed": "MB/s",
    "per_core": "MB for each second of processor time",
    "latency": "latency",
    "cpu": "processor time",
}
"""Headings of ratios."""


@dataclasses.dataclass
class Found:
    """An experiment that was measured."""

    experiment: Experiment
    machine: Mapping[str, Any]
    seconds: float
    rounds: int
    samples: dict[tuple[str, int], list[Sample]]
    failures: dict[tuple[str, int], str]
    """The reasons why a point lacks all or some of its samples."""
    age: str = ""
    """The time since the commit that was measured, in words."""

    @property
    def verdicts(self) -> list[Verdict]:
        """One for each claim."""
        return [judge(claim, self.samples, self.machine["cores"]) for claim in self.experiment.claims]


# -- files -----------------------------------------------------------------------------------------------------


def save(found: Found, folder: Path) -> None:
    """Write an experiment's file."""
    experiment = found.experiment
    setups = {(point.series, point.x): point.setup for point in experiment.points}
    points = [
        {
            "series": series,
            "x": x,
            "setup": dataclasses.asdict(setups[series, x]),
            "rounds": [dataclasses.asdict(sample) for sample in samples],
        }
        for (series, x), samples in found.samples.items()
    ]
    claims = [
        {
            "text": verdict.claim.text,
            "wanted": verdict.bounds,
            "of": verdict.claim.metric,
            "ratios": {metric: ratio for metric, ratio in verdict.ratios.items() if math.isfinite(ratio)},
            "state": verdict.state,
        }
        for verdict in found.verdicts
    ]
    document = {
        "experiment": experiment.name,
        "figures": experiment.figures,
        "machine": dict(found.machine),
        "seconds": found.seconds,
        "rounds": found.rounds,
        "points": points,
        "failures": [{"series": series, "x": x, "why": why} for (series, x), why in found.failures.items()],
        "claims": claims,
    }
    write_json(folder / f"{experiment.name}.json", document)


def load(experiment: Experiment, folder: Path) -> Found | None:
    """Read an experiment's file; None if it was not measured.

    Points that were removed from the experiment, or whose setup has changed, are left out.
    """
    path = folder / f"{experiment.name}.json"
    if not path.exists():
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    known = {(point.series, point.x): dataclasses.asdict(point.setup) for point in experiment.points}
    defaults = dataclasses.asdict(Setup())
    samples = {
        key: [Sample(**sample) for sample in point["rounds"]]
        for point in document["points"]
        if known.get(key := (point["series"], point["x"])) == defaults | point["setup"]
    }
    failures = {(failure["series"], failure["x"]): failure["why"] for failure in document["failures"]}
    return Found(experiment, document["machine"], document["seconds"], document["rounds"], samples, failures)


def write_json(path: Path, document: object) -> None:
    """Write JSON with a line for each value, so that a new measurement gives a readable difference."""
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


# -- the page --------------------------------------------------------------------------------------------------


def page(all_found: Sequence[Found], checksum: ChecksumCost | None) -> str:
    """The whole page, as Markdown."""
    lines = [
        "# The thesis's experiments, on one machine",
        "",
        INTRODUCTION,
        "",
        *_overview(all_found),
    ]
    for found in all_found:
        lines += ["", *_section(found)]
        if checksum is not None and "8.4" in found.experiment.figures:
            lines += ["", *checksum.table()]
    return "\n".join(lines) + "\n"


def _overview(all_found: Iterable[Found]) -> list[str]:
    lines = ["| figure | what | claims |", "|---|---|---|"]
    for found in all_found:
        states = Counter(verdict.state for verdict in found.verdicts)
        link = f"[{found.experiment.title}](#{_anchor(_heading(found.experiment))})"
        counts = ", ".join(f"{states[state]} {state}" for state in get_args(State) if states[state])
        lines.append(f"| {found.experiment.figures} | {link} | {counts} |")
    return lines


def _heading(experiment: Experiment) -> str:
    return f"{figures_of(experiment)}: {experiment.title}"


def figures_of(experiment: Experiment) -> str:
    """The figures in words."""
    if not experiment.figures[0].isdigit():
        return experiment.figures[0].upper() + experiment.figures[1:]
    return f"Figure{'s' * (',' in experiment.figures)} {experiment.figures}"


def rounds_of(found: Found) -> str:
    """The rounds in words."""
    return f"{found.rounds} round{'s' * (found.rounds != 1)} of {found.seconds:g} s"


def _measured(found: Found) -> str:
    loads = [sample.load for samples in found.samples.values() for sample in samples if sample.load is not None]
    words = f"{rounds_of(found)}. {describe(dict(found.machine))}"
    if loads:
        words += f"; before points, which come one upon the other: {min(loads):.1f} to {max(loads):.1f}"
    return f"{words}. Measured {found.age}." if found.age else words


def _anchor(heading: str) -> str:
    """The anchor as GitHub makes it."""
    kept = (character for character in heading.lower() if character.isalnum() or character in " -_")
    return "".join(kept).replace(" ", "-")


def _section(found: Found) -> list[str]:
    experiment = found.experiment
    lines = [
        f"## {_heading(experiment)}",
        "",
        f"![{experiment.title}]({experiment.name}.png)",
        "",
        f"**The thesis:** {experiment.thesis}",
        "",
        f"**Here:** {experiment.note}",
        "",
        f"| claim | wanted | {' | '.join(OF[metric] for metric in _beside(experiment.plotted))} | state |",
        "|---|---|---|---|---|",
    ]
    for verdict in found.verdicts:
        claim = verdict.claim
        shown = _beside(claim.metric if claim.metric in ("produced", "consumed") else experiment.plotted)
        cells = [_ratio(verdict, metric) for metric in shown]
        lines.append(f"| {claim.text} | {verdict.bounds} | {' | '.join(cells)} | {verdict.words} |")
    lines += ["", *_table(found), "", _measured(found)]
    return lines


def _beside(metric: Metric) -> tuple[Metric, Metric]:
    return (metric, "cpu" if metric == "latency" else "per_core")


def _ratio(verdict: Verdict, metric: Metric) -> str:
    if metric not in verdict.ratios:
        return ""
    return f"**{verdict.ratios[metric]:.2f}**" if metric == verdict.claim.metric else f"{verdict.ratios[metric]:.2f}"


def _table(found: Found) -> list[str]:
    experiment = found.experiment
    if experiment.plotted == "latency":
        return _latency_table(found)
    followed = any(point.setup.consumer for point in experiment.points)
    head = ["series", experiment.x_label.partition(" (")[0], "produced, MB/s", "M records/s"]
    if followed:
        head.append("consumed, MB/s")
    head += ["CPU s/GB: producers + brokers + backups + consumers", "us a call"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for point in experiment.points:
        key = (point.series, point.x)
        cells = [point.series, f"{point.x:,}"]
        samples = found.samples.get(key)
        if not samples:
            lines.append(f"| {' | '.join(cells)} | {_missing(found, key)} |" + " |" * (len(head) - 3))
            continue
        produced = statistics.median(sample.produced_mb_per_s for sample in samples)
        cells += [spread(samples, "produced") + _missing(found, key), f"{million_records(produced):.2f}"]
        if followed:
            cells.append(spread(samples, "consumed") if point.setup.consumer else "")
        cells += [_cpu(samples), "" if point.series in experiment.others else _call(point, samples)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _latency_table(found: Found) -> list[str]:
    x = found.experiment.x_label.partition(" (")[0]
    lines = [f"| series | {x} | mean, ms | processor time of a record, us |", "|---|---|---|---|"]
    for point in found.experiment.points:
        key = (point.series, point.x)
        samples = found.samples.get(key, [])
        cells = [spread(samples, "latency") if samples else "", spread(samples, "cpu") if samples else ""]
        lines.append(f"| {point.series} | {point.x:,} | {cells[0]}{_missing(found, key)} | {cells[1]} |")
    return lines


def _missing(found: Found, key: tuple[str, int]) -> str:
    """Why a point has no figure, or how many of its rounds have none and why; empty if each round has one."""
    why, there = found.failures.get(key), len(found.samples.get(key, ()))
    if there and why:
        return f"; {found.rounds - there} of {found.rounds} rounds have no figure: {why}"
    return "" if there else why or "not measured"


def spread(samples: Sequence[Sample], metric: Metric) -> str:
    """Median (least-most)."""
    values = [sample.figure(metric) for sample in samples]
    return f"{_short(statistics.median(values))} ({_short(min(values))}-{_short(max(values))})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _call(point: Point, samples: Sequence[Sample]) -> str:
    """The producer's processor time for each batch."""
    records = point.setup.batch_records or records_per_chunk(RECORD_BYTES, point.setup.chunk_bytes, lean=True)
    us = statistics.median(sample.producers_s_per_gb for sample in samples) * records * RECORD_BYTES / 1e3
    return _short(us) if us else ""


def _cpu(samples: Sequence[Sample]) -> str:
    names = ("producers_s_per_gb", "brokers_s_per_gb", "backups_s_per_gb", "consumers_s_per_gb")
    medians = [statistics.median(getattr(sample, name) for sample in samples) for name in names]
    return " + ".join(f"{value:.2f}" for value in medians)
