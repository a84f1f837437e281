"""A test's child process that reports events in lines of JSON, and reads commands as lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from kera.core.base.process import DIE_WITH_PARENT_VARIABLE
from tests.chaos.verdict import Wrong

ROOT = Path(__file__).parents[2]
LINE_BYTES_MAX = 1 << 20


class Process:
    """A child process, which does not outlive its parent."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls,
        module: str,
        *arguments: object,
        log: IO[bytes] | None = None,
        before: Sequence[str] = (),
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> Process:
        """Start a Python module as a process. Its standard error goes to `log`.

        `before`: the beginning of its command, such as `Host.enter`. With it the process starts in another directory.
        """
        path = {"PYTHONPATH": str(ROOT)} if before else {}
        return cls(
            await asyncio.create_subprocess_exec(
                *(*before, sys.executable, "-m", module, *map(str, arguments)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, DIE_WITH_PARENT_VARIABLE: "1", **path, **env},
                limit=LINE_BYTES_MAX,
            )
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send_line(self, text: str) -> None:
        """Write a line to the standard input of the process."""
        if self._process.stdin is not None:
            self._process.stdin.write(text.encode() + b"\n")

    async def line(self) -> dict[str, Any] | None:
        """The next reported line; None when the process has ended. Raises `Wrong` if the line reports an error."""
        if self._process.stdout is None:
            return None
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):  # killed while it wrote, perhaps
            return None
        found: dict[str, Any] = json.loads(line)
        if "wrong" in found:
            raise Wrong(found["wrong"])
        return found

    async def answer(self, timeout_s: float, command: str | None = None) -> dict[str, Any]:
        """The next reported line, after a `command` if given. Raises `Wrong` if it has ended, and `TimeoutError`."""
        if command is not None:
            self.send_line(command)
        async with asyncio.timeout(timeout_s):
            found = await self.line()
        if found is None:
            raise Wrong(f"process {self.pid} has ended by itself")
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Wait for the end of the process; returns its exit code."""
        return await self._process.wait()

    async def end(self) -> None:
        """Kill the process if it still runs."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()
