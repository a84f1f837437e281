"""Runs the ``--kill`` commands during the load, and records when each ran and how it ended."""

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
"""How much of the end of a command's output is kept."""
NUMBER_VARIABLE = "KERA_CHECK_KILL"
"""Environment variable with the number of a command, counted from 1."""


@dataclass(slots=True)
class Kill:
    """One run of a command."""

    command: str
    begun_s: float
    ended_s: float | None = None
    """None: it still runs."""
    exit_code: int | None = None
    """None: the check has ended it."""
    output: str = ""


def moments(options: Options) -> Iterator[float]:
    """Yield the times of commands, in seconds from the beginning of the load; the seed decides their random part."""
    random, number = Random(f"{options.seed} kills"), 0
    while options.kill and (number + 1) * options.kill_every_s < options.seconds:
        number += 1
        yield options.kill_every_s * (number - random.random() / 2)


class Kills:
    """Runs the commands one after the other."""

    def __init__(self, options: Options, now_s: Callable[[], float]) -> None:
        self._options = options
        self._now_s = now_s
        self._stopping = asyncio.Event()
        self.done: list[Kill] = []

    def stop(self) -> None:
        """Start no more commands; a running one goes on."""
        self._stopping.set()

    async def run(self) -> None:
        """Run all commands; a cancellation kills the running one."""
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
        """The time when the last command ended; 0: no command was run."""
        return max((kill.ended_s or kill.begun_s for kill in self.done), default=0.0)


def _printable(text: str) -> str:
    """Return the output of a command; characters that could control a terminal are escaped."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


def _begin(command: str, output: IO[bytes], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a command in its own session: Ctrl-C then ends the check only, and does not interrupt a restart.

    A subprocess of the event loop would run the fork handlers of libraries with threads, which once killed a command.
    """
    return subprocess.Popen(  # noqa: S603 - the user has asked for this command
        ["/bin/sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=environment,
    )
