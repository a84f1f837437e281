"""Compare the same micro-batches live, as a backfill, and with kills.

A producer writes to a stream whose epochs follow the clock: to some or all of its streamlets, with an occasional late
record. A Spark query with ``epochsPerTrigger`` reads it three times, each in its own processes:

* live, from before the first record on, with the Python engine; only its broker is disturbed;
* killed: a round waits until the query has done another micro-batch, and kills at a random moment, with SIGKILL, in
  turn its ``driver``, a ``worker`` (one of its Python processes), and the ``broker``; the killed process is started
  again, the driver with the same checkpoint and the other engine;
* as a backfill at full speed, when all is written, with the columnar engine.

Promised, and checked: the micro-batches with the same numbers have the same rows, in the same epochs, in all of them,
also when one is run again; and each epoch has the records that `Client.epochs` finds in it.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from kera.client import Client, Producer
from kera.core.base.settings import KIB, MIB
from kera.local.cluster import RunningCluster
from tests.chaos.epochs_job import Row, digest_of
from tests.chaos.running import Program, Run
from tests.chaos.spark import KINDS, PAUSE_S, SOURCE, Job, Load, kill, loading
from tests.chaos.verdict import Wrong
from tests.integration.support import keeping_cluster

STREAMLETS = 4
EPOCH_MS = 500
"""Length of the stream's epochs; the query's are twice as long."""
QUERY_EPOCH_MS = 1000
GRACE_MS = 300
EPOCHS = 5
"""Epochs of a micro-batch."""
COLUMNAR, PYTHON = ENGINES = ("columnar", "python")
SILENCE = 0.02
"""The probability, per turn, that a streamlet falls silent."""
SILENT_TURNS = 100
LATE = 0.01
LATE_S = 3.0
TURN_S = 0.02
SEGMENT_BYTES = 64 * KIB
ARENA_BYTES = 128 * MIB
TIMEOUT_S = 300.0
Batches = dict[int, dict[str, tuple[int, str]]]
"""Maps the number of a micro-batch to the number of rows and their hash for each of its epochs."""


class Epochs(Load):
    """Writes to some streamlets in each turn."""

    def __init__(self, producer: Producer, dice: random.Random) -> None:
        super().__init__(producer, dice)
        self._silent = dict.fromkeys(range(STREAMLETS), 0)

    async def turn(self) -> None:
        """Send to all streamlets that are not silent."""
        for streamlet in range(STREAMLETS):
            if self._dice.random() < SILENCE:
                self._silent[streamlet] = self._dice.randrange(SILENT_TURNS)
            if self._silent[streamlet]:
                self._silent[streamlet] -= 1
                continue
            late_s = self._dice.random() * (LATE_S if self._dice.random() < LATE else TURN_S)
            time_us = int((time.time() - late_s) * 1e6)
            await self._producer.drain()
            self._producer.send(SOURCE, b"%d" % self.sent, streamlet=streamlet, timestamp_us=time_us)
            self.sent += 1
        await asyncio.sleep(TURN_S)  # sleep: the load


class Query:
    """One reading of the stream, and its reported micro-batches."""

    def __init__(self, name: str, bootstrap: str, folder: Path, *, backfill: bool = False) -> None:
        self.name = name
        self._folder = folder / name
        self._folder.mkdir(parents=True)
        self._argv = ["-m", "tests.chaos.epochs_job", bootstrap, SOURCE, str(self._folder)]
        self._argv += ["--epochs", str(EPOCHS), *(["--backfill"] if backfill else [])]
        self._jobs: list[Job] = []

    @property
    def job(self) -> Job:
        """The current job."""
        return self._jobs[-1]

    @property
    def launches(self) -> int:
        """The number of launches."""
        return sum(job.launches for job in self._jobs)

    def start(self, engine: str) -> None:
        """Start the query, with the same checkpoint if it was started before."""
        self._jobs.append(Job([*self._argv, "--engine", engine], self._folder / f"job-{len(self._jobs)}.log"))
        self.job.start()

    def kill(self) -> None:
        """Kill the query with SIGKILL."""
        if self._jobs:
            self.job.kill()

    @property
    def count(self) -> int:
        """The number of micro-batches that are done."""
        return len(list((self._folder / "batches").glob("*.json")))

    def batches(self) -> Batches:
        """The reported micro-batches. Raises `Wrong` if one was run again with another result."""
        for path in (self._folder / "batches").glob("*.wrong"):
            again, before = path.read_text(), path.with_suffix(".json").read_text()
            raise Wrong(f"{self.name}: micro-batch {path.stem} was {before}, and {again} when it was run again")
        found = {}
        for path in (self._folder / "batches").glob("*.json"):
            found[int(path.stem)] = {key: tuple(row) for key, row in json.loads(path.read_text()).items()}
        return found

    async def until(self, reached: Callable[[], bool], what: str, *, alive: bool = True) -> None:
        """Wait for `reached`, as `Job.until` does."""

        async def answer() -> bool:
            return reached()

        await self.job.until(answer, f"{what} ({self.name})", TIMEOUT_S, alive=alive)

    async def until_done(self, count: int) -> None:
        """Wait until this many micro-batches are done."""
        await self.until(lambda: self.count >= count, f"micro-batch {count}")


async def rounds(run: Run, cluster: RunningCluster) -> None:
    """Run all rounds, and compare the results at the end. Raises `Wrong`."""
    queries = [live, killed] = [Query(name, cluster.bootstrap, run.folder) for name in ("live", "killed")]
    backfill = Query("backfill", cluster.bootstrap, run.folder, backfill=True)
    try:
        async with await Client.connect(cluster.bootstrap) as client:
            await client.admin.create_stream(SOURCE, streamlets=STREAMLETS, epoch_ms=EPOCH_MS, epoch_grace_ms=GRACE_MS)
            live.start(PYTHON)
            await live.until_done(1)  # the micro-batch that Spark makes of an empty stream
            async with loading(client, Epochs, run, 4 * KIB) as load:
                killed.start(PYTHON)
                for number in range(run.arguments.rounds):
                    await killed.until_done(killed.count + 1)
                    await run.moment(EPOCHS * QUERY_EPOCH_MS / 1000)
                    kind, engine = KINDS[number % len(KINDS)], ENGINES[number // len(KINDS) % 2]
                    await kill_one(kind, cluster, killed, engine, run.moments)
                    run.tell(
                        f"{kind} killed; {killed.launches} launches; {load.sent:,} records in; {live.count} and"
                        f" {killed.count} micro-batches"
                    )
            await all_closed(client)
            backfill.start(COLUMNAR)
            await backfill.until(backfill.job.has_ended, "the end of the backfill", alive=False)
            last = backfill.count
            for query in queries:
                await query.until_done(last)
            for query in queries:
                await asyncio.to_thread(query.kill)
            rows = compare({query.name: query.batches() for query in (*queries, backfill)}, last)
            await check_epochs(client, backfill.batches())
        if rows < load.sent:
            raise Wrong(f"{load.sent} records were sent, and micro-batches have {rows}")
        run.seen += Counter({"records": load.sent, "micro-batches": last, "launches": killed.launches})
    finally:
        for query in (*queries, backfill):
            query.kill()


async def kill_one(kind: str, cluster: RunningCluster, query: Query, engine: str, dice: random.Random) -> None:
    """Kill a process, and restart it unless it restarts on its own; the driver with another engine."""
    if kind == "driver":
        await asyncio.to_thread(query.kill)
        query.start(engine)
    else:
        await kill(kind, cluster, query.job, dice)


async def all_closed(client: Client) -> None:
    """Wait until all written records are in closed epochs."""
    bounds = await client.bounds(SOURCE)
    written_us = max(entry.watermark_us or 0 for entries in bounds.values() for entry in entries)
    closed_us = written_us + (EPOCHS + 1) * QUERY_EPOCH_MS * 1000
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        bounds = await client.bounds(SOURCE, promise=True)
        there = [entry for entries in bounds.values() for entry in entries]
        if all(max(entry.promised_us or 0, entry.watermark_us or 0) >= closed_us for entry in there):
            return
        await asyncio.sleep(PAUSE_S)
    raise Wrong("epochs are not closed any more")


def compare(batches: Mapping[str, Batches], count: int) -> int:
    """Raise `Wrong` unless the first `count` micro-batches are the same in all; returns their number of rows."""
    (first, expected), *others = batches.items()
    for name, found in others:
        for number in range(count):
            if found.get(number) != expected.get(number):
                raise Wrong(f"micro-batch {number} is {expected.get(number)} {first}, and {found.get(number)} {name}")
    return sum(rows for number in range(count) for rows, _ in expected[number].values())


async def check_epochs(client: Client, batches: Batches) -> None:
    """Raise `Wrong` unless each epoch has the records that a reader of epochs finds in it."""
    expected: dict[str, tuple[int, str]] = {}
    for number, batch in batches.items():
        for name, told in batch.items():
            if name in expected:
                raise Wrong(f"epoch {name} is in several micro-batches, one of them is {number}")
            expected[name] = told
    end = 1 + max(map(int, expected))
    async with client.epochs(SOURCE, epoch_ms=QUERY_EPOCH_MS, start="earliest", end=end) as epochs:
        async for epoch in epochs:
            rows: list[Row] = []
            for chunk in epoch.batches:
                values = chunk.batch.column("value").to_pylist()
                place = chunk.entry.streamlet_id, chunk.entry.entry
                rows += [(*place, record, value) for record, value in enumerate(values, chunk.header.first_record)]
            found = len(rows), digest_of(rows)
            if found != expected.pop(str(epoch.number), None):
                raise Wrong(f"epoch {epoch.number} has {found[0]} records, and other ones in Spark")
    if expected:
        raise Wrong(f"epochs that nobody else finds: {expected}")


async def work(run: Run) -> None:
    """Start a cluster, and run all rounds. Raises `Wrong`."""
    with keeping_cluster(run.folder / "cluster", arena_bytes=ARENA_BYTES, segment_bytes=SEGMENT_BYTES) as cluster:
        await rounds(run, cluster)


EPOCHS_CHAOS = Program(__doc__ or "", "the same micro-batches live, killed, and as a backfill", work, 20)
