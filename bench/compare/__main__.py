"""Compare KerA with others: ``python -m bench.compare``; one command starts all that it needs.

    python -m bench.compare --contestants kera                              # KerA alone, the main workloads
    python -m bench.compare --workloads latency-1000-leader --quick

Writes ``results.json``, ``report.md`` and plots to ``--out``, after each workload. Missing servers and clients are
fetched the first time; the report gives the reason for those that cannot be fetched. bench/notes/comparison.md has
more.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import common
from bench.compare import report
from bench.compare.contestant import REGISTRY
from bench.compare.rounds import run_workload
from bench.compare.workload import BadWorkload, Workload, find, names

MAIN = (
    "throughput-100b-leader",
    "throughput-100b-replicated",
    "throughput-1kb-leader",
    "latency-1000-leader",
    "latency-1000-replicated",
)
RESULTS = Path(__file__).parents[1] / "results"
QUICK_ROUNDS, QUICK_S, QUICK_WARM_UP_S = 2, 1.5, 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """See the head of this module."""
    made = common.parser(__doc__)
    made.add_argument("--contestants", default=",".join(REGISTRY), help=f"of {', '.join(REGISTRY)}; by default all")
    made.add_argument(
        "--workloads", default=",".join(MAIN), help="names, or files, or folders, or all; by default the main ones"
    )
    made.add_argument("--rounds", type=int, default=5, help="of each contestant, besides one to warm up")
    made.add_argument("--quick", action="store_true", help="few and short rounds: to see that it works")
    made.add_argument("--name", default=time.strftime("%Y%m%d-%H%M%S"), help="of the folder in bench/results")
    made.add_argument("--out", type=Path, help="another folder")
    made.add_argument("--list", action="store_true", help="say which workloads there are, and end")
    arguments = made.parse_args(argv)
    if arguments.list:
        for workload in find(names()):
            print(f"{workload.name:28} {workload.title}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # servers end, and their files are removed
    try:
        return _run(arguments)
    except BadWorkload as error:
        made.error(str(error))


def _run(arguments: argparse.Namespace) -> int:
    contestants = arguments.contestants.split(",")
    unknown = sorted(set(contestants) - set(REGISTRY))
    if unknown:
        raise BadWorkload(f"no contestant is called {', '.join(unknown)}; there are {', '.join(REGISTRY)}")
    wanted = names() if arguments.workloads == "all" else arguments.workloads.split(",")
    workloads, rounds = find(wanted), arguments.rounds
    if arguments.quick:
        rounds = min(rounds, QUICK_ROUNDS)
        workloads = [workload.shorter(QUICK_S, QUICK_WARM_UP_S) for workload in workloads]
    out: Path = arguments.out or RESULTS / arguments.name
    out.mkdir(parents=True, exist_ok=True)
    with common.directory(arguments) as folder:
        head = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "machine": common.machine(folder), "rounds": rounds}
        results: dict[str, Any] = {
            "format": report.FORMAT,
            "runs": [head | {"quick": arguments.quick}],
            "workloads": [],
        }
        for number, workload in enumerate(workloads, 1):
            common.say(f"{workload.name} ({number} of {len(workloads)}): {workload.title}")
            results["workloads"].append(_played(workload, contestants, rounds, folder))
            (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
            report.write(results, out)
    common.say(f"{out / 'report.md'}")
    return 0


def _played(workload: Workload, contestants: Sequence[str], rounds: int, folder: Path) -> dict[str, Any]:
    begin_s = time.monotonic()
    played = run_workload(workload, contestants, rounds, folder)
    return played | {"took_s": round(time.monotonic() - begin_s, 1)}


if __name__ == "__main__":
    sys.exit(main())
