"""The same micro-batches live, as a backfill, and with kills: ``make chaos-epochs ROUNDS=20``.

A producer writes to a stream whose epochs go by the clock: now to all of its streamlets, now to some, and now and then
what is late. A Spark query with ``epochsPerTrigger`` reads it three times, each in processes of its own:

* live, from before the first record on, with the Python engine, undisturbed but for its broker;
* killed: a round waits until it has done another micro-batch, and kills at a random moment, with SIGKILL, in turn its
  ``driver``, a ``worker`` (one of its Python processes), and the ``broker``; what was killed is started again, the
  driver with the same checkpoint and the other engine;
* as a backfill at full speed, when all is written, with the columnar engine.

Promised, and checked: the micro-batches with the same numbers have the same rows, in the same epochs, in all of them,
also when one is run again; and in each epoch are the records that `Client.epochs` finds in it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from kera.client import Client, Producer
from kera.core.base.settings import KIB, MIB
from kera.core.base.telemetry import configure_logging
from kera.local.cluster import RunningCluster
from tests.chaos.epochs_job import Row, digest_of
from tests.chaos.spark import KINDS, Job, kill
from tests.chaos.verdict import Wrong
from tests.integration.support import keeping_cluster, tell

STREAM = "in"
STREAMLETS = 4
EPOCH_MS = 500
"""Of the stream; the query's are twice as long."""
QUERY_EPOCH_MS = 1000
GRACE_MS = 300
EPOCHS = 5
"""Of a micro-batch."""
COLUMNAR, PYTHON = ENGINES = ("columnar", "python")
SILENCE = 0.02
"""How often a streamlet falls silent, of all turns."""
SILENT_TURNS = 100
LATE = 0.01
LATE_S = 3.0
TURN_S = 0.02
SEGMENT_BYTES = 64 * KIB
ARENA_BYTES = 128 * MIB
PAUSE_S = 0.1
TIMEOUT_S = 300.0
Batches = dict[int, dict[str, tuple[int, str]]]
"""By number: of each epoch how many rows, and their hash."""


class Load:
    """Writes to some streamlets in each turn, until it is told to stop."""

    def __init__(self, producer: Producer, dice: random.Random) -> None:
        self._producer, self._dice = producer, dice
        self._silent = dict.fromkeys(range(STREAMLETS), 0)
        self.sent = 0
        self.stopping = False

    async def run(self) -> None:
        """Send, and have all of it acknowledged at the end."""
        while not self.stopping:
            for streamlet in range(STREAMLETS):
                if self._dice.random() < SILENCE:
                    self._silent[streamlet] = self._dice.randrange(SILENT_TURNS)
                if self._silent[streamlet]:
                    self._silent[streamlet] -= 1
                    continue
                late_s = self._dice.random() * (LATE_S if self._dice.random() < LATE else TURN_S)
                time_us = int((time.time() - late_s) * 1e6)
                await self._producer.drain()
                self._producer.send(STREAM, b"%d" % self.sent, streamlet=streamlet, timestamp_us=time_us)
                self.sent += 1
            await asyncio.sleep(TURN_S)
        await self._producer.flush()


