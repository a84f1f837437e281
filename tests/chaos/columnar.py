"""Make readers of the columnar engine die, stall and run out of memory.

A producer writes all the time. A Spark cluster (a master, and workers with an executor each, all processes) reads in
the broker's memory, which is so small that its slots are reused all the time: a query follows the producer, and a batch
reads another stream. Both read slowly, so that a chunk is always in use. A round starts both, does one thing while they
read, waits for their results, and ends them:

* ``executor``: the JVM of an executor is killed with SIGKILL, while it reads in place;
* ``memory``: another query takes more memory than an executor has, until one that reads in place has died of it;
* ``broker``: the broker is killed, and started again with its memory; ``graceful``: it stops cleanly, and is restarted;
* ``stalled``: all executors are stopped with SIGSTOP; meanwhile more is written than the broker's memory holds. The
  slots that they had leased keep their contents, and the executors go on with them;
* ``reused``: they are stopped, the broker is killed and started again, and gives the slots that they had leased to
  other segments, as it may after ``reader_grace_ms``. Then they wake, and have to notice;
* ``early``: queries that want one record only, and a job that is cancelled.

Promised, and checked: batches give every record once, with all its bytes, and so do micro-batches, in order, whether or
not they are run again; records of the producer are acknowledged meanwhile; after each round no slot is leased, and a
dead executor leaves no process behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil

from kera.client import Client, Producer
from kera.core.base.settings import KIB, MIB
from kera.local.cluster import RunningCluster
from tests.chaos.processes import Process
from tests.chaos.push import Slots, check_shown, mapping
from tests.chaos.running import Program, Run
from tests.chaos.verdict import Wrong
from tests.integration.support import (
    BROKER,
    NOISE,
    Load,
    arena_of,
    keeping_cluster,
    load,
    metric,
    metrics,
    until,
    value_of,
)
from tests.spark.standalone import Place, Standalone, standalone
from tests.spark.submitting import java_of_tests

STANDING, GROWING, FLOOD = "standing", "growing", "flood"
STREAMLETS = 2
KINDS = ("executor", "memory", "broker", "graceful", "stalled", "reused", "early")
EXECUTORS = 2
CORES = 2
"""Cores of each executor: for the batch and the query at once."""
ARENA_BYTES = 8 * MIB
SEGMENT_BYTES = 64 * KIB
READER_GRACE_MS = 500
RECORDS = 4_000
"""Records of the batch."""
PAUSE_S = 0.1
"""Time between ten records of the load: nearly 100 a second, which a query keeps up with."""
FLOOD_BYTES = 16 * KIB
HEADS = 3
FOLLOWED_MIN = 100
"""Records that the query has to give after the disturbance."""
NOTICED = re.compile(r"MemoryReused|it is read again")
OUT_OF_MEMORY = "OutOfMemoryError"
TOLD_LINES = 60
ROUND_TIMEOUT_S = 150.0
RUN_TIMEOUT_S = 24 * 3600.0


class Driver:
    """The process of Spark's driver, `columnar_job`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())
        self.ready = asyncio.Event()
        self.followed = 0
        """Records that the query has given."""

    async def _read(self) -> None:
        while (line := await self._process.line()) is not None:
            if "ready" in line:
                self.ready.set()
            elif "followed" in line:
                self.followed = line["followed"]
            else:
                self._waiting.pop(line["id"]).set_result(line)
        raise Wrong("the driver has ended by itself")

    def begin(self, what: str, **arguments: Any) -> tuple[int, asyncio.Future[dict[str, Any]]]:
        """Send a command; returns its number, and a future of its result."""
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._process.send_line(json.dumps({"id": number, "do": what, **arguments}))
        return number, future

    async def do(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Run a command that has to succeed."""
        found = await self.end_of(self.begin(what, **arguments)[1])
        if "failed" in found:
            raise Wrong(f"{what}: {found['failed']}")
        return found

    async def end_of(self, future: asyncio.Future[dict[str, Any]]) -> dict[str, Any]:
        """The result of a command, success or failure."""
        await self.until(future.done, "Spark's answer")
        return future.result()

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for `condition`, unless the driver reports a broken promise."""

        def reached() -> bool:
            if self._reading.done():
                self._reading.result()
            return condition()

        try:
            await until(reached, ROUND_TIMEOUT_S)
        except TimeoutError:
            raise Wrong(f"waited {ROUND_TIMEOUT_S:.0f} s for {what}") from None

    async def close(self) -> None:
        """Leave no process behind. Executors end when their driver is gone."""
        self._reading.cancel()
        await self._process.end()


class Chaos:
    """The rounds with one cluster of each kind."""

    def __init__(
        self, cluster: RunningCluster, spark: Standalone, driver: Driver, producer: Producer, writer: Load, log: Path
    ) -> None:
        self._cluster = cluster
        self._spark = spark
        self._driver = driver
        self._producer = producer
        self._writer = writer
        self._log = log
        self._number = 0
        self._batch: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        """The batch that is running; `_number` is the number of its command."""
        self._last: dict[str, int] = {}
        self.seen: Counter[str] = Counter()
        """batches, executors that were killed or ran out of memory, slots that were reused, …"""

    async def round(self, kind: str, moments: random.Random) -> None:
        """Do one of `KINDS` while both queries read, wait for their results, and check that no slot stays leased."""
        await self._driver.do("follow")
        await self._begin_batch(moments)
        delivered = len(self._writer.deliveries)
        self._count_bytes()
        await getattr(self, f"_{kind}")(moments)
        followed = self._driver.followed
        await self._end_batch()
        await self._driver.until(lambda: self._driver.followed >= followed + FOLLOWED_MIN, "micro-batches")
        await self._acknowledged(delivered)
        await self._driver.do("leave")
        await self._all_released()
        self._count_bytes()

    async def _begin_batch(self, moments: random.Random) -> None:
        """Start a batch, and wait until it runs and executors read in place."""
        while True:
            self._number, self._batch = self._driver.begin("batch")
            slots = Slots(arena_of(self._cluster))
            await self._driver.until(
                lambda: self._batch.done() or bool(slots.leased() and self._readers()),  # noqa: B023
                "a lease",
            )
            await asyncio.sleep(moments.random())  # sleep: a random moment
            if not self._batch.done():
                return
            await self._end_batch()

    async def _end_batch(self) -> None:
        """Wait for the batch, and check its result."""
        found = await self._driver.end_of(self._batch)
        if found.get("records") != RECORDS:
            raise Wrong(f"of {RECORDS} records the batch has {found}")
        self.seen["batches"] += 1

    def _count_bytes(self) -> None:
        """Count the bytes that this launch of the broker pushed and pulled since the last call."""
        now = metrics(self._cluster)
        for name, what in (("push_bytes_total", "pushed bytes"), ("bytes_read_total", "pulled bytes")):
            last = self._last.get(name, 0)
            self.seen[what] += now[name] - (last if last <= now[name] else 0)
            self._last[name] = now[name]

    # -- kinds ---------------------------------------------------------------------------------------------------

    async def _executor(self, moments: random.Random) -> None:
        killed = moments.choice(self._readers())
        family = [*killed.children(recursive=True), killed]
        killed.kill()
        await self._driver.until(lambda: all(gone(each) for each in family), "the end of an executor's children")
        self.seen["killed"] += 1

    async def _memory(self, _: random.Random) -> None:
        readers, died = self._readers(), self._said(OUT_OF_MEMORY)
        number, hog = self._driver.begin("hog")
        await self._driver.until(lambda: any(gone(each) for each in readers), "an executor that dies")
        await self._driver.do("cancel", of=number)  # or it would run again, and make tasks of the others fail too often
        if "failed" not in await self._driver.end_of(hog):
            raise Wrong("there was memory for all")
        if self._said(OUT_OF_MEMORY) == died:
            raise Wrong("an executor has died, but not for lack of memory")
        self.seen["out of memory"] += 1

    async def _broker(self, _: random.Random) -> None:
        await asyncio.to_thread(self._cluster.kill, BROKER)
        await asyncio.to_thread(self._cluster.restart, BROKER)
        self.seen["brokers"] += 1

    async def _graceful(self, _: random.Random) -> None:
        await asyncio.to_thread(self._cluster.restart, BROKER)
        self.seen["brokers"] += 1

    async def _stalled(self, _: random.Random) -> None:
        slots = Slots(arena_of(self._cluster))
        async with self._stopped(slots) as held:
            before, delivered = slots.generations(), len(self._writer.deliveries)
            await self._flood(2 * ARENA_BYTES)
            await self._acknowledged(delivered)
            now = slots.generations()
            if reused := [at for at in held if now[at] != before[at]]:
                raise Wrong(f"slots {reused} were leased, and were used again")
            if sum(now) == sum(before):
                raise Wrong("no slot was used again: the round has shown nothing")

    async def _reused(self, _: random.Random) -> None:
        slots = Slots(arena_of(self._cluster))
        noticed = self._said(NOTICED)
        async with self._stopped(slots) as held:
            before = slots.generations()
            await asyncio.to_thread(self._cluster.kill, BROKER)
            await asyncio.to_thread(self._cluster.restart, BROKER)
            async with asyncio.timeout(ROUND_TIMEOUT_S):
                while any(now == before[at] for at, now in enumerate(slots.generations()) if at in held):
                    await self._flood(ARENA_BYTES // 4)
        await self._driver.until(lambda: self._said(NOTICED) > noticed, "somebody who notices")
        self.seen["slots used again"] += len(held)

    async def _early(self, _: random.Random) -> None:
        await self._driver.do("cancel", of=self._number)
        if "failed" not in await self._driver.end_of(self._batch):
            raise Wrong("a batch was cancelled, and has a result")
        await asyncio.gather(*(self._driver.do("head") for _ in range(HEADS)))
        self._number, self._batch = self._driver.begin("batch")
        self.seen["ended early"] += 1 + HEADS

    # -- common parts --------------------------------------------------------------------------------------------

    def _readers(self) -> list[psutil.Process]:
        """The executors that have the broker's memory mapped."""
        arena = str(arena_of(self._cluster))
        return [psutil.Process(pid) for each in self._spark.workers for pid in mapping(each.process.pid, arena)]

    @contextlib.asynccontextmanager
    async def _stopped(self, slots: Slots) -> AsyncIterator[list[int]]:
        """Stop all executors while they lease some slots; gives those slots."""
        while True:
            readers = self._readers()
            try:
                for each in readers:
                    each.suspend()
                await self._flood(ARENA_BYTES // 8)  # afterwards the broker has handled all that they sent before
                if held := slots.leased():
                    yield held
                    return
            finally:
                for each in readers:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.resume()

    async def _acknowledged(self, more_than: int) -> None:
        """Wait until more than this many records of the load are acknowledged."""
        await self._driver.until(lambda: len(self._writer.deliveries) > more_than, "acknowledgements")

    async def _flood(self, count_bytes: int) -> None:
        """Write this many bytes, and wait until they are acknowledged."""
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            sent = []
            for number in range(count_bytes // FLOOD_BYTES):
                sent.append(self._producer.send(FLOOD, NOISE[:FLOOD_BYTES], streamlet=number % STREAMLETS))
                await self._producer.drain()
            for each in sent:
                await each

    def _said(self, pattern: str | re.Pattern[str]) -> int:
        """The number of matches in the logs of driver and executors."""
        logs = [self._log, *(log for each in self._spark.workers for log in each.folder.glob("app-*/*/std*"))]
        return sum(len(re.findall(pattern, log.read_text(errors="replace"))) for log in logs)

    async def _all_released(self) -> None:
        try:
            await until(lambda: metric(self._cluster, "arena_slots_leased") == 0, ROUND_TIMEOUT_S)
        except TimeoutError:
            raise Wrong(f"{metric(self._cluster, 'arena_slots_leased')} slots stay leased by nobody") from None

    async def follow_to_end(self) -> None:
        """Wait until the query has given every record that was sent."""
        self._writer.stopping = True
        await self._acknowledged(self._writer.sent - 1)
        await self._driver.do("follow")
        await self._driver.until(lambda: self._driver.followed == self._writer.sent, "the last micro-batch")
        await self._driver.do("leave")
        await self._all_released()


def gone(process: psutil.Process) -> bool:
    """Whether a process has ended; its parent, which should have waited for it, may be gone, too."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextlib.asynccontextmanager
async def driving(spark: Standalone, cluster: RunningCluster, folder: Path, log: Path) -> AsyncIterator[Driver]:
    """Start Spark's driver, and wait for all its executors."""
    task = {
        "master": spark.url,
        "executors": EXECUTORS,
        "cores": CORES,
        "bootstrap": cluster.bootstrap,
        "standing": STANDING,
        "growing": GROWING,
        "streamlets": STREAMLETS,
        "folder": str(folder),
    }
    with log.open("wb") as file:
        driver = Driver(await Process.start("tests.chaos.columnar_job", json.dumps(task), log=file))
    try:
        await driver.until(driver.ready.is_set, "executors")
        yield driver
    finally:
        await driver.close()


@contextlib.asynccontextmanager
async def chaos(cluster: RunningCluster, spark: Standalone, folder: Path) -> AsyncIterator[Chaos]:
    """Create the streams, and start the load and Spark's driver."""
    log = folder / "driver.log"
    async with (
        await Client.connect(cluster.bootstrap) as client,
        client.producer(chunk_bytes_max=4 * KIB) as producer,
        client.producer(chunk_bytes_max=2 * FLOOD_BYTES) as flood,
    ):
        for stream in (STANDING, GROWING, FLOOD):
            await client.admin.create_stream(stream, streamlets=STREAMLETS, group_segments=2)
        await producer.prepare(STANDING)
        for number in range(RECORDS):
            producer.send(STANDING, value_of(number), streamlet=number % STREAMLETS)
            await producer.drain()
        await producer.flush()
        await producer.prepare(GROWING)
        await flood.prepare(FLOOD)
        async with (
            driving(spark, cluster, folder, log) as driver,
            load(producer, GROWING, STREAMLETS, timeout_s=RUN_TIMEOUT_S, pause_s=PAUSE_S) as writer,
        ):
            yield Chaos(cluster, spark, driver, flood, writer, log)


async def work(run: Run) -> None:
    """Run all rounds, with clusters of their own. Raises `Wrong`."""
    folder = run.folder
    with (
        keeping_cluster(
            folder / "kera", arena_bytes=ARENA_BYTES, segment_bytes=SEGMENT_BYTES, reader_grace_ms=READER_GRACE_MS
        ) as cluster,
        standalone(
            folder / "spark", java_of_tests(), [], workers=[Place()] * EXECUTORS, cores=CORES, memory="1g"
        ) as spark,
    ):
        async with chaos(cluster, spark, folder) as made:
            for kind in run.kinds():
                await made.round(kind, run.moments)
                run.tell(f"{kind}; {', '.join(f'{name} {count:,}' for name, count in sorted(made.seen.items()))}")
            await made.follow_to_end()
    run.seen += made.seen
    check_shown(made.seen, frozen=0)


COLUMNAR = Program(__doc__ or "", "all results are exact, and no slot stays leased", work, 50, KINDS)
