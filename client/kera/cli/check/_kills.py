"""The commands that are run while the load is on: what each did, and when."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from kera.cli.check._options import Options

OUTPUT_BYTES_MAX = 2048
"""Of a command's output, from its end, that is kept."""
NUMBER_VARIABLE = "KERA_CHECK_KILL"
"""Environment variable that tells a command how many commands there were, with it."""


@dataclass(slots=True)
class Kill:
    """One run of a command."""

    command: str
    begun_s: float
    ended_s: float | None = None
    """None: it was ended by us, or not at all."""
    exit_code: int | None = None
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
        self.done: list[Kill] = []

    async def run(self) -> None:
        """All of them; whoever cancels it ends the command that runs."""
        for number, at_s in enumerate(moments(self._options)):
            await asyncio.sleep(max(0.0, at_s - self._now_s()))
            await self._kill(self._options.kill[number % len(self._options.kill)])

    async def _kill(self, command: str) -> None:
        kill = Kill(command, self._now_s())
        self.done.append(kill)
        environment = {**os.environ, NUMBER_VARIABLE: str(len(self.done))}
        # In a session of its own: Ctrl-C is for us, and a command that is to start something again is not cut short.
        beginning = asyncio.ensure_future(
            asyncio.create_subprocess_shell(
                command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
        )
        try:
            process = await asyncio.shield(beginning)
        except asyncio.CancelledError:
            await _end(await beginning)
            raise
        reading = asyncio.create_task(_read(process.stdout, kill))
        try:
            kill.exit_code = await process.wait()
            kill.ended_s = self._now_s()
        finally:
            await _end(process)
            await asyncio.wait([reading], timeout=1.0)  # what the command has left running may hold its output open
            reading.cancel()

    @property
    def last_end_s(self) -> float:
        """When the last one ended; 0: there was none."""
        return max((kill.ended_s or kill.begun_s for kill in self.done), default=0.0)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a command, with all that it has started, unless it has ended by itself."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _read(output: asyncio.StreamReader | None, kill: Kill) -> None:
    kept = b""
    while output is not None and (data := await output.read(OUTPUT_BYTES_MAX)):
        kept = (kept + data)[-OUTPUT_BYTES_MAX:]
        kill.output = kept.decode(errors="replace").strip()
