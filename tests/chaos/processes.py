"""A process of a test that tells what happens in lines of JSON, and is told in lines what to do."""

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
    """It does not outlive us."""

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
        """Start it, as Python runs a module. What it says otherwise goes to `log`.

        `before`: what its command begins with, such as `Host.enter`. Then it begins in another directory.
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
        """Its number."""
        return self._process.pid

    def send_line(self, text: str) -> None:
        """To its standard input."""
        if self._process.stdin is not None:
            self._process.stdin.write(text.encode() + b"\n")

    async def line(self) -> dict[str, Any] | None:
        """What it tells next; None when it has ended. Raises `Wrong` if it has found something."""
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
        """What it tells next, told to do something or not. Raises `Wrong` if it has ended, and `TimeoutError`."""
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
        """Wait for its end."""
        return await self._process.wait()

    async def end(self) -> None:
        """By force, if it still runs."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()
