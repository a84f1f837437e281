"""Starts and controls the benchmark's worker processes. `_worker` has the other side of the protocol."""

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
"""Limit for a round, in addition to its planned time."""
LINE_BYTES_MAX = 16 << 20  # a histogram has some kilobytes; a faulty worker must not fill the memory


class WorkerFailed(KeraError):
    """A producer or consumer of the benchmark has failed; the message is from it."""

    code = "bench_worker_failed"


class Worker:
    """One process. Call `start`, `ready`, `go` and `result`, in this order, and `end`."""

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
            start_new_session=True,  # so that Ctrl-C reaches only this process, which ends the workers
            limit=LINE_BYTES_MAX,
        )
        worker = cls(task, process)
        worker._tell(json.dumps(dataclasses.asdict(task)))
        return worker

    async def ready(self) -> None:
        """Wait until the worker is warmed up."""
        await self._answer(READY_TIMEOUT_S)

    def go(self) -> None:
        """Let the worker begin."""
        self._tell("go")

    def tell_total(self, records: int) -> None:
        """Send a consumer the number of records to read in all."""
        self._tell(f"total {records}")

    async def result(self) -> Result:
        """Wait for the worker's result. Raises `WorkerFailed`."""
        return Result(**await self._answer((self.task.seconds or 0) + RESULT_TIMEOUT_S))

    async def end(self) -> None:
        """Kill the process if it still runs."""
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
    """Context manager that starts a process per task, and ends all of them at the end of the block."""
    started: list[Worker] = []
    try:
        for task in tasks:
            worker = await Worker.start(task)
            started.append(worker)
        yield started
    finally:
        await asyncio.gather(*(worker.end() for worker in started))
