"""The plot of a soak: latencies, throughput and processor, memory, descriptors and threads over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from bench.experiments.plots import COLOURS, canvas, finish
from kera.core.base.settings import GIB, MIB

PANELS = 5
LATENCIES = {"ack": "to acknowledgement", "end_to_end": "to the consumer"}


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Plot into a PNG."""
    rows: list[dict[str, Any]] = found["rows"]
    interval_s: float = found["interval_s"]
    minutes = [(row["number"] + 1) * interval_s / 60 for row in rows]
    figure, (latency, processor, memory, shared, handles) = canvas(PANELS, height=12.5)
    names = sorted(rows[0]["processes"])
    colours = dict(zip(names, COLOURS * 3, strict=False))

    for name, colour in zip(LATENCIES, COLOURS, strict=False):
        for percentile, style in (("p50", "-"), ("p99", "--"), ("max", ":")):
            values = [row["latencies"].get(name, {}).get(percentile) for row in rows]
            latency.plot(minutes, values, style, color=colour, label=f"{LATENCIES[name]}, {percentile}", linewidth=1.4)
    latency.set_yscale("log")
    latency.set_ylabel("milliseconds\nfrom when it was due")
    _legend(latency)

    cpu = {name: [row["processes"][name]["cpu_s"] for row in rows] for name in names}
    for name in names:
        cores = [(after - before) / interval_s for before, after in zip(cpu[name], cpu[name][1:], strict=False)]
        processor.plot(minutes[1:], cores, color=colours[name], label=name, linewidth=1.4)
    processor.set_ylabel("cores")
    processor.set_ylim(bottom=0)
    _legend(processor)

    for name in names:
        own = [row["processes"][name]["anon_bytes"] / MIB for row in rows]
        memory.plot(minutes, own, color=colours[name], label=name, linewidth=1.4)
    memory.set_ylabel("own memory, MiB\n(without the arena)")
    memory.set_ylim(bottom=0)
    _legend(memory)

    for name in names:
        touched = [row["processes"][name]["shmem_bytes"] / GIB for row in rows]
        if max(touched) > 0:
            shared.plot(minutes, touched, color=colours[name], label=name, linewidth=1.4)
    shared.set_ylabel("of shared memory\n(the arena), GiB")
    shared.set_ylim(bottom=0)
    _legend(shared)

    for name in names:
        for field, style in (("descriptors", "-"), ("threads", ":")):
            values = [row["processes"][name][field] for row in rows]
            handles.plot(minutes, values, style, color=colours[name], linewidth=1.4)
    handles.set_ylabel("file descriptors (lines),\nthreads (dotted)")
    handles.set_ylim(bottom=0)
    handles.set_xlabel("minutes")

    rate_mb_per_s = found["rate"] * 100 / 1e6
    what = f"{found['load']:.0%} of the maximum, {found['backups']} backup(s)"
    latency.set_title(f"{rate_mb_per_s:,.0f} MB/s of records of 100 B, {what}", fontsize=11, loc="left")
    finish(figure, path, f"Samples of {interval_s:g} s each.", found["machine"])


def _legend(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
