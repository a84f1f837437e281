"""The commands that are run while the load is on: what each did, and when."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import IO

from kera.cli.check._options import Options

OUTPUT_BYTES_MAX = 2048
"""Maximum of a command's output, from its end, that is kept."""
NUMBER_VARIABLE = "KERA_CHECK_KILL"
"""Environment variable that tells a command how many commands there were, with it."""


@dataclass(slots=True)
class Kill:
    """One run of a command."""

    command: str
    begun_s: float
    ended_s: float | None = None
    """None: it has not."""
    exit_code: int | None = None
    """None: it was ended by the check."""
    output: str = ""


def moments(options: Options) -> Iterator[float]:
    """When commands begin, in seconds from the beginning of the load: chance has a part in it, from the seed."""
    random, number = Random(f"{options.seed} kills"), 0
    while options.kill and (number + 1) * options.kill_every_s < options.seconds:
        number += 1
        yield options.kill_every_s * (number - random.random() / 2)


class Kills:
    """Runs them one after the other."""

    def __init__(self, options: Options, now_s: Callable[[], float]) -> None:
        self._options = options
        self._now_s = now_s
        self._stopping = asyncio.Event()
        self.done: list[Kill] = []

    def stop(self) -> None:
        """Run no more of them; one that runs goes on."""
        self._stopping.set()

    async def run(self) -> None:
        """All of them; whoever cancels it ends the command that runs."""
        for number, at_s in enumerate(moments(self._options)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, at_s - self._now_s())):
                    await self._stopping.wait()
            if self._stopping.is_set():
                return
            await self._kill(self._options.kill[number % len(self._options.kill)])

    async def _kill(self, command: str) -> None:
        kill = Kill(command, self._now_s())
        self.done.append(kill)
        environment = {**os.environ, NUMBER_VARIABLE: str(len(self.done))}
        with tempfile.TemporaryFile() as output:
            process = _begin(command, output, environment)
            waiting = asyncio.ensure_future(asyncio.to_thread(process.wait))
            try:
                kill.exit_code = await asyncio.shield(waiting)
                kill.ended_s = self._now_s()
            except asyncio.CancelledError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await waiting
                kill.ended_s = self._now_s()
                raise
            finally:
                output.seek(max(0, output.seek(0, os.SEEK_END) - OUTPUT_BYTES_MAX))
                kill.output = _printable(output.read().decode(errors="replace").strip())

    @property
    def last_end_s(self) -> float:
        """When the last one ended; 0: there was none."""
        return max((kill.ended_s or kill.begun_s for kill in self.done), default=0.0)


def _printable(text: str) -> str:
    """The output of a command, with characters escaped that a terminal would obey."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


def _begin(command: str, output: IO[bytes], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own: Ctrl-C is for us, and what starts something again is not cut short.

    The event loop's way would run what libraries with threads do at a fork, of which a command has died.
    """
    return subprocess.Popen(  # noqa: S603 - it is what was asked for
        ["/bin/sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=environment,
    )
