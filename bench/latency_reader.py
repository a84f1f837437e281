"""The reader of `bench.latency`, a process of its own: how late each record was, and the cost of reading it.

Each record has the time at which it was accepted; all records count, by the clock that both processes share. A target
is held in a window where its records were within it on average, by when they were accepted: as brokers judge
constraints. A stricter figure is the share of windows where 99 of 100 records were.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kera.client import Client
from kera.client.settings import SharedMemory
from kera.core.base.process import DIE_WITH_PARENT_VARIABLE, die_with_parent
from kera.core.base.settings import MIB

WINDOW_S = 1.0
"""The shortest window that a constraint may have."""


class Seen(NamedTuple):
    """The figures of a run."""

    mean_ms: float
    """From the acceptance of records until the reader has them."""
    p99_ms: float
    means_ms: list[float]
    """Mean of each window."""
    p99s_ms: list[float]
    cpu_s: float
    """Processor time of the process, since the beginning."""

    def held(self, limit_ms: float) -> float:
        """The share of windows where records were within the limit on average."""
        return part_within(self.means_ms, limit_ms)

    def held_p99(self, limit_ms: float) -> float:
        """The share of windows where 99 of 100 records were within the limit."""
        return part_within(self.p99s_ms, limit_ms)


def part_within(windows_ms: Sequence[float], limit_ms: float) -> float:
    """The share of windows within the limit; without windows, all are."""
    return sum(each <= limit_ms for each in windows_ms) / max(1, len(windows_ms)) if windows_ms else 1.0


def summed_up(accepted_us: npt.NDArray[Any], waited_us: npt.NDArray[Any], cpu_s: float, window_s: float) -> Seen:
    """The figures of records, by the time when each was accepted and the time that it took.

    There is at least one window. A rest of less than half a window counts to the window before.
    """
    if not len(accepted_us):
        return Seen(float("nan"), float("nan"), [], [], cpu_s)
    since_us = accepted_us - accepted_us.min()
    count = max(1, round(float(since_us.max()) / 1e6 / window_s))
    numbers = np.minimum(since_us // round(window_s * 1e6), count - 1)
    windows = [waited_us[numbers == number] / 1000 for number in range(count)]
    return Seen(
        float(waited_us.mean()) / 1000,
        float(np.quantile(waited_us, 0.99)) / 1000,
        [float(each.mean()) for each in windows if len(each)],
        [float(np.quantile(each, 0.99)) for each in windows if len(each)],
        cpu_s,
    )


# -- the process ---------------------------------------------------------------------------------------------------


class Arrivals:
    """The arrivals of records."""

    def __init__(self) -> None:
        self.records = 0
        self._found: list[tuple[float, bytes]] = []

    def add(self, batch: pa.RecordBatch, now_us: float) -> None:
        """Note the arrival of a batch: noting each record would cost more than reading it."""
        times, count = batch.column("timestamp"), batch.num_rows
        self.records += count
        first = 8 * times.offset
        self._found.append((now_us, bytes(memoryview(times.buffers()[1])[first : first + 8 * count])))

    def since(self, begun_us: float, cpu_s: float) -> Seen:
        """The figures of records that were accepted since then."""
        accepted_us = np.frombuffer(b"".join(times for _, times in self._found), np.int64)
        came_us = np.repeat([now_us for now_us, _ in self._found], [len(times) // 8 for _, times in self._found])
        counts = accepted_us >= begun_us
        return summed_up(accepted_us[counts], (came_us - accepted_us)[counts], cpu_s, WINDOW_S)


async def work(task: dict[str, Any]) -> None:
    """One run: prints ``ready``, begins at the input, and then reads as many records as the input says."""
    arrivals, wanted = Arrivals(), sys.maxsize
    come = asyncio.Event()

    async def read() -> None:
        async for chunk in consumer.batches():
            arrivals.add(chunk.batch, time.time() * 1e6)
            if arrivals.records >= wanted:
                come.set()

    async with await Client.connect(task["bootstrap"]) as client:
        memory: SharedMemory = "auto" if task["pushed"] else "never"
        async with client.consumer(task["stream"], start="earliest", shared_memory=memory) as consumer:
            reading = asyncio.create_task(read())
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            begun_us, begun_cpu_s = time.time() * 1e6, time.process_time()
            wanted = int(await asyncio.to_thread(sys.stdin.readline))
            if arrivals.records < wanted:
                ended = asyncio.create_task(come.wait())
                await asyncio.wait((ended, reading), return_when=asyncio.FIRST_COMPLETED)
                ended.cancel()
            cpu_s = time.process_time() - begun_cpu_s
            if reading.done():
                await reading
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            print(json.dumps(arrivals.since(begun_us, cpu_s)), flush=True)


# -- whom it tells -------------------------------------------------------------------------------------------------


class Reader:
    """The reader's process, as the measuring process sees it. Kill it at the end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        if process.stdin is None or process.stdout is None:
            raise SystemExit("a process without pipes")
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout

    @classmethod
    async def started(cls, bootstrap: str, stream: str, *, pushed: bool) -> Reader:
        """Start a process that reads."""
        task = json.dumps({"bootstrap": bootstrap, "stream": stream, "pushed": pushed})
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.latency_reader", task),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, DIE_WITH_PARENT_VARIABLE: "1"},
            limit=MIB,
        )
        made = cls(process)
        if await made._stdout.readline() != b"ready\n":
            raise SystemExit("the reader has ended")
        return made

    def begin(self) -> None:
        """Count records that are accepted from now on."""
        self._stdin.write(b"go\n")

    async def seen(self, records: int) -> Seen:
        """The figures when `records` have come in total."""
        self._stdin.write(b"%d\n" % records)
        line = await self._stdout.readline()
        if not line:
            raise SystemExit("the reader has ended")
        await self._process.wait()
        return Seen(*json.loads(line))

    async def kill(self) -> None:
        """Kill the process if it has not ended."""
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(work(json.loads(sys.argv[1])))
