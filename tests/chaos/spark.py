"""Kill a Spark job, its workers and its broker again and again.

A producer writes numbers to a stream, some of them twice. A Spark job in separate processes reads them, drops
duplicates (a stateful shuffle), and writes the others to another stream. A round waits until more has come out, and
kills one of these at a random moment, with SIGKILL:

* ``driver``: Spark's driver with its JVM, which is started again with the same checkpoint. Its Python workers may live
  on for a moment, and write;
* ``worker``: one of the Python processes that belong to the job: tasks, or one that plans. If the query ends because
  of that, it is started again;
* ``broker``: the broker of both streams, which is started again with its memory.

Promised, and checked at the end: every number that was sent has come out, exactly once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from kera.client import Client, Producer
from kera.core.base.settings import KIB, MIB
from kera.local.cluster import RunningCluster
from tests.chaos.running import Program, Run
from tests.chaos.verdict import Wrong
from tests.integration.support import BROKER, keeping_cluster

ROOT = Path(__file__).parents[2]
SOURCE, TARGET = "in", "out"
STREAMLETS_IN, STREAMLETS_OUT = 4, 3
VALUE_BYTES = 1000
"""Segments of 64 KiB mean chunks of 8 KiB: so the rows of a task are many chunks per streamlet."""
RECORDS_PER_S = 300
BACKLOG = 8_000
"""Numbers that were sent and have not come out."""
PAUSE_S = 0.1
REPEATED = 0.1
"""The share of numbers that are sent once more later."""
SEGMENT_BYTES = 64 * KIB
ARENA_BYTES = 128 * MIB
ROUND_TIMEOUT_S = 600.0
END_TIMEOUT_S = 900.0
KINDS = ("driver", "worker", "broker")


class Job:
    """A Spark job, over all its launches."""

    def __init__(self, argv: Sequence[str], log_path: Path) -> None:
        """`argv`: the arguments for Python."""
        self._argv = [sys.executable, *argv]
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self.launches = 0

    def start(self) -> None:
        """Start it, again if it has ended."""
        with self._log_path.open("a") as log:
            self._process = subprocess.Popen(
                self._argv, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.launches += 1

    def keep_alive(self) -> None:
        """Start it again if it has ended."""
        if self._process is not None and self._process.poll() is not None:
            self.start()

    def has_ended(self) -> bool:
        """Whether it has ended successfully. Raises `Wrong` if it has failed."""
        code = None if self._process is None else self._process.poll()
        if code:
            raise Wrong(f"the job has ended with {code}:\n{self.log_tail()}")
        return code == 0

    def kill(self) -> None:
        """Kill the driver and its JVM with SIGKILL."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def workers(self) -> list[int]:
        """The Python processes that Spark has started, in the order of their ids."""
        if self._process is None:
            return []
        parents = _parents()
        found = []
        for pid in parents:
            above = parents.get(pid)
            while above is not None and above != self._process.pid:
                above = parents.get(above)
            if above is not None and b"python" in _command(pid):
                found.append(pid)
        return sorted(found)

    async def until(
        self, reached: Callable[[], Awaitable[bool]], what: str, timeout_s: float, *, alive: bool = True
    ) -> None:
        """Wait for `reached`; if `alive`, start the job again whenever it has ended."""
        deadline_s = time.monotonic() + timeout_s
        while not await reached():
            if time.monotonic() > deadline_s:
                raise Wrong(f"waited {timeout_s:.0f} s for {what}:\n{self.log_tail()}")
            if alive:
                await asyncio.to_thread(self.keep_alive)
            await asyncio.sleep(PAUSE_S)

    def log_tail(self) -> str:
        """The end of the job's log."""
        return self._log_path.read_text(errors="replace")[-6000:]


