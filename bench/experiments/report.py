"""The results of the experiments: a JSON file each, and one page of tables and verdicts made from all that are there.

So a run of a few experiments leaves the others as they were, and the page is made anew without measuring.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import describe
from bench.experiments.checksum import ChecksumCost
from bench.experiments.setup import (
    Experiment,
    Metric,
    Sample,
    Verdict,
    judge,
    million_records,
)

PAGE = "README.md"
CHECKSUM = "checksum_cost"
INTRODUCTION = """\
Made by `python -m bench experiments`; what is set for each point is in the JSON files. Records of 100 bytes, no keys,
given to the SDK as ready batches that fill a chunk; throughput is that of values, as median (least-most) of the rounds.
Producers, brokers, backups and consumers share this machine. A claim is what the thesis saw, as a ratio between the
medians of two points."""


@dataclasses.dataclass
class Found:
    """An experiment that was measured."""

    experiment: Experiment
    machine: Mapping[str, Any]
    seconds: float
    rounds: int
    samples: dict[tuple[str, int], list[Sample]]
    failures: dict[tuple[str, int], str]
    """Points that could not be measured, and why."""

    @property
    def verdicts(self) -> list[Verdict]:
        """One for each claim."""
        return [judge(claim, self.samples) for claim in self.experiment.claims]


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
        {"text": verdict.claim.text, "wanted": verdict.bounds, "ratio": verdict.ratio, "holds": verdict.holds}
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
    """Read an experiment's file; None where it was not measured. Points that it does not have any more are left out."""
    path = folder / f"{experiment.name}.json"
    if not path.exists():
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    known = {(point.series, point.x) for point in experiment.points}
    samples = {
        key: [Sample(**sample) for sample in point["rounds"]]
        for point in document["points"]
        if (key := (point["series"], point["x"])) in known
    }
    failures = {(failure["series"], failure["x"]): failure["why"] for failure in document["failures"]}
    return Found(experiment, document["machine"], document["seconds"], document["rounds"], samples, failures)


def write_json(path: Path, document: object) -> None:
    """With a line for each value, so that a new measurement is a readable difference."""
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


# -- the page --------------------------------------------------------------------------------------------------


def page(all_found: Sequence[Found], checksum: ChecksumCost | None) -> str:
    """All of it, as Markdown."""
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
    lines = ["| figure | what | as the thesis says |", "|---|---|---|"]
    for found in all_found:
        holding = sum(verdict.holds for verdict in found.verdicts)
        link = f"[{found.experiment.title}](#{_anchor(_heading(found.experiment))})"
        lines.append(f"| {found.experiment.figures} | {link} | {holding} of {len(found.verdicts)} claims |")
    return lines


def _heading(experiment: Experiment) -> str:
    return f"{figures_of(experiment)}: {experiment.title}"


def figures_of(experiment: Experiment) -> str:
    """In words."""
    if not experiment.figures[0].isdigit():
        return experiment.figures[0].upper() + experiment.figures[1:]
    return f"Figure{'s' * (',' in experiment.figures)} {experiment.figures}"


def rounds_of(found: Found) -> str:
    """In words."""
    return f"{found.rounds} round{'s' * (found.rounds != 1)} of {found.seconds:g} s"


def _anchor(heading: str) -> str:
    """As GitHub makes it."""
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
        "| claim | wanted | here | same shape |",
        "|---|---|---|---|",
    ]
    for verdict in found.verdicts:
        ratio = "not measured" if verdict.ratio is None else f"{verdict.ratio:.2f}"
        lines.append(f"| {verdict.claim.text} | {verdict.bounds} | {ratio} | {'yes' if verdict.holds else 'no'} |")
    lines += ["", *_table(found), "", f"{rounds_of(found)}. {describe(dict(found.machine))}"]
    return lines


def _table(found: Found) -> list[str]:
    experiment = found.experiment
    if experiment.plotted == "latency":
        return _latency_table(found)
    followed = any(point.setup.consumer for point in experiment.points)
    head = ["series", experiment.x_label.partition(" (")[0], "produced, MB/s", "M records/s"]
    if followed:
        head.append("consumed, MB/s")
    head.append("CPU s/GB: producers + brokers + backups + consumers")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for point in experiment.points:
        key = (point.series, point.x)
        cells = [point.series, f"{point.x:,}"]
        samples = found.samples.get(key)
        if not samples:
            why = found.failures.get(key, "not measured")
            lines.append(f"| {' | '.join(cells)} | {why} |" + " |" * (len(head) - 3))
            continue
        produced = statistics.median(sample.produced_mb_per_s for sample in samples)
        cells += [spread(samples, "produced"), f"{million_records(produced):.2f}"]
        if followed:
            cells.append(spread(samples, "consumed") if point.setup.consumer else "")
        cells.append(_cpu(samples))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _latency_table(found: Found) -> list[str]:
    x = found.experiment.x_label.partition(" (")[0]
    lines = [f"| series | {x} | mean, ms | processor time of a record, us |", "|---|---|---|---|"]
    for point in found.experiment.points:
        samples = found.samples.get((point.series, point.x))
        cells = (spread(samples, "latency"), spread(samples, "cpu")) if samples else ("not measured", "")
        lines.append(f"| {point.series} | {point.x:,} | {' | '.join(cells)} |")
    return lines


def spread(samples: Sequence[Sample], metric: Metric) -> str:
    """Median (least-most)."""
    values = [sample.figure(metric) for sample in samples]
    return f"{_short(statistics.median(values))} ({_short(min(values))}-{_short(max(values))})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _cpu(samples: Sequence[Sample]) -> str:
    names = ("producers_s_per_gb", "brokers_s_per_gb", "backups_s_per_gb", "consumers_s_per_gb")
    medians = [statistics.median(getattr(sample, name) for sample in samples) for name in names]
    return " + ".join(f"{value:.2f}" for value in medians)
