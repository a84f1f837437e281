"""The frame of all programs of chaos: options, seed, folders, rounds and the end of each are the same.

A `Program` names its promise and the coroutine that does its rounds. That gets a `Run`: options, random moments, a
folder, and totals. It raises `Wrong`, alone or in groups, when a promise is broken. Then the logs are shown, and a line
says how to do the same again.
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
"""Of each log, when a promise was broken."""


class Run:
    """One run of a program."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        self.folder = folder
        self.moments = random.Random(arguments.seed)
        """With the same seed the same things are done, at the same moments as far as a scheduler lets it."""
        self.seen: Counter[str] = Counter()
        """The totals that are printed at the end; ``rounds`` is one of them."""
        self._begun_s = time.monotonic()
        self._clusters = 0

    def kinds(self) -> list[str]:
        """What each round does: all that was asked for in turn, in another order each time."""
        found: list[str] = []
        while len(found) < self.arguments.rounds:
            found += self.moments.sample(self.arguments.kinds, len(self.arguments.kinds))
        return found[: self.arguments.rounds]

    async def moment(self, most_s: float) -> None:
        """Wait for some time, at most so long."""
        await asyncio.sleep(self.moments.random() * most_s)  # sleep: a moment is what is wanted

    def tell(self, text: object) -> None:
        """A round is over."""
        self.seen["rounds"] += 1
        print(f"round {self.seen['rounds']}, {time.monotonic() - self._begun_s:.0f} s: {text}", flush=True)

    def told(self) -> str:
        """What was seen, in a line."""
        return ", ".join(f"{name} {count:,}" for name, count in self.seen.items())

    @contextlib.contextmanager
    def cluster_folder(self) -> Iterator[Path]:
        """A new folder for one cluster, which goes when its rounds have ended well."""
        self._clusters += 1
        folder = self.folder / f"cluster-{self._clusters}"
        folder.mkdir(parents=True)
        yield folder
        shutil.rmtree(folder)


@dataclass(frozen=True)
class Program:
    """What is done, and what is promised meanwhile."""

    text: str
    """For ``--help``."""
    promise: str
    """In the words that are printed when it was kept."""
    work: Callable[[Run], Awaitable[None]]
    """All rounds, and the verdict. Raises `Wrong`."""
    rounds: int | None = None
    """Unless other ones are asked for; None: it has no rounds."""
    kinds: Sequence[str] = ()
    """What a round may do."""
    options: Callable[[argparse.ArgumentParser], object] = lambda _: None
    """Adds the options of its own."""
    kinds_default: Sequence[str] = ()
    """Which of these are done in turn, unless others are asked for; none: all."""
    why_not: Callable[[], str | None] = lambda: None
    """Why this machine cannot run it; None: it can."""
    seeded: bool = True
    """Whether anything in it is random."""

    def parser(self, name: str) -> argparse.ArgumentParser:
        """Of the common options, and of its own."""
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
        """Run it with these options, as a test does. Raises what goes wrong."""
        words: list[str] = []
        for name, value in options.items():
            values = [] if value is True else value if isinstance(value, (list, tuple)) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
        run = self.run_of(folder, *words)
        with telling(folder):
            await self.work(run)
        return run


def positive(text: str) -> int:
    """How often something is done: at least once."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is too few")
    return number


@contextlib.contextmanager
def telling(folder: Path) -> Iterator[None]:
    """If the block fails, the end of each log in `folder` is printed."""
    try:
        yield
    except BaseException:
        for path in sorted(folder.rglob("*.log")):
            print(f"-- {path.relative_to(folder)}\n{path.read_text(errors='replace')[-TOLD_BYTES:]}")
        raise


def again(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> str:
    """The options that are not as by default, as they are written."""
    words: list[str] = []
    for action in parser._actions:
        value = getattr(arguments, action.dest, action.default)
        if action.dest != "keep" and value != action.default:
            values = [] if action.nargs == 0 else value if isinstance(value, list) else [value]
            words += [action.option_strings[0], *map(str, values)]
    return shlex.join(words)


def carry_out(name: str, program: Program, words: Sequence[str]) -> int:
    """Run it, and say how it went; the exit code."""
    parser = program.parser(name)
    parser.parse_args(words)  # errors name the program
    if (reason := program.why_not()) is not None:
        print(reason, file=sys.stderr)
        return 2
    configure_logging("critical", daemon="chaos")  # that clients try again is what is wanted
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
        except* Exception as errors:  # noqa: BLE001 - whatever it is, it is the verdict
            failures = list(leaves(errors))
    where = f" in round {run.seen['rounds'] + 1}" if program.rounds or run.seen["rounds"] else ""
    for failure in failures:
        print(f"FAILED{where}: {failure!r}")
    print(f"FAILED, again: {command}" if failures else f"PASSED: {program.promise}: {run.told()}")
    return bool(failures)