def _parents() -> dict[int, int]:
    """The parent of each process of this machine."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return parents


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


class Load:
    """Sends records until `stopping` is set."""

    def __init__(self, producer: Producer, dice: random.Random) -> None:
        self._producer = producer
        self._dice = dice
        self.sent = 0
        """The number of records sent, numbered from 0."""
        self.stopping = False

    async def run(self) -> None:
        """Send, and wait until all records are acknowledged."""
        while not self.stopping:
            await self.turn()
        await self._producer.flush()

    async def turn(self) -> None:
        """Send some records, and wait a little."""
        raise NotImplementedError


L = TypeVar("L", bound=Load)


class Numbers(Load):
    """Sends numbers, some of them twice."""

    limit = BACKLOG
    """The number of sent records at which it pauses, so that a slow machine is not flooded."""

    async def turn(self) -> None:
        """Send a number, and sometimes an earlier one again."""
        if self.sent >= self.limit:
            await asyncio.sleep(PAUSE_S)  # sleep: enough records are in flight
            return
        numbers = [self.sent]
        self.sent += 1
        if self._dice.random() < REPEATED:
            numbers.append(self._dice.randrange(self.sent))
        for number in numbers:
            value = b"%d:" % number
            await self._producer.drain()
            self._producer.send(SOURCE, value.ljust(VALUE_BYTES, b"."), keys=b"%d" % (number % 1000))
        await asyncio.sleep(1 / RECORDS_PER_S)  # sleep: the load


async def count(client: Client) -> int:
    """The number of records that have come out."""
    return sum(entry.next_record for entries in (await client.bounds(TARGET)).values() for entry in entries)


@contextlib.asynccontextmanager
async def loading(client: Client, kind: type[L], run: Run, chunk_bytes: int) -> AsyncIterator[L]:
    """Run a load during the block."""
    async with client.producer(chunk_bytes_max=chunk_bytes, linger_ms=20, delivery_timeout_ms=120_000) as producer:
        await producer.prepare(SOURCE)
        load = kind(producer, random.Random(run.arguments.seed + 1))
        running = asyncio.create_task(load.run())
        try:
            yield load
        finally:
            load.stopping = True
            await running


async def rounds(run: Run, cluster: RunningCluster, job: Job) -> None:
    """Run all rounds, and check the result. Raises `Wrong`."""
    moments = run.moments
    async with await Client.connect(cluster.bootstrap) as client:
        await client.admin.create_stream(SOURCE, streamlets=STREAMLETS_IN)
        await client.admin.create_stream(TARGET, streamlets=STREAMLETS_OUT)
        async with loading(client, Numbers, run, 8 * KIB) as load:
            job.start()
            for kind in run.kinds():
                wanted = await count(client) + moments.randrange(1, 2 * RECORDS_PER_S)

                async def more(wanted: int = wanted) -> bool:
                    out = await count(client)
                    load.limit = out + BACKLOG
                    return out >= wanted

                await job.until(more, f"record {wanted} to come out", ROUND_TIMEOUT_S)
                await run.moment(1)
                await kill(kind, cluster, job, moments)
                run.tell(
                    f"{kind} killed; {job.launches} launches; {load.sent:,} numbers in, {await count(client):,} out"
                )

        async def all_out() -> bool:
            return await count(client) >= load.sent

        # The check below finds numbers that came out too often.
        await job.until(all_out, f"{load.sent} numbers to come out", END_TIMEOUT_S)
        check_once(load.sent, await numbers(client))
        run.seen += Counter({"numbers": load.sent, "launches": job.launches})


def check_once(sent: int, found: Counter[int]) -> None:
    """Check that each of the `sent` numbers has come out once. Raises `Wrong`."""
    more_than_once = {number: times for number, times in found.items() if times > 1}
    missing = set(range(sent)) - set(found)
    if more_than_once or missing or len(found) != sent:
        raise Wrong(
            f"{sent} numbers sent, {found.total()} came out; more than once: {dict(list(more_than_once.items())[:9])}"
            f" ({len(more_than_once)}), missing: {sorted(missing)[:9]} ({len(missing)})"
        )


async def kill(kind: str, cluster: RunningCluster, job: Job, dice: random.Random) -> None:
    """Kill a process (of `KINDS`), and restart it unless it restarts on its own."""
    if kind == "driver":
        await asyncio.to_thread(job.kill)
        job.start()
    elif kind == "broker":
        await asyncio.to_thread(cluster.kill, BROKER)
        await asyncio.to_thread(cluster.restart, BROKER)
    else:

        async def killed() -> bool:
            workers = await asyncio.to_thread(job.workers)
            with contextlib.suppress(ProcessLookupError):  # the worker may have ended meanwhile: pick another
                if workers:
                    os.kill(dice.choice(workers), signal.SIGKILL)
                    return True
            return False

        await job.until(killed, "a worker to kill", ROUND_TIMEOUT_S)


async def numbers(client: Client) -> Counter[int]:
    """The numbers that have come out, with their counts."""
    found: Counter[int] = Counter()
    async with client.consumer(TARGET, start="earliest", end="latest") as consumer:
        async for record in consumer:
            found[int((record.value or b"").partition(b":")[0])] += 1
    return found


async def work(run: Run) -> None:
    """Start a cluster and a job, and run all rounds. Raises `Wrong`."""
    folder = run.folder
    with keeping_cluster(folder / "cluster", arena_bytes=ARENA_BYTES, segment_bytes=SEGMENT_BYTES) as cluster:
        argv = ["-m", "tests.chaos.spark_job", cluster.bootstrap, SOURCE, TARGET, str(folder / "checkpoint")]
        job = Job([*argv, "--engine", run.arguments.engine], folder / "job.log")
        try:
            await rounds(run, cluster, job)
        finally:
            job.kill()


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this program."""
    parser.add_argument("--engine", choices=("python", "columnar"), default="python", help="who writes to the stream")


SPARK = Program(__doc__ or "", "every number came out exactly once", work, 30, KINDS, options)
