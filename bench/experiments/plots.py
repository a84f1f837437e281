"""Plots of the experiments: a line for each series, median with least and most, the machine below."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no screen is needed
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.common import describe
from bench.experiments.report import Found, figures_of, rounds_of
from bench.experiments.setup import Metric, Sample, million_records

MARKERS = "osD^vPX*"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#444444")
"""Okabe and Ito's, which people who confuse red and green can tell apart."""
CAPTION_COLUMNS = 150
TITLE_COLUMNS = 90


def plot(found: Found, path: Path) -> None:
    """Plot one experiment into a PNG."""
    experiment = found.experiment
    figure, axes = canvas()
    xs = sorted({point.x for point in experiment.points})
    places = {x: at for at, x in enumerate(xs)}  # sweeps are geometric, or begin with 0: evenly spaced reads best
    series = list(dict.fromkeys(point.series for point in experiment.points))
    metric = experiment.plotted
    for number, name in enumerate(series):
        lines = [
            (places[x], [_plotted(sample, metric) for sample in samples])
            for (of, x), samples in sorted(found.samples.items())
            if of == name and samples
        ]
        _line(axes, number, name, lines)
    axes.set_xticks(range(len(xs)), [f"{x:,}" for x in xs])
    axes.set_xlabel(experiment.x_label)
    if metric == "latency":
        axes.set_yscale("log")
        axes.set_ylabel("mean latency, ms")
    else:
        what = "seen by consumers" if metric == "consumed" else "acknowledged"
        axes.set_ylabel(f"million records of 100 B per second,\n{what}")
        axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
        right = axes.secondary_yaxis("right", functions=(lambda value: value * 100, lambda value: value / 100))
        right.set_ylabel("MB/s of values")
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=9)
    title = f"{experiment.title} (thesis: {figures_of(experiment).lower()})"
    axes.set_title(textwrap.fill(title, TITLE_COLUMNS), fontsize=11, loc="left")
    measured = f"Median, least and most of {rounds_of(found)}."
    finish(figure, path, measured, found.machine)


def _plotted(sample: Sample, metric: Metric) -> float:
    figure = sample.figure(metric)
    return figure if metric == "latency" else million_records(figure)


def _line(axes: Axes, number: int, name: str, points: Sequence[tuple[int, Sequence[float]]]) -> None:
    if not points:
        return
    medians = [statistics.median(values) for _, values in points]
    below = [median - min(values) for median, (_, values) in zip(medians, points, strict=True)]
    above = [max(values) - median for median, (_, values) in zip(medians, points, strict=True)]
    axes.errorbar(
        [x for x, _ in points],
        medians,
        yerr=[below, above],
        label=name,
        marker=MARKERS[number % len(MARKERS)],
        color=COLOURS[number % len(COLOURS)],
        linestyle="--" if number >= len(COLOURS) // 2 + 1 else "-",
        linewidth=1.6,
        markersize=5,
        capsize=3,
    )


def canvas(rows: int = 1, height: float = 4.6) -> tuple[Figure, Any]:
    """A figure and its axes in the common style."""
    figure, axes = plt.subplots(rows, 1, figsize=(8.2, height), squeeze=True, sharex=True)
    for each in [axes] if rows == 1 else axes:
        each.grid(visible=True, alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def finish(figure: Figure, path: Path, words: str, machine: Mapping[str, Any]) -> None:
    """Add the caption, write the figure, and discard it."""
    caption = "\n".join(textwrap.wrap(f"{words} {describe(dict(machine))}", CAPTION_COLUMNS))
    figure.text(0.01, 0.01, caption, fontsize=7.5, color="#555555", va="bottom")
    figure.tight_layout(rect=(0, 0.03 + 0.025 * caption.count("\n"), 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)
