"""``python -m tests.simulation --seed 7``, or ``--seeds 100`` from ``--seed`` on; see ``make sim``."""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from tests.simulation.world.plan import Plan, draw
from tests.simulation.world.run import Outcome, carry_out, run
from tests.simulation.world.shrinking import Shrinking, read, stored

LINES_SHOWN = 200
SEEDS_BETWEEN = 500
"""The number of seeds between two lines of progress."""
SEEDS_TOGETHER = 20
"""The seeds that one process runs in sequence."""


def main() -> int:
    """Run the seeds; return 1 if any has failed."""
    arguments = _parsed()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the seed also decides the order of sets of names
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    return _serve() if arguments.serve else _carry_out(arguments)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="so many at a time")
    parser.add_argument("--digests", action="store_true", help="print of each seed its digest, and nothing else")
    parser.add_argument("--trace", action="store_true", help="print the whole trace, also of a good run")
    parser.add_argument("--keep-going", action="store_true", help="do not end with the first seed that fails")
    parser.add_argument("--plan", type=Path, help="run the plan in this file, instead of seeds")
    parser.add_argument("--shrink", type=Path, help="write a smaller plan that fails as the first seed into this file")
    parser.add_argument("--serve", action="store_true", help="do what standard input says, for the tests")
    return parser.parse_args()


def _serve() -> int:
    """Each line has an output file and arguments; a child runs them, without imports of its own."""
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        output, *sys.argv[1:] = json.loads(line)
        child = os.fork()
        if child == 0:
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            return _carry_out(_parsed())
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return 0


def _carry_out(arguments: argparse.Namespace) -> int:
    if arguments.shrink is not None:
        return _shrink(draw(arguments.seed) if arguments.plan is None else read(arguments.plan), arguments.shrink)
    begun_s = time.perf_counter()
    failed: list[int] = []
    done = 0
    totals, faults = Counter[str](), Counter[str]()
    for outcome in _outcomes(arguments):
        done += 1
        totals.update(
            records=outcome.records,
            repeats=outcome.repeats,
            told_removed=outcome.told_removed,
            virtual_s=round(outcome.virtual_s),
            cpu_ms=round(outcome.cpu_s * 1000),
            events=outcome.events,
        )
        faults.update(outcome.faults)
        if outcome.problems:
            failed.append(outcome.plan.seed)
        if arguments.digests:
            print(outcome.plan.seed, outcome.digest, "failed" if outcome.problems else "good", flush=True)
        elif outcome.problems or arguments.trace:
            _tell(outcome, whole=arguments.trace)
        if outcome.problems and not arguments.keep_going:
            break
        if done % SEEDS_BETWEEN == 0 and done < arguments.seeds:
            print(
                f"{done} of {arguments.seeds} seeds, {len(failed)} failed {failed or ''}", file=sys.stderr, flush=True
            )
    if not arguments.digests:
        cpu_s = totals["cpu_ms"] / 1000
        print(
            f"{done} seeds from {arguments.seed}: {len(failed)} failed {failed or ''};"
            f" {totals['records']} records, {totals['repeats']} of them sent again though they had come,"
            f" readers told {totals['told_removed']} times that what came next was removed,"
            f" {totals['virtual_s']} virtual seconds in {time.perf_counter() - begun_s:.1f} s,"
            f" {cpu_s:.1f} s of a processor ({totals['virtual_s'] / max(cpu_s, 1e-3):.0f} times as fast),"
            f" {totals['events']} events"
        )
        print("faults:", ", ".join(f"{count} {kind}" for kind, count in sorted(faults.items())) or "none")
    return min(1, len(failed))


def _outcomes(arguments: argparse.Namespace) -> Iterator[Outcome]:
    """The outcomes of the seeds, in order. A process runs only some seeds, because killed programs are never freed."""
    if arguments.plan is not None:
        yield carry_out(read(arguments.plan))
        return
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    if len(seeds) == 1:
        yield run(seeds[0])
        return
    gc.collect()
    gc.freeze()  # so that later collections skip the imported objects
    blocks = [seeds[first : first + SEEDS_TOGETHER] for first in range(0, len(seeds), SEEDS_TOGETHER)]
    with multiprocessing.get_context("fork").Pool(arguments.jobs, maxtasksperchild=1) as pool:
        for outcomes in pool.imap(partial(_block, whole=arguments.trace), blocks):
            yield from outcomes


def _block(seeds: Iterable[int], *, whole: bool) -> list[Outcome]:
    outcomes = list(map(run, seeds))
    for outcome in outcomes:
        if not whole:
            outcome.lines = outcome.lines[-LINES_SHOWN:] if outcome.problems else []
    return outcomes


def _shrink(plan: Plan, path: Path) -> int:
    shrinking = Shrinking(plan, on_smaller=lambda smaller: path.write_text(stored(smaller), encoding="utf-8"))
    shrinking.go()
    _tell(carry_out(shrinking.plan), whole=True)
    print(f"{len(plan.faults)} faults before, {len(shrinking.plan.faults)} now, after {shrinking.runs} runs: {path}")
    return 1


def _tell(outcome: Outcome, *, whole: bool) -> None:
    lines = outcome.lines if whole else outcome.lines[-LINES_SHOWN:]
    if not whole:
        print(*outcome.plan.lines(), sep="\n")
        print(f"… the last {len(lines)} lines; all of them with --trace")
    print(*lines, sep="\n")
    print(f"seed {outcome.plan.seed}: {outcome.digest}")
    for problem in outcome.problems:
        print("PROBLEM", problem)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # Python must not try to end the programs killed in the last run
