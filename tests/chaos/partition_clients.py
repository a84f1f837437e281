"""The process of `tests.chaos.partition_client`, as whoever breaks the network has it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kera.core.base.process import DIE_WITH_PARENT_VARIABLE
from tests.chaos.verdict import Wrong
from tests.namespaces import Host

READY_TIMEOUT_S = 60.0
VERDICT_TIMEOUT_S = 180.0
LINE_BYTES_MAX = 1 << 20
ENVIRONMENT = {**os.environ, DIE_WITH_PARENT_VARIABLE: "1", "PYTHONPATH": str(Path(__file__).parents[2])}
"""It begins in another directory."""


class Clients:
    """Producers, readers and a consumer group, on a host of their own."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, host: Host, bootstrap: str, log: Path, seed: int) -> AsyncIterator[Clients]:
        """They are at work, and all they do has come through once."""
        command = [sys.executable, "-m", "tests.chaos.partition_client", bootstrap, "--seed", str(seed)]
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *host.enter,
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=ENVIRONMENT,
                limit=LINE_BYTES_MAX,
            )
        clients = cls(process, log)
        try:
            await clients._told(READY_TIMEOUT_S)
            yield clients
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def go_on(self, timeout_s: float) -> tuple[float, float]:
        """How long it takes from now on until producers, and then readers, go on. Raises `TimeoutError`, `Wrong`."""
        self._say("mark")
        told = await self._told(timeout_s)
        return told["acked_s"], told["read_s"]

    async def stop(self) -> dict[str, Any]:
        """End the load; the verdict."""
        self._say("stop")
        return await self._told(VERDICT_TIMEOUT_S)

    def _say(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command.encode() + b"\n")

    async def _told(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(timeout_s):
            line = await self._process.stdout.readline()
        if not line:
            raise Wrong(f"the clients have ended: {self._log.read_text()[-2000:]}")
        told: dict[str, Any] = json.loads(line)
        return told
