"""The report of recorded results, as Markdown: ``python -m bench.compare.report RESULTS.json… [--out DIR]``.

It is made only from recorded results, so it can be made again, and from several runs together. It claims nothing that
was not run: contestants that took no part or failed are listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import common
from bench.compare import figures, plots
from bench.compare.figures import PERCENTILES, Entry, Spread, entries, kind_of, short

FORMAT = 1
"""Format of the recorded results; results that this module cannot read have another one."""
LATE_MS_MAX = 0.1
"""A producer with a greater delay than this, in the 99th percentile, affects the latencies enough for a remark."""
NONE = "–"
HOW = (
    "All processes share one machine, and there is no network. Contestants take turns, round by round. Figures are the"
    " median of the rounds (least–most); ratios are of medians, with the least and the most that any two rounds have."
    " MB and GB are 10⁶ and 10⁹ bytes of values, without keys and overhead."
    " How it is measured: bench/notes/comparison.md."
)


def write(results: dict[str, Any], out: Path) -> None:
    """Write ``report.md`` and its plots into the folder `out`."""
    if results["format"] != FORMAT:
        raise ValueError(f"the results have format {results['format']}, and this reads {FORMAT}")
    drawn = {
        recorded["workload"]["name"]: plots.draw(recorded, _where(results), out) for recorded in results["workloads"]
    }
    (out / "report.md").write_text(markdown(results, drawn), encoding="utf-8")


def markdown(results: dict[str, Any], drawn: dict[str, Path | None]) -> str:
    """The whole report; `drawn` has the plot of each workload, by name."""
    parts = [_head(results), _overview(results)]
    parts += [_section(recorded, drawn.get(recorded["workload"]["name"])) for recorded in results["workloads"]]
    return "\n\n".join(parts) + "\n"


def _where(results: dict[str, Any]) -> str:
    run = results["runs"][0]
    return f"{common.describe(run['machine'])}; {run['time'][:10]}" + (" (quick)" if run["quick"] else "")


def _head(results: dict[str, Any]) -> str:
    lines = ["# KerA and others", ""]
    lines += [
        f"* {run['time']}: {run['rounds']} rounds on {common.describe(run['machine'])}" for run in results["runs"]
    ]
    if any(run["quick"] for run in results["runs"]):
        lines += ["", "**Quick: few and short rounds. This shows that it works, and is not a measurement.**"]
    lines += [
        "",
        HOW,
    ]
    versions = {
        entry.title: entry.versions
        for recorded in results["workloads"]
        for entry in entries(recorded)
        if entry.versions
    }
    if versions:
        lines += ["", "| | versions |", "|---|---|"]
        for title, found in versions.items():
            lines.append(f"| {title} | {', '.join(f'{name} {number}' for name, number in found.items())} |")
    return "\n".join(lines)


def _overview(results: dict[str, Any]) -> str:
    names: dict[str, str] = {}
    for recorded in results["workloads"]:
        for entry in entries(recorded):
            names.setdefault(entry.name, entry.title)
    lines = [
        "## Overview",
        "",
        f"| workload | figure | {' | '.join(names.values())} |",
        "|---|---" + "|---" * len(names) + "|",
    ]
    for recorded in results["workloads"]:
        workload = recorded["workload"]
        by_name = {entry.name: entry for entry in entries(recorded)}
        for what, of in _main_figures(workload):
            cells = [_cell(of(by_name[name]) if name in by_name else None) for name in names]
            if any(cell != NONE for cell in cells):
                lines.append(f"| {workload['name']} | {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _main_figures(workload: dict[str, Any]) -> list[tuple[str, Callable[[Entry], Spread | None]]]:
    kind = kind_of(workload)
    if kind == "latency":
        return [
            ("ack p50, ms", lambda entry: entry.latency_ms("ack", 50)),
            ("ack p99, ms", lambda entry: entry.latency_ms("ack", 99)),
            ("end to end p50, ms", lambda entry: entry.latency_ms("end_to_end", 50)),
            ("end to end p99, ms", lambda entry: entry.latency_ms("end_to_end", 99)),
        ]
    written: tuple[str, Callable[[Entry], Spread | None]] = ("written MB/s", lambda entry: entry.mb_per_s("produced"))
    read: tuple[str, Callable[[Entry], Spread | None]] = ("read MB/s", lambda entry: entry.mb_per_s("consumed"))
    if kind == "backlog":
        return [read]
    return [written, read] if workload["consumers"] else [written]


def _section(recorded: dict[str, Any], plot: Path | None) -> str:
    workload = recorded["workload"]
    all_entries = entries(recorded)
    present = [entry for entry in all_entries if entry]
    lines = [f"## {workload['name']}", "", f"{workload['title']}.", "", _described(workload)]
    if present:
        lines += ["", *(_throughput(workload, present) if kind_of(workload) != "latency" else _latencies(present))]
        lines += ["", *_cost(workload, present)]
        if plot is not None:
            lines += ["", f"![{workload['title']}]({plot.name})"]
        lines += ["", "What an acknowledgement means:", ""]
        lines += [f"* {entry.title}: {entry.durability}" for entry in present]
    remarks = [remark for entry in all_entries for remark in _remarks(entry)]
    if remarks:
        lines += ["", "Remarks:", "", *(f"* {remark}" for remark in remarks)]
    return "\n".join(lines)


def _described(workload: dict[str, Any]) -> str:
    parts = [
        f"records of {workload['record_bytes']:,} bytes",
        f"{workload['streams']} stream(s) of {workload['streamlets']} partition(s)",
        f"{workload['producers'] * workload.get('clients', 1)} producer(s), {workload['consumers']} consumer(s)",
        f"{workload['rate']:,.0f} records/s" if workload["rate"] else "as fast as it goes",
        "a call per record" if workload["send"] == "record" else "in batches",
        f"level {workload['durability']}, {workload['replicas']} replica(s) besides the leader",
        f"measured for {workload['seconds']:g} s",
    ]
    if workload["keys"] != "none":
        parts.append(f"{workload['key_count']:,} keys ({workload['keys']})")
    if workload["backlog_bytes"]:
        parts.append(f"{int(workload['backlog_bytes']) / figures.MB:,.0f} MB to read, for at most so long")
    return "; ".join(parts) + "."


def _throughput(workload: dict[str, Any], present: Sequence[Entry]) -> list[str]:
    sides = [("written", "produced")] * (not workload["backlog_bytes"]) + [("read", "consumed")] * bool(
        workload["consumers"]
    )
    base = present[0]
    header = "".join(f" {word} MB/s | 10⁶ records/s | {base.title} / it |" for word, _ in sides)
    lines = [f"| |{header} ack p50, ms | ack p99, ms |", "|---|" + "---|" * (3 * len(sides) + 2)]
    for entry in present:
        cells = []
        for _, side in sides:
            found, of_base = entry.mb_per_s(side), base.mb_per_s(side)
            cells += [_cell(found), _cell(entry.m_records_per_s(side)), _ratio(of_base, found, same=entry is base)]
        cells += [_cell(entry.latency_ms("ack", percentile)) for percentile in (50, 99)]
        lines.append(f"| {entry.title} | {' | '.join(cells)} |")
    return lines


def _latencies(present: Sequence[Entry]) -> list[str]:
    base = present[0]
    lines: list[str] = []
    for name, words in (("ack", "To the acknowledgement"), ("end_to_end", "To the consumer")):
        if not any(entry.histogram(name) for entry in present):
            continue
        heads = " | ".join("max" if each == 100 else f"p{each:g}" for each in PERCENTILES)
        lines += [
            *([""] if lines else []),
            f"{words}, from when a record was due; milliseconds. A ratio below 1: {base.title} is faster.",
            "",
            f"| | {heads} | {base.title} / it: p50 | p99 |",
            "|---|" + "---|" * (len(PERCENTILES) + 2),
        ]
        for entry in present:
            cells = [_cell(entry.latency_ms(name, percentile)) for percentile in PERCENTILES]
            for percentile in (50, 99):
                found, of_base = entry.latency_ms(name, percentile), base.latency_ms(name, percentile)
                cells.append(_ratio(of_base, found, same=entry is base))
            lines.append(f"| {entry.title} | {' | '.join(cells)} |")
    return lines


def _cost(workload: dict[str, Any], present: Sequence[Entry]) -> list[str]:
    unit = "CPU: part of a core" if workload["rate"] else "CPU-s per GB"
    lines = [
        f"| | {unit}: servers | clients | by process | peak memory, MiB: servers | clients | of it shared memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in present:
        by_process = ", ".join(
            f"{name} {short(spread.median)}" for name in entry.processes if (spread := entry.cpu(name)) is not None
        )
        cells = [
            _number(entry.total(entry.cpu, entry.servers)),
            _number(entry.total(entry.cpu, entry.clients)),
            by_process,
            _mib(entry.total(entry.memory_bytes, entry.servers)),
            _mib(entry.total(entry.memory_bytes, entry.clients)),
            _mib(entry.total(entry.shared_bytes, entry.processes)),
        ]
        lines.append(f"| {entry.title} | {' | '.join(cells)} |")
    lines += [
        "",
        "Memory that processes share counts for each of them; what is only in the page cache counts for none.",
    ]
    return lines


def _remarks(entry: Entry) -> list[str]:
    found = []
    if entry.reason is not None:
        found.append(f"{entry.title} {'did not go on' if entry else 'was not run'}: {entry.reason}")
    found += [f"{entry.title}, {failure}" for failure in entry.failures]
    late = entry.latency_ms("late", 99)
    if late is not None and late.median > LATE_MS_MAX:
        words = f"its producers sent late, in the 99th percentile by {_cell(late)} ms"
        found.append(f"{entry.title}: {words}, which is part of its latencies")
    behind = entry.spread(lambda played: float(played["behind"]))
    if behind is not None and behind.most > 0:
        found.append(f"{entry.title}: consumers had not seen up to {behind.most:,.0f} records when their time was over")
    others = entry.spread(lambda played: played["others_cpu_s"] / (played["produced"] or played["consumed"])["seconds"])
    if others is not None and others.most > 0.05:
        found.append(f"{entry.title}: servers of others, idle, took up to {others.most:.0%} of a core meanwhile")
    return found


def _cell(spread: Spread | None) -> str:
    if spread is None:
        return NONE
    middle = short(spread.median)
    return middle if len(spread.values) == 1 else f"{middle} ({short(spread.least)}–{short(spread.most)})"


def _ratio(base: Spread | None, other: Spread | None, *, same: bool) -> str:
    if same or base is None or other is None or (found := base.over(other)) is None:
        return NONE
    return f"{short(found[0])} ({short(found[1])}–{short(found[2])})"


def _number(value: float | None) -> str:
    return NONE if value is None else short(value)


def _mib(value: float | None) -> str:
    return NONE if value is None else f"{value / 2**20:,.0f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Make the report again."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("results", type=Path, nargs="+", help="results.json of one run, or of several")
    made.add_argument("--out", type=Path, help="a folder; by default that of the first one")
    arguments = made.parse_args(argv)
    out: Path = arguments.out or arguments.results[0].parent
    out.mkdir(parents=True, exist_ok=True)
    write(figures.merged([json.loads(path.read_text(encoding="utf-8")) for path in arguments.results]), out)
    print(out / "report.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
