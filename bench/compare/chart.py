"""One chart of a recorded comparison: ``python -m bench.compare.chart`` writes ``docs/images/comparison.svg``.

KerA beside Kafka, RabbitMQ, NATS and Redis, throughput and latency of the same run: the best figure of each group is
bold, whichever contestant has it. The chart shows the latest complete recorded run, or a named one. The picture has no
background, and colours for light and for dark pages.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import ROOT
from bench.compare.figures import Entry, Spread, entries, short

NAMES = {"kera": "KerA", "kafka": "Kafka", "rabbitmq": "RabbitMQ", "nats": "NATS", "redis": "Redis"}
OUT = ROOT / "docs" / "images" / "comparison.svg"
WIDTH, COLUMN, NAME, BAR, ROW, HEAD = 880, 450, 66, 257, 19, 24
"""In pixels: the picture, the start of its right half, the names, the longest bar, a row, and the words above rows."""
STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.title { font-size: 14px; font-weight: 600 } .best { font-weight: 700 } .note { font-size: 11px; fill: #59636e }
.kera { fill: #0969da } .other { fill: #8c959f } .p99 { opacity: .35 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .note { fill: #9198a1 } .kera { fill: #4493f8 } .other { fill: #818b98 }
}"""


class Group(NamedTuple):
    """Rows below each other with one figure of each contestant."""

    title: str
    workload: str
    of: str
    """The figure to draw: `produced` in MB/s, or the name of a latency."""


THROUGHPUT = (
    Group("records of 100 bytes, one server", "throughput-100b-leader", "produced"),
    Group("records of 100 bytes, two servers", "throughput-100b-replicated", "produced"),
    Group("records of 1,000 bytes, one server", "throughput-1kb-leader", "produced"),
)
LATENCY = (
    Group("until acknowledged, one server", "latency-1000-leader", "ack"),
    Group("until acknowledged, two servers", "latency-1000-replicated", "ack"),
    Group("until read, one server", "latency-1000-leader", "end_to_end"),
)
WANTED = {group.workload for group in (*THROUGHPUT, *LATENCY)}


def latest(folder: Path) -> dict[str, Any] | None:
    """The latest complete results in the folder; None if there are none."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*/results.json")]
    whole = [each for each in found if _is_whole(each)]
    return max(whole, key=lambda each: str(each["runs"][-1]["time"]), default=None)


def _is_whole(results: dict[str, Any]) -> bool:
    there = {each["workload"]["name"]: set(each["contestants"]) for each in results["workloads"]}
    quick = any(run["quick"] for run in results["runs"])
    return not quick and there.keys() >= WANTED and all(there[name] >= NAMES.keys() for name in WANTED)


def draw(results: dict[str, Any]) -> str:
    """The picture, as SVG."""
    recorded = {each["workload"]["name"]: entries(each) for each in results["workloads"]}
    parts = []
    for left, title, groups in (
        (0, "Written, MB/s: longer is better", THROUGHPUT),
        (COLUMN, "1,000 records a second, ms: shorter is better", LATENCY),
    ):
        parts.append(_text(left, 16, title, "title"))
        for number, group in enumerate(groups):
            parts += _group(left, 26 + number * (HEAD + len(NAMES) * ROW + 8), group, recorded[group.workload])
    height = 26 + len(THROUGHPUT) * (HEAD + len(NAMES) * ROW + 8) + 40
    run = results["runs"][-1]
    machine = run["machine"]
    title = " ".join(sorted({each.title for each in recorded[THROUGHPUT[0].workload] if each.name in NAMES}))
    note = (
        f"Medians of {run['rounds']} rounds, {run['time'][:10]}, on {machine['cores']} cores ({machine['cpu']}) that"
        " clients and servers share."
    )
    parts.append(_text(0, height - 24, note, "note"))
    parts.append(_text(0, height - 8, "Pale: the 99th percentile. Bold: the best of its group.", "note"))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' role="img">\n<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>\n{body}\n</svg>\n'
    )


def _group(left: int, top: int, group: Group, recorded: Sequence[Entry]) -> list[str]:
    there = {each.name: each for each in recorded}
    rows = {name: _figures(there[name], group) for name in NAMES}
    most = max((value for figures in rows.values() for value in figures), default=1.0)
    firsts = [figures[0] for figures in rows.values() if figures]
    best = (max if group.of == "produced" else min)(firsts, default=None)
    parts = [_text(left, top + 15, group.title, "note")]
    for number, (name, title) in enumerate(NAMES.items()):
        at, figures = top + HEAD + number * ROW, rows[name]
        kind = "kera" if name == "kera" else "other"
        parts.append(_text(left, at + 11, title))
        for value, pale in reversed(list(zip(figures, ("", " p99"), strict=False))):
            width = max(1.0, BAR * value / most)
            parts.append(f'<rect class="{kind}{pale}" x="{left + NAME}" y="{at}" width="{width:.1f}" height="14"/>')
        end = left + NAME + BAR * max(figures, default=0.0) / most
        failed = ["rounds failed"] if there[name].failures else []
        words = ", ".join([*map(short, figures), *failed]) or "did not take part"
        parts.append(_text(round(end) + 6, at + 11, words, "best" if figures and figures[0] == best else ""))
    return parts


def _figures(entry: Entry, group: Group) -> list[float]:
    """One figure for throughput; median and 99th percentile for a latency; none for a contestant that took no part."""
    spreads: list[Spread | None] = [entry.mb_per_s("produced")]
    if group.of != "produced":
        spreads = [entry.latency_ms(group.of, percentile) for percentile in (50, 99)]
    return [spread.median for spread in spreads if spread is not None]


def _text(x: int, y: int, words: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f'<text{attribute} x="{x}" y="{y}">{escape(words)}</text>'


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the chart."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "results", type=Path, nargs="?", help="results.json of a run; absent: the latest that is recorded"
    )
    made.add_argument("--out", type=Path, default=OUT, help="the file")
    arguments = made.parse_args(argv)
    if arguments.results is None:
        results = latest(ROOT / "bench" / "results")
    else:
        results = json.loads(arguments.results.read_text(encoding="utf-8"))
    if results is None or not _is_whole(results):
        made.error(f"it takes a run of {', '.join(NAMES)} with the workloads {', '.join(sorted(WANTED))}")
    arguments.out.write_text(draw(results), encoding="utf-8")
    print(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