class Query:
    """One reading of the stream, and what it has told."""

    def __init__(self, name: str, bootstrap: str, folder: Path, *, backfill: bool = False) -> None:
        self.name = name
        self._folder = folder / name
        self._folder.mkdir(parents=True)
        self._argv = ["-m", "tests.chaos.epochs_job", bootstrap, STREAM, str(self._folder)]
        self._argv += ["--epochs", str(EPOCHS), *(["--backfill"] if backfill else [])]
        self._jobs: list[Job] = []

    @property
    def job(self) -> Job:
        """The one that runs."""
        return self._jobs[-1]

    @property
    def launches(self) -> int:
        """How often it was started."""
        return sum(job.launches for job in self._jobs)

    def start(self, engine: str) -> None:
        """Start it, with the same checkpoint if it was started before."""
        self._jobs.append(Job([*self._argv, "--engine", engine], self._folder / f"job-{len(self._jobs)}.log"))
        self.job.start()

    def kill(self) -> None:
        """End it, without a chance to say goodbye."""
        if self._jobs:
            self.job.kill()

    @property
    def count(self) -> int:
        """Micro-batches that are done."""
        return len(list((self._folder / "batches").glob("*.json")))

    def batches(self) -> Batches:
        """What it has told. Raises `Wrong`: a micro-batch was run again, and was another one."""
        for path in (self._folder / "batches").glob("*.wrong"):
            again, before = path.read_text(), path.with_suffix(".json").read_text()
            raise Wrong(f"{self.name}: micro-batch {path.stem} was {before}, and {again} when it was run again")
        found = {}
        for path in (self._folder / "batches").glob("*.json"):
            found[int(path.stem)] = {key: tuple(row) for key, row in json.loads(path.read_text()).items()}
        return found

    async def until(self, reached: Callable[[], bool], what: str, *, alive: bool = True) -> None:
        """Wait for `reached`; meanwhile it is started again when it has ended by itself, if it is to be `alive`."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not reached():
            if time.monotonic() > deadline_s:
                raise Wrong(f"{self.name}: waited {TIMEOUT_S:.0f} s for {what}:\n{self.job.log_tail()}")
            if alive:
                await asyncio.to_thread(self.job.keep_alive)
            await asyncio.sleep(PAUSE_S)


@contextlib.asynccontextmanager
async def loading(client: Client, dice: random.Random) -> AsyncIterator[Load]:
    """A load that runs meanwhile."""
    async with client.producer(chunk_bytes_max=4 * KIB, linger_ms=20, delivery_timeout_ms=120_000) as producer:
        await producer.prepare(STREAM)
        load = Load(producer, dice)
        running = asyncio.create_task(load.run())
        try:
            yield load
        finally:
            load.stopping = True
            await running


async def run(rounds: int, seed: int, cluster: RunningCluster, folder: Path) -> str:
    """All rounds, and the end; gives what there is to say. Raises `Wrong`."""
    dice, begun_s = random.Random(seed), time.monotonic()
    queries = [live, killed] = [Query(name, cluster.bootstrap, folder) for name in ("live", "killed")]
    backfill = Query("backfill", cluster.bootstrap, folder, backfill=True)
    dead: Counter[str] = Counter()
    try:
        async with await Client.connect(cluster.bootstrap) as client:
            await client.admin.create_stream(STREAM, streamlets=STREAMLETS, epoch_ms=EPOCH_MS, epoch_grace_ms=GRACE_MS)
            live.start(PYTHON)
            await live.until(lambda: live.count >= 1, "the micro-batch that Spark makes of nothing")
            async with loading(client, random.Random(seed + 1)) as load:
                killed.start(PYTHON)
                for number in range(rounds):
                    wanted = killed.count + 1
                    await killed.until(lambda wanted=wanted: killed.count >= wanted, f"micro-batch {wanted}")  # type: ignore[misc]
                    await asyncio.sleep(dice.random() * EPOCHS * QUERY_EPOCH_MS / 1000)  # sleep: a moment is wanted
                    kind = KINDS[number % len(KINDS)]
                    await kill_one(kind, cluster, killed, ENGINES[number // len(KINDS) % 2], dice)
                    dead[kind] += 1
                    print(
                        f"round {number + 1}: {time.monotonic() - begun_s:.0f} s; {kind} killed; {killed.launches}"
                        f" launches; {load.sent:,} records in; {live.count} and {killed.count} micro-batches",
                        flush=True,
                    )
            sent = load.sent
            await all_closed(client)
            backfill.start(COLUMNAR)
            await backfill.until(backfill.job.has_ended, "the end of the backfill", alive=False)
            last = backfill.count
            for query in queries:
                await query.until(lambda query=query: query.count >= last, f"micro-batch {last}")  # type: ignore[misc]
            for query in queries:
                await asyncio.to_thread(query.kill)
            rows = compare([*queries, backfill], last)
            await check_epochs(client, backfill.batches())
        if rows < sent:
            raise Wrong(f"{sent} records were sent, and micro-batches have {rows}")
        told = (
            f"{rounds} rounds, killed {dict(dead)}, {killed.launches} launches, {sent:,} records, {last} micro-batches"
        )
        return f"{told}, {time.monotonic() - begun_s:.0f} s"
    finally:
        for query in (*queries, backfill):
            query.kill()


async def kill_one(kind: str, cluster: RunningCluster, query: Query, engine: str, dice: random.Random) -> None:
    """Kill one, and start again what does not do so by itself; the driver with another engine."""
    if kind == "driver":
        await asyncio.to_thread(query.kill)
        query.start(engine)
    else:
        await kill(kind, cluster, query.job, dice)


async def all_closed(client: Client) -> None:
    """Wait until all that was written is in micro-batches that are closed."""
    bounds = await client.bounds(STREAM)
    written_us = max(entry.watermark_us or 0 for entries in bounds.values() for entry in entries)
    closed_us = written_us + (EPOCHS + 1) * QUERY_EPOCH_MS * 1000
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        bounds = await client.bounds(STREAM, promise=True)
        there = [entry for entries in bounds.values() for entry in entries]
        if all(max(entry.promised_us or 0, entry.watermark_us or 0) >= closed_us for entry in there):
            return
        await asyncio.sleep(PAUSE_S)
    raise Wrong("epochs are not closed any more")


def compare(queries: list[Query], count: int) -> int:
    """Raise `Wrong` unless the first `count` micro-batches are the same in all; gives how many rows they have."""
    first, *others = queries
    expected = first.batches()
    for query in others:
        found = query.batches()
        for number in range(count):
            if found.get(number) != expected.get(number):
                raise Wrong(
                    f"micro-batch {number} is {expected.get(number)} {first.name}, and {found.get(number)} {query.name}"
                )
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
    async with client.epochs(STREAM, epoch_ms=QUERY_EPOCH_MS, start="earliest", end=end) as epochs:
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


def run_all(rounds: int, seed: int, folder: Path) -> str:
    """A cluster, and all rounds. Raises `Wrong`."""
    with keeping_cluster(folder / "cluster", arena_bytes=ARENA_BYTES, segment_bytes=SEGMENT_BYTES) as cluster:
        try:
            return asyncio.run(run(rounds, seed, cluster, folder))
        except BaseException:
            tell(cluster)
            raise


def main() -> int:
    """Run, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="of the moments; printed")
    parser.add_argument("--keep", type=Path, help="folder for logs and checkpoints, which stays")
    arguments = parser.parse_args()
    configure_logging("error", daemon="chaos")  # that clients try again is what is wanted
    print(f"{arguments.rounds} rounds, seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kera-chaos-") as temporary:
        try:
            told = run_all(arguments.rounds, arguments.seed, arguments.keep or Path(temporary))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the verdict
            print(f"FAILED: {error!r}")
            print(f"again: make chaos-epochs ROUNDS={arguments.rounds} CHAOS_ARGS='--seed {arguments.seed}'")
            return 1
    print(f"PASSED: the same micro-batches in all of them: {told}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
