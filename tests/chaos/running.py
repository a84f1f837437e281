"""The common frame of all chaos programs: options, seed, folders, rounds and the verdict.

A `Program` names its promise and the coroutine that does its rounds. That gets a `Run`: options, random moments, a
folder, and totals. It raises `Wrong`, alone or in groups, when a promise is broken. Then the frame prints the logs,
and the command that repeats the run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kera.core.base.telemetry import configure_logging
from tests.chaos.verdict import leaves

TOLD_BYTES = 3000
"""Bytes of each log that are printed when a promise was broken."""


class Run:
    """One run of a program."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        self.folder = folder
        self.moments = random.Random(arguments.seed)
        """The same seed gives the same actions, at the same moments as far as the scheduler allows."""
        self.seen: Counter[str] = Counter()
        """The totals that are printed at the end; ``rounds`` is one of them."""
        self._begun_s = time.monotonic()
        self._clusters = 0

    def kinds(self) -> list[str]:
        """The kind of each round: all selected kinds in turn, in another order each time."""
        found: list[str] = []
        while len(found) < self.arguments.rounds:
            found += self.moments.sample(self.arguments.kinds, len(self.arguments.kinds))
        return found[: self.arguments.rounds]

    async def moment(self, most_s: float) -> None:
        """Wait for a random time, at most this long."""
        await asyncio.sleep(self.moments.random() * most_s)  # sleep: a random moment

    def tell(self, text: object) -> None:
        """Report that a round is over."""
        self.seen["rounds"] += 1
        print(f"round {self.seen['rounds']}, {time.monotonic() - self._begun_s:.0f} s: {text}", flush=True)

    def told(self) -> str:
        """The totals, in one line."""
        return ", ".join(f"{name} {count:,}" for name, count in self.seen.items())

    @contextlib.contextmanager
    def cluster_folder(self) -> Iterator[Path]:
        """A new folder for one cluster, which is deleted when its rounds have succeeded."""
        self._clusters += 1
        folder = self.folder / f"cluster-{self._clusters}"
        folder.mkdir(parents=True)
        yield folder
        shutil.rmtree(folder)


@dataclass(frozen=True)
class Program:
    """A program of chaos, and the promise that it checks."""

    text: str
    """The text of ``--help``."""
    promise: str
    """The promise, as printed when it was kept."""
    work: Callable[[Run], Awaitable[None]]
    """Runs all rounds, and judges. Raises `Wrong`."""
    rounds: int | None = None
    """The default number of rounds; None: the program has no rounds."""
    kinds: Sequence[str] = ()
    """All kinds of rounds."""
    options: Callable[[argparse.ArgumentParser], object] = lambda _: None
    """Adds the program's own options."""
    kinds_default: Sequence[str] = ()
    """The kinds that are done in turn by default; empty: all."""
    why_not: Callable[[], str | None] = lambda: None
    """The reason why this machine cannot run it; None: it can."""
    seeded: bool = True
    """Whether anything in it is random."""

    def parser(self, name: str) -> argparse.ArgumentParser:
        """A parser of the common options, and of the program's own."""
        parser = argparse.ArgumentParser(
            prog=f"tests.chaos {name}", description=self.text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if self.rounds is not None:
            parser.add_argument("--rounds", type=positive, default=self.rounds)
        if self.kinds:
            kinds = list(self.kinds_default or self.kinds)
            parser.add_argument("--kinds", nargs="+", choices=self.kinds, default=kinds, help="what rounds do, in turn")
        parser.set_defaults(seed=None)
        if self.seeded:
            parser.add_argument("--seed", type=int, help="of what is done, and when; printed")
        parser.add_argument("--keep", type=Path, help="a new folder for data and logs, which stays")
        self.options(parser)
        return parser

    def run_of(self, folder: Path, *words: str) -> Run:
        """A run with these options."""
        arguments = self.parser("").parse_args(words)
        arguments.seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
        return Run(arguments, folder)

    async def short(self, folder: Path, **options: object) -> Run:
        """Run it with these options, as a test does. Raises its errors."""
        words: list[str] = []
        for name, value in options.items():
            values = [] if value is True else value if isinstance(value, (list, tuple)) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
        run = self.run_of(folder, *words)
        with telling(folder):
            await self.work(run)
        return run


def positive(text: str) -> int:
    """Parse a number that is at least one."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is too few")
    return number


@contextlib.contextmanager
def telling(folder: Path) -> Iterator[None]:
    """Print the end of each log in `folder` if the block fails."""
    try:
        yield
    except BaseException:
        for path in sorted(folder.rglob("*.log")):
            print(f"-- {path.relative_to(folder)}\n{path.read_text(errors='replace')[-TOLD_BYTES:]}")
        raise


def again(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> str:
    """The options that differ from their defaults, as on a command line."""
    words: list[str] = []
    for action in parser._actions:
        value = getattr(arguments, action.dest, action.default)
        if action.dest != "keep" and value != action.default:
            values = [] if action.nargs == 0 else value if isinstance(value, list) else [value]
            words += [action.option_strings[0], *map(str, values)]
    return shlex.join(words)


def carry_out(name: str, program: Program, words: Sequence[str]) -> int:
    """Run a program, and print its verdict; returns the exit code."""
    parser = program.parser(name)
    parser.parse_args(words)  # errors name the program
    if (reason := program.why_not()) is not None:
        print(reason, file=sys.stderr)
        return 2
    configure_logging("critical", daemon="chaos")  # retries of clients are expected
    failures: list[Exception] = []
    with tempfile.TemporaryDirectory(prefix="kera-chaos-") as temporary:
        run = program.run_of(Path(temporary), *words)
        if run.arguments.keep:
            run.folder = run.arguments.keep
            run.folder.mkdir(parents=True)
        command = f'make chaos RUN="{name} {again(parser, run.arguments)}"'
        print(command, flush=True)
        try:
            with telling(run.folder):
                asyncio.run(program.work(run))  # type: ignore[arg-type]  # a coroutine
        except* Exception as errors:  # noqa: BLE001 - every error is part of the verdict
            failures = list(leaves(errors))
    where = f" in round {run.seen['rounds'] + 1}" if program.rounds or run.seen["rounds"] else ""
    for failure in failures:
        print(f"FAILED{where}: {failure!r}")
    print(f"FAILED, again: {command}" if failures else f"PASSED: {program.promise}: {run.told()}")
    return bool(failures)
