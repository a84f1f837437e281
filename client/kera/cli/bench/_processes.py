"""Worker processes, as the benchmark's own process sees them. The other side of the talk is in `_worker`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from kera.cli.bench._worker import Result, Task
from kera.core.base.process import DIE_WITH_PARENT_VARIABLE
from kera.core.errors import KeraError

READY_TIMEOUT_S = 120.0
RESULT_TIMEOUT_S = 600.0
"""Bound on a round, besides the time that it is meant to take."""
LINE_BYTES_MAX = 16 << 20  # a histogram is some kilobytes; a defect should not fill the memory


class WorkerFailed(KeraError):
    """A producer or consumer of the benchmark has failed; the message is its own."""

    code = "bench_worker_failed"


class Worker:
    """One process. `start`, then `go`, then `result`."""

    def __init__(self, task: Task, process: asyncio.subprocess.Process) -> None:
        self.task = task
        self._process = process

    @classmethod
    async def start(cls, task: Task) -> Worker:
        """Start the process and give it its task."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kera.cli.bench._worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, DIE_WITH_PARENT_VARIABLE: "1"},
            start_new_session=True,  # Ctrl-C is for us: we end them
            limit=LINE_BYTES_MAX,
        )
        worker = cls(task, process)
        worker._tell(json.dumps(dataclasses.asdict(task)))
        return worker

    async def ready(self) -> None:
        """Wait until it is warmed up."""
        await self._answer(READY_TIMEOUT_S)

    def go(self) -> None:
        """Let it begin."""
        self._tell("go")

    def tell_total(self, records: int) -> None:
        """Tell a consumer how many records there are."""
        self._tell(f"total {records}")

    async def result(self) -> Result:
        """Wait until it has done its work."""
        return Result(**await self._answer((self.task.seconds or 0) + RESULT_TIMEOUT_S))

    async def end(self) -> None:
        """End the process, whatever it is doing."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.communicate()

    def _tell(self, line: str) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(line.encode() + b"\n")

    async def _answer(self, timeout_s: float) -> dict[str, Any]:
        if self._process.stdout is None:
            raise WorkerFailed(f"the {self.task.role} process has no output")
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        except TimeoutError:
            raise WorkerFailed(f"the {self.task.role} process did not answer within {timeout_s:g} s") from None
        if not line:
            raise WorkerFailed(f"the {self.task.role} process ended with code {await self._process.wait()}")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise WorkerFailed(message["error"])
        return message


@contextlib.asynccontextmanager
async def workers(tasks: Sequence[Task]) -> AsyncIterator[list[Worker]]:
    """Started processes, one per task; all are gone at the end of the block."""
    started: list[Worker] = []
    try:
        for task in tasks:
            worker = await Worker.start(task)
            started.append(worker)
        yield started
    finally:
        await asyncio.gather(*(worker.end() for worker in started))
