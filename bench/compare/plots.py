"""Plots of recorded results, one picture per workload: the measurements, and their cost."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

from bench.compare.figures import Entry, Spread, entries, kind_of, short

WIDTH_IN = 12.0
COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#8e6c8a", "#d4a017", "#d16ba5", "#7a7a7a", "#b56576")
"""Colours of contestants, in their order."""
SERVERS = ("#274c77", "#6096ba", "#a3cef1", "#c9dbea")
"""Colours of a contestant's server processes, in their order."""
CLIENTS = {"producers": "#e09f3e", "consumers": "#7fb069"}
NAME_PART, LETTER_PART = 0.02, 0.02
"""Parts of an axis that a name takes besides its letters, and each letter: a narrower bar has no name in it."""
CURVE = [1 - 10 ** (-step / 20) for step in range(1, 81)]
"""Percentiles of the curves, as parts: even on an axis of 1/(1-p)."""


def draw(recorded: dict[str, Any], where: str, out: Path) -> Path | None:
    """The picture of a workload's record, in the folder `out`; None without figures."""
    workload = recorded["workload"]
    present = [entry for entry in entries(recorded) if entry]
    if not present:
        return None
    colours = {entry.name: COLOURS[number % len(COLOURS)] for number, entry in enumerate(entries(recorded))}
    figure = Figure(figsize=(WIDTH_IN, 0), layout="constrained")
    heights = _panels(figure, workload, present, colours)
    caption = textwrap.fill(f"{where}. {_of_rounds(present)}", 150)
    figure.supxlabel(caption, fontsize=8, color="#555555")
    figure.suptitle(f"{workload['name']}: {workload['title']}", fontsize=12, fontweight="bold")
    figure.set_size_inches(WIDTH_IN, sum(heights) + 0.9)
    path = out / f"{workload['name']}.png"
    figure.savefig(path, dpi=110)
    return path


def _panels(figure: Figure, workload: dict[str, Any], present: Sequence[Entry], colours: dict[str, str]) -> list[float]:
    bars_in = 0.7 + 0.36 * len(present)
    latency = kind_of(workload) == "latency"
    rows = [4.2 if latency else bars_in, bars_in]
    grid = figure.add_gridspec(2, 2, height_ratios=rows)
    if latency:
        names = [name for name in ("ack", "end_to_end") if any(entry.histogram(name) for entry in present)]
        for column, name in enumerate(names):
            cell = grid[0, column] if len(names) == 2 else grid[0, :]
            _curves(figure.add_subplot(cell), name, present, colours)
    else:
        sides = [side for side in ("produced", "consumed") if any(entry.mb_per_s(side) for entry in present)]
        for column, side in enumerate(sides):
            cell = grid[0, column] if len(sides) == 2 else grid[0, :]
            _bars(figure.add_subplot(cell), side, present, colours)
    cpu = "processor time, part of a core" if workload["rate"] else "processor time, CPU-s per GB of values"
    _stacked(figure.add_subplot(grid[1, 0]), cpu, present, lambda entry: entry.cpu)
    _stacked(
        figure.add_subplot(grid[1, 1]),
        "peak memory, MiB",
        present,
        lambda entry: entry.memory_bytes,
        2.0**20,
    )
    return rows


def _of_rounds(present: Sequence[Entry]) -> str:
    counts = sorted({len(entry.rounds) for entry in present})
    words = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    how = "bars: median, whiskers: least and most; curves: all rounds together. Shared memory counts for each process."
    return f"Rounds: {words}; {how}"


def _broken(title: str) -> str:
    """The title in two lines, if it has more than the name and version."""
    return title.replace(" (", "\n(", 1)


def _bars(axes: Axes, side: str, present: Sequence[Entry], colours: dict[str, str]) -> None:
    top = max(spread.most for entry in present if (spread := entry.mb_per_s(side)) is not None)
    for place, entry in enumerate(present):
        spread = entry.mb_per_s(side)
        if spread is None:
            continue
        axes.barh(place, spread.median, color=colours[entry.name], height=0.62)
        axes.plot([spread.least, spread.most], [place, place], color="black", linewidth=1.2, marker="|", markersize=7)
        axes.text(
            spread.most + top * 0.012,
            place,
            short(spread.median),
            va="center",
            fontsize=9,
        )
    _rows(axes, present)
    axes.set_xlim(0, top * 1.12)
    axes.set_xlabel(f"{'written' if side == 'produced' else 'read'}, MB/s of values")


def _curves(axes: Axes, name: str, present: Sequence[Entry], colours: dict[str, str]) -> None:
    for entry in present:
        histogram = entry.histogram(name)
        if histogram is None:
            continue
        # A percentile with less than one sample beyond it is the maximum, and says nothing more.
        points = [part for part in CURVE if 1 / (1 - part) <= histogram.count]
        times = [histogram.ms(part * 100) for part in points]
        at = [1 / (1 - part) for part in points]
        axes.plot(at, times, color=colours[entry.name], linewidth=1.8, label=_broken(entry.title))
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = {2: "50", 10: "90", 100: "99", 1000: "99.9", 10_000: "99.99"}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(_two_and_five))
    axes.tick_params(axis="y", which="minor", labelsize=7)
    axes.grid(visible=True, alpha=0.35)
    axes.grid(visible=True, which="minor", axis="y", alpha=0.12)
    least, most = axes.get_ylim()
    axes.set_ylim(least, most * (most / least) ** (0.11 * len(present)))  # room for the legend
    axes.set_xlabel("percentile")
    axes.set_ylabel("ms since the record was due")
    axes.set_title("to the acknowledgement" if name == "ack" else "to the consumer", fontsize=10)
    axes.legend(fontsize=6.5, loc="upper left")


def _two_and_five(value: float, _: object) -> str:
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""


def _stacked(
    axes: Axes,
    label: str,
    present: Sequence[Entry],
    figures_of: Callable[[Entry], Callable[[str], Spread | None]],
    unit: float = 1.0,
) -> None:
    parts = {
        entry.name: [
            (process, spread.median / unit)
            for process in entry.processes
            if (spread := figures_of(entry)(process)) is not None
        ]
        for entry in present
    }
    top = max(sum(value for _, value in each) for each in parts.values())
    roles: dict[str, str] = {"servers": SERVERS[1]}
    for place, entry in enumerate(present):
        left = 0.0
        for number, (process, value) in enumerate(parts[entry.name]):
            colour = CLIENTS.get(process, SERVERS[number % len(SERVERS)])
            if process in CLIENTS:
                roles[process] = colour
            axes.barh(place, value, left=left, color=colour, height=0.62, edgecolor="white", linewidth=0.6)
            if value > top * (NAME_PART + LETTER_PART * len(process)):
                text = "white" if colour == SERVERS[0] else "black"
                axes.text(left + value / 2, place, process, ha="center", va="center", fontsize=7, color=text)
            left += value
        axes.text(left + top * 0.012, place, short(left), va="center", fontsize=8)
    _rows(axes, present)
    axes.set_xlim(0, (top or 1.0) * 1.14)
    axes.set_xlabel(label)
    handles = [Patch(color=colour, label=role) for role, colour in roles.items()]
    axes.legend(handles=handles, fontsize=7, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(roles), frameon=False)


def _rows(axes: Axes, present: Sequence[Entry]) -> None:
    titles = [_broken(entry.title) for entry in present]
    axes.set_yticks(range(len(present)), titles, fontsize=8)
    axes.invert_yaxis()
    axes.grid(visible=True, axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
