"""The thesis's experiments: ``python -m bench.experiments``, or ``make bench RUN=experiments``.

Measures the experiments that ``--only`` names, or all, and makes the page of all recorded ones in ``--out``: tables,
plots, and for each figure of chapter 8 the thesis's observation and whether it holds here.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.age import age_of
from bench.common import directory, machine, parser, say
from bench.experiments import checksum, epochs, kafka, latency, locality, report
from bench.experiments.catalogue import EXPERIMENTS
from bench.experiments.measure import measure
from bench.experiments.setup import Experiment

OUT = Path("bench/results/experiments")
OTHERS = {
    locality.EXPERIMENT.name: locality.measure,
    epochs.EXPERIMENT.name: epochs.measure,
    **{each.name: kafka.measure for each in kafka.EXPERIMENTS},
    **{each.name: latency.measure for each in latency.EXPERIMENTS},
}
"""The functions that measure special experiments, by name."""
QUIET_S = 600.0
"""Maximum wait for a quiet machine."""


def chosen(only: Sequence[str]) -> list[Experiment]:
    """Experiments by name or by figure; without any, all. Raises `SystemExit` for unknown ones."""
    if not only:
        return list(EXPERIMENTS)
    found = [each for each in EXPERIMENTS if each.name in only or set(each.figures.split(", ")) & set(only)]
    named = {name for each in found for name in (each.name, *each.figures.split(", "))}
    if unknown := set(only) - named - {report.CHECKSUM}:
        names = ", ".join(each.name for each in EXPERIMENTS)
        raise SystemExit(f"no experiment has the name or figure {', '.join(sorted(unknown))}; there are: {names}")
    return found


def run(arguments: argparse.Namespace) -> None:
    """Measure, write, and make the page."""
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    if not arguments.page:
        if not arguments.only or report.CHECKSUM in arguments.only:
            checksum.measure().save(out / f"{report.CHECKSUM}.json")
        with directory(arguments) as folder:
            for experiment in chosen(arguments.only):
                wait_until_quiet(arguments.load_max)
                begun_s, found_machine = time.monotonic(), machine(out)
                measuring = OTHERS.get(experiment.name, measure)
                measured = measuring(experiment, rounds=arguments.rounds, seconds=arguments.seconds, folder=folder)
                found = report.Found(
                    experiment,
                    found_machine,
                    arguments.seconds,
                    arguments.rounds,
                    measured.samples,
                    measured.failures,
                )
                report.save(found, out)
                say(f"{experiment.name}: {time.monotonic() - begun_s:.0f} s")
    make_page(out)


def make_page(out: Path) -> None:
    """The page and plots of the results in the folder."""
    from bench.experiments.plots import plot  # noqa: PLC0415 - matplotlib is wanted at the end only

    there = [found for each in EXPERIMENTS if (found := report.load(each, out)) is not None]
    for found in there:
        found.age = str(age_of(out / f"{found.experiment.name}.json") or "")
    cost = checksum.ChecksumCost.load(out / f"{report.CHECKSUM}.json")
    (out / report.PAGE).write_text(report.page(there, cost), encoding="utf-8")
    for found in there:
        plot(found, out / f"{found.experiment.name}.png")
    say(f"{out / report.PAGE}")


def wait_until_quiet(load_max: float | None) -> None:
    """Wait until the load average is at most this. Raises `SystemExit` if it stays higher."""
    end_s = time.monotonic() + QUIET_S
    while load_max is not None and (load := os.getloadavg()[0]) > load_max:
        if time.monotonic() > end_s:
            raise SystemExit(f"the machine has other work: its load average is {load:.1f} after {QUIET_S:.0f} s")
        time.sleep(1)


def main() -> int:
    """Measure."""
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", default=[], metavar="NAME", help="experiments, or figures of the thesis")
    made.add_argument("--rounds", type=int, default=2)
    made.add_argument("--seconds", type=float, default=2.0, help="that are measured of each point in a round")
    made.add_argument("--load-max", type=float, help="before an experiment, wait for a load average of no more")
    made.add_argument("--page", action="store_true", help="measure nothing: make page and plots anew")
    made.add_argument("--out", type=Path, default=OUT, help="where the results go")
    run(made.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
