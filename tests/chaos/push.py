"""Kill the participants of push, mid-batch, again and again.

A producer writes all the time, and two consumers follow in the broker's memory, each a process (`push_consumer`). That
memory is so small that its slots are reused all the time. A round does one thing, in turn:

* ``consumer``: one is killed with SIGKILL while it holds chunks; it goes on after the last chunk that it reported.
* ``broker``: it is killed, and started again with its memory; consumers and producer go on.
* ``frozen``: a consumer that holds chunks is stopped with SIGSTOP; the broker is killed and started again, and gives
  the slots that the consumer had leased to other segments, as it may after ``reader_grace_ms``. Then it wakes.
* ``executor``: a Spark job reads another stream; one of its Python workers that have the broker's memory mapped is
  killed. (In a separate cluster, with more memory and without the consumers.)

Promised, and checked: no wrong byte is ever given out as intact, and consumers look twice at each; a consumer that
wakes too late learns that, and its bytes have changed; every record comes exactly once after the cursor, in order;
Spark's results are exact; and after each round, when all consumers are gone, no slot is leased.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import signal
import struct
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from kera.broker.log.arena_head import HEAD_BYTES, ROW_BYTES
from kera.client import EARLIEST, Client, Position
from kera.core.base.settings import KIB, MIB
from kera.local.cluster import RunningCluster
from tests.chaos.processes import Process
from tests.chaos.running import Program, Run
from tests.chaos.verdict import Wrong
from tests.integration.support import (
    BROKER,
    Load,
    arena_of,
    keeping_cluster,
    load,
    metric,
    metrics,
    until,
    value_of,
)

STREAM, SPARK_STREAM = "s", "spark"
STREAMLETS = 2
CONSUMERS = 2
KINDS = ("consumer", "broker", "frozen", "executor")
SMALL = {"arena_bytes": 4 * MIB, "segment_bytes": 64 * KIB}
"""64 slots, which the load goes through within seconds."""
LARGE = {"arena_bytes": 64 * MIB, "segment_bytes": 256 * KIB}
"""For Spark, which holds more at a time than the small arena allows a reader, so that most would be pulled."""
READER_GRACE_MS = 500
SPARK_RECORDS = 30_000
CHUNKS_MIN = 10
"""Chunks that a consumer has to report before an event, and again after it."""
ROUND_TIMEOUT_S = 120.0
RUN_TIMEOUT_S = 24 * 3600.0
PAUSE_S = 0.002
OVERWRITTEN_MIN = 0.75
"""The share of a slot that has to change. A consumer holds more than the rest."""

_GENERATION = struct.Struct("<Q")
_LEASES_AT = 14 * 4


class Followed:
    """A consumer over all its processes: its reported chunks, and its position."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._process: Process | None = None
        self._following: asyncio.Task[int] | None = None
        self.positions: dict[int, list[Position]] = {at: [EARLIEST] for at in range(STREAMLETS)}
        self.due = {at: at for at in range(STREAMLETS)}
        self.seen: Counter[str] = Counter()
        """chunks, pushed, overwritten, changed."""

    async def start(self) -> None:
        """Start a process from the position of the last one."""
        task = {"bootstrap": self._bootstrap, "stream": STREAM, "positions": self.positions, "due": self.due}
        self._process = await Process.start("tests.chaos.push_consumer", json.dumps(task))
        self._following = asyncio.create_task(self._follow(self._process))

    async def _follow(self, process: Process) -> int:
        """Follow a process until its end; returns its exit code."""
        while (line := await process.line()) is not None:
            if "overwritten" in line:
                self.seen["overwritten"] += 1
                self.seen["changed"] += line["changed"]
            elif "first" in line:
                self._take(line)
        return await process.ended()

    def _take(self, line: dict[str, Any]) -> None:
        streamlet = line["streamlet"]
        if line["first"] != self.due[streamlet]:
            raise Wrong(f"{streamlet}: record {line['first']} came where {self.due[streamlet]} was due")
        self.due[streamlet] += line["count"] * STREAMLETS
        self.positions[streamlet] = [Position(*line["next"])]
        self.seen["chunks"] += 1
        self.seen["pushed"] += line["pushed"]

    def check(self) -> None:
        """Raise an error if the consumer has ended or found something wrong."""
        if self._following is not None and self._following.done():
            raise Wrong(f"a consumer has ended by itself, with code {self._following.result()}")

    async def go_on(self, chunks: int = CHUNKS_MIN, *, pushed: bool = True) -> None:
        """Wait until the consumer has reported this many more chunks."""
        name = "pushed" if pushed else "chunks"
        wanted = self.seen[name] + chunks

        def enough() -> bool:
            self.check()
            return self.seen[name] >= wanted

        await until(enough, ROUND_TIMEOUT_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self._running().signal(number)

    async def kill(self) -> None:
        """Kill the process, and read its remaining reports."""
        self.signal(signal.SIGKILL)
        await self._ended()

    async def stop(self) -> None:
        """Stop the process cleanly: it closes its client and ends."""
        if self._process is None:
            return
        self._process.send_line("stop")
        if code := await self._ended():
            raise Wrong(f"a consumer that was told to stop ended with code {code}")

    async def _ended(self) -> int:
        process, following = self._running(), self._following
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            code = await (process.ended() if following is None else following)
        self._process = self._following = None
        return code

    async def close(self) -> None:
        """Leave no process behind."""
        if self._following is not None:
            self._following.cancel()
        if self._process is not None:
            await self._process.end()

    def _running(self) -> Process:
        if self._process is None:
            raise Wrong("the consumer does not run")
        return self._process


class Slots:
    """Generations, leases and bytes of the arena's slots, read from its file."""

    def __init__(self, arena: Path) -> None:
        with arena.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        head = json.loads(self._memory[:HEAD_BYTES].rstrip(b"\0"))
        self._count: int = head["slots"]
        self._slots_at: int = head["slots_at"]
        self._slot_bytes: int = head["slot_bytes"]

    def generations(self) -> list[int]:
        """The generations of all slots."""
        return [_GENERATION.unpack_from(self._memory, HEAD_BYTES + at * ROW_BYTES)[0] for at in range(self._count)]

    def leased(self) -> list[int]:
        """The slots that a reader holds."""
        rows = range(HEAD_BYTES, HEAD_BYTES + self._count * ROW_BYTES, ROW_BYTES)
        return [at for at, row in enumerate(rows) if struct.unpack_from("<I", self._memory, row + _LEASES_AT)[0]]

    def bytes_of(self, slot: int) -> bytes:
        """The current bytes of a slot."""
        begin = self._slots_at + slot * self._slot_bytes
        return self._memory[begin : begin + self._slot_bytes]


def overwritten(before: bytes, now: bytes) -> bool:
    """Whether another segment nearly fills a reused slot: chunks seldom fill the last bytes of a slot."""
    pieces = range(0, len(before), KIB)
    return sum(before[at : at + KIB] != now[at : at + KIB] for at in pieces) >= OVERWRITTEN_MIN * len(pieces)


# -- rounds ------------------------------------------------------------------------------------------------------


class Chaos:
    """The rounds with one cluster."""

    def __init__(self, cluster: RunningCluster, run: Run, writer: Load) -> None:
        self._cluster = cluster
        self._run = run
        self._moments = run.moments
        self._writer = writer
        self._consumers = [Followed(cluster.bootstrap) for _ in range(CONSUMERS)]
        self._spark: Process | None = None
        self.spark_seen: Counter[str] = Counter()
        """jobs with a killed worker, pushed bytes, pulled bytes."""

    @property
    def seen(self) -> Counter[str]:
        """The reports of all consumers, and the totals of Spark."""
        return sum((each.seen for each in self._consumers), self.spark_seen)

    async def round(self, kind: str) -> None:
        """Do one of `KINDS` while everything runs, end all consumers, and check that no slot stays leased."""
        if kind != "executor":
            await asyncio.gather(*(each.start() for each in self._consumers))
            await asyncio.gather(*(each.go_on() for each in self._consumers))
            await self._run.moment(0.1)
        await getattr(self, f"_{kind}")()
        await self._all_released()

    async def _consumer(self) -> None:
        killed, *others = self._moments.sample(self._consumers, CONSUMERS)
        await self._until_leased()
        await killed.kill()
        await asyncio.gather(*(each.go_on() for each in others))

    async def _broker(self) -> None:
        await self._until_leased()
        await asyncio.to_thread(self._cluster.kill, BROKER)
        await asyncio.to_thread(self._cluster.restart, BROKER)
        await asyncio.gather(*(each.go_on() for each in self._consumers))

    async def _frozen(self) -> None:
        sleeper, *others = self._moments.sample(self._consumers, CONSUMERS)
        slots = Slots(arena_of(self._cluster))
        await self._until_leased()
        for each in others:
            await each.stop()  # the remaining leases are the sleeper's
        while True:
            await sleeper.go_on()
            await self._until_leased()
            sleeper.signal(signal.SIGSTOP)
            await self._acknowledged(CHUNKS_MIN)  # afterwards the broker has handled everything sent before
            if held := {at: slots.bytes_of(at) for at in slots.leased()}:
                break
            sleeper.signal(signal.SIGCONT)
        told = sleeper.seen["overwritten"]
        await asyncio.to_thread(self._cluster.kill, BROKER)
        await asyncio.to_thread(self._cluster.restart, BROKER)
        try:
            # A released slot keeps its bytes until another segment needs it.
            await until(
                lambda: all(overwritten(before, slots.bytes_of(at)) for at, before in held.items()), ROUND_TIMEOUT_S
            )
        finally:
            sleeper.signal(signal.SIGCONT)
        await sleeper.go_on()
        await until(lambda: sleeper.seen["overwritten"] > told, ROUND_TIMEOUT_S)

    async def _executor(self) -> None:
        if self._spark is None:
            arguments = (self._cluster.bootstrap, SPARK_STREAM, str(STREAMLETS))
            self._spark = await Process.start("tests.chaos.push_spark", *arguments)
            async with asyncio.timeout(ROUND_TIMEOUT_S):
                await self._spark.line()
        killed = False
        before = metrics(self._cluster)
        while not killed:
            self._spark.send_line("read")
            answer = asyncio.create_task(self._spark.line())
            killed = await self._kill_worker(self._spark.pid, answer)
            async with asyncio.timeout(ROUND_TIMEOUT_S):
                found = await answer
            if found != {"records": SPARK_RECORDS}:
                raise Wrong(f"of {SPARK_RECORDS} records Spark has {found}")
        after = metrics(self._cluster)
        self.spark_seen["jobs"] += 1
        self.spark_seen["pushed bytes"] += after["push_bytes_total"] - before["push_bytes_total"]
        self.spark_seen["pulled bytes"] += after["bytes_read_total"] - before["bytes_read_total"]

    async def _kill_worker(self, of: int, answer: asyncio.Task[Any]) -> bool:
        """Kill a process below `of` that reads in the broker's memory; false if the job was faster."""
        arena = str(arena_of(self._cluster))
        while not answer.done():
            readers = await asyncio.to_thread(mapping, of, arena)
            if readers:
                await self._run.moment(0.3)
                if not answer.done():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self._moments.choice(readers), signal.SIGKILL)
                        return True
            await asyncio.sleep(0.01)
        return False

    # -- common parts ----------------------------------------------------------------------------------------

    async def _until_leased(self) -> None:
        """Wait until a reader holds pushed chunks."""
        slots = Slots(arena_of(self._cluster))
        await until(lambda: bool(slots.leased()), ROUND_TIMEOUT_S)

    async def _acknowledged(self, more: int) -> None:
        wanted = len(self._writer.deliveries) + more
        await until(lambda: len(self._writer.deliveries) >= wanted, ROUND_TIMEOUT_S)

    async def _all_released(self) -> None:
        await asyncio.gather(*(each.stop() for each in self._consumers))
        try:
            await until(lambda: metric(self._cluster, "arena_slots_leased") == 0, ROUND_TIMEOUT_S)
        except TimeoutError:
            raise Wrong(f"{metric(self._cluster, 'arena_slots_leased')} slots stay leased by nobody") from None

    async def read_to_end(self) -> None:
        """Wait until every consumer has received all sent records."""
        await asyncio.gather(*(each.start() for each in self._consumers))
        for each in self._consumers:

            def all_there(each: Followed = each) -> bool:
                each.check()
                return sum((each.due[at] - at) // STREAMLETS for at in each.due) == self._writer.sent

            await until(all_there, ROUND_TIMEOUT_S)
        await self._all_released()

    async def close(self) -> None:
        """Leave no process behind."""
        for each in self._consumers:
            await each.close()
        if self._spark is not None:
            await self._spark.end()


def mapping(root: int, path: str) -> list[int]:
    """The processes below `root` that have the file `path` mapped."""
    found = []
    for process in psutil.Process(root).children(recursive=True):
        with contextlib.suppress(OSError):
            if path in Path(f"/proc/{process.pid}/maps").read_text():
                found.append(process.pid)
    return sorted(found)


@contextlib.asynccontextmanager
async def chaos(cluster: RunningCluster, run: Run, *, spark: bool) -> AsyncIterator[Chaos]:
    """Create the streams, and start the load and the consumers."""
    async with await Client.connect(cluster.bootstrap) as client, client.producer(chunk_bytes_max=4 * KIB) as producer:
        await client.admin.create_stream(STREAM, streamlets=STREAMLETS, group_segments=2)
        await producer.prepare(STREAM)
        if spark:
            await client.admin.create_stream(SPARK_STREAM, streamlets=STREAMLETS)
            await producer.prepare(SPARK_STREAM)
            for number in range(SPARK_RECORDS):
                producer.send(SPARK_STREAM, value_of(number), streamlet=number % STREAMLETS)
                if number % 100 == 0:
                    await producer.drain()
            await producer.flush()
        async with load(producer, STREAM, STREAMLETS, timeout_s=RUN_TIMEOUT_S, pause_s=PAUSE_S) as writer:
            made = Chaos(cluster, run, writer)
            try:
                yield made
                writer.stopping = True
                await until(lambda: len(writer.deliveries) == writer.sent, ROUND_TIMEOUT_S)
                await made.read_to_end()
            finally:
                await made.close()


async def rounds(run: Run, cluster: RunningCluster, kinds: Sequence[str]) -> None:
    """Run the rounds of one cluster, and check the end. Raises `Wrong`."""
    async with chaos(cluster, run, spark="executor" in kinds) as made:
        for kind in kinds:
            await made.round(kind)
            run.tell(f"{kind}; {', '.join(f'{name} {count:,}' for name, count in sorted(made.seen.items()))}")
    run.seen += made.seen
    check_shown(made.seen, frozen=kinds.count("frozen"))


def check_shown(seen: Counter[str], *, frozen: int) -> None:
    """Check that the rounds used shared memory, and that a reader woke too late if `frozen`. Raises `Wrong`."""
    if not seen["pushed"] + seen["pushed bytes"]:
        raise Wrong("nothing was pushed: the rounds have shown nothing")
    if frozen and not seen["changed"]:
        raise Wrong("nobody's memory was used again: the rounds have shown nothing")
    for pushed, pulled in (
        (seen["pushed"], seen["chunks"] - seen["pushed"]),
        (seen["pushed bytes"], seen["pulled bytes"]),
    ):
        if pushed < pulled:
            raise Wrong(f"{pushed:,} were pushed and {pulled:,} pulled: the rounds have shown little")


async def work(run: Run) -> None:
    """Run all rounds, those with Spark last."""
    kinds = run.kinds()
    for size, spark in ((SMALL, False), (LARGE, True)):
        if some := [kind for kind in kinds if (kind == "executor") is spark]:
            with (
                run.cluster_folder() as folder,
                keeping_cluster(folder, reader_grace_ms=READER_GRACE_MS, **size) as cluster,
            ):
                await rounds(run, cluster, some)


PUSH = Program(
    __doc__ or "", "each chunk came once, with all its bytes, or was known to be overwritten", work, 100, KINDS
)
