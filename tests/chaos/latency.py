"""Hold a latency constraint while the load changes, owners die, streamlets move and clocks jump.

Records with keys are written into a stream, passed on by a consumer group, and have come through when they are durable
in a second stream: a path with a constraint, in a cluster of three brokers and two backups. The writer and the worker
are processes (`latency_client`) whose clocks can be set. In each round the load doubles or halves, and at half time one
of these happens, in turn:

* ``kill``: the broker with most streamlets of the path is killed, and started again when the round is over;
* ``move``: streamlets of both streams move to other brokers;
* ``writer``, ``worker``: the clock of that process is set by 5 s, ahead and back in turn.

Promised, and checked against the clients' own measurements on the monotonic clock that they share (`latency_truth`):

* within `WINDOWS` windows of any such event the constraint is held again, by its description, and stays held. After a
  kill they begin when all streamlets have an owner, at the latest after `OUTAGE_S`, which the cluster's settings imply;
* each description was true within the time that it covers, up to a round trip: also when clocks jump;
* no chunk is left beyond its deadline for longer than the writer's event loop is busy (`Producer.late_ms`);
* records in flight never exceed those sent within the limit: a constraint knows only of records that came through;
* every accepted record is acknowledged, and exists once, in order; no error goes unnoticed.

Rare looks at the description, or a window without records, are failures, too. On a machine that is too busy, the
output says so: looks whose error the lag of the clients' event loops explains (`Truth.explained_us`) are counted
separately. With ``--slow-work-ms`` and ``--late-timer-ms`` it has to fail.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kera.client import Client
from kera.client.cluster.retry import BACKOFF_S_MAX
from kera.core.base.settings import KIB, MIB
from kera.core.errors import InvalidArgument, KeraError
from kera.local.cluster import LocalCluster
from tests.chaos.latency_client import FIRST, KEYS, PATH, SECOND, SLOT_S, head_of
from tests.chaos.latency_truth import SHOWN_S, Compared, Look, Looks, Settled, Truth, compared, settled, unseen_s
from tests.chaos.processes import Process
from tests.chaos.running import Program, Run
from tests.chaos.verdict import Wrong
from tests.integration.control_support import (
    FINISHED,
    HEARTBEAT_MS,
    broker_id_of,
    broker_name,
    broker_names,
    connect,
    control_cluster,
    saying,
    until_registered,
)
from tests.integration.support import until_found

NAME = "path"
WRITER, WORKER = "writer", "worker"
STREAMLETS = {FIRST: 6, SECOND: 3}
KINDS = ("kill", "move", WRITER, WORKER)
JUMP_S = 5.0
RATES = (100.0, 1600.0)
"""Lowest and highest load, in records a second; it doubles and halves between them."""
CHUNK_BYTES = 4 * KIB
"""With the highest loads chunks are full before their time is over, with the others they are not."""
WINDOWS = 2
GRACE_S = 0.2
"""Time that a report of a lost broker is delayed: `report_grace_ms`."""
HEARTBEATS_MISSED_MAX = 20
"""High, so that a broker that stands still for seconds on a busy machine does not count as lost."""
OUTAGE_S = HEARTBEAT_MS * HEARTBEATS_MISSED_MAX / 1000 + GRACE_S + 20.0
"""The longest time until all streamlets have an owner again: the time until a cluster misses a broker, plus the time to
recover some megabytes, on a machine with other work."""
TIMEOUT_S = 120.0
UNSEEN_S_MAX = 8 * SLOT_S
"""The longest time between two looks at the description, on a machine that does not stand still meanwhile."""


class Part(NamedTuple):
    """An event, and its effects."""

    what: str
    outage_s: float
    settled: Settled
    compared: Compared
    lags_ms: list[float]
    explained_ms: float
    records: int
    mean_ms: float
    """The mean of records, by their own times, over the last window."""
    longest_ms: float
    """The longest of any record since the event."""
    shown_ms: float
    shown_most_ms: float
    """The longest described time since the event."""

    def __str__(self) -> str:
        p50, p95, most = self.lags_ms
        outage = f" owners after {self.outage_s:.1f} s," if self.outage_s else ""
        busy = f" ({self.settled.busy} looks: busy)" if self.settled.busy else ""
        return (
            f"{self.what}:{outage} held after {self.settled.held_after_s:.2f} s{busy}; {self.records} records,"
            f" mean {self.mean_ms:.0f} ms, longest {self.longest_ms:.0f} ms; described {self.shown_ms:.0f} ms, at most"
            f" {self.shown_most_ms:.0f} ms; figures off by"
            f" {self.compared.off_us / 1000:.1f} ms of {self.compared.allowed_us / 1000:.1f};"
            f" loops late by p50 {p50:.1f}, p95 {p95:.1f}, most {most:.0f} ms: {self.explained_ms:.0f} ms explained"
        )


def table(parts: Sequence[Part], window_s: float) -> Iterator[str]:
    """Rows by kind of event, in Markdown."""
    yield "| what | times | held after, windows: mean | longest | figures off, ms: most | looks, busy |"
    yield "|---|--:|--:|--:|--:|--:|"
    for kind in ("load", *KINDS):
        some = [part for part in parts if part.what.startswith(kind)]
        if some:
            after = [part.settled.held_after_s / window_s for part in some]
            off_ms = max(part.compared.off_us for part in some) / 1000
            busy = sum(part.settled.busy for part in some)
            mean = sum(after) / len(after)
            yield f"| {kind} | {len(some)} | {mean:.2f} | {max(after):.2f} | {off_ms:.1f} | {busy} |"


class ConstrainedPath:
    """A path under load, and the events of its rounds."""

    def __init__(self, cluster: LocalCluster, client: Client, run: Run) -> None:
        self._cluster, self._client, self._options, self._run = cluster, client, run.arguments, run
        self.parts: list[Part] = []
        self.wrong: list[str] = []
        self._random = run.moments
        self._processes: dict[str, Process] = {}
        self._followed: dict[str, asyncio.Task[None]] = {}
        """Each task ends after the last slot that its process has reported."""
        self.truth = Truth()
        self._looks = Looks()
        self._rate = 0.0
        self._jumps: Counter[str] = Counter()

    # -- clients and looks -----------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def going(self, directory: Path) -> AsyncIterator[None]:
        """Start the clients, create the constraint, and run the block."""
        for stream, streamlets in STREAMLETS.items():
            await self._client.admin.create_stream(stream, streamlets=streamlets, replication=1)
        async with asyncio.TaskGroup() as tasks:
            running: list[asyncio.Task[None]] = []
            try:
                for role in (WRITER, WORKER):
                    process = self._processes[role] = await self._start(role, directory / f"{role}.log")
                    self._followed[role] = tasks.create_task(self._follow(role, process))
                    running.append(self._followed[role])
                self._load(RATES[0] * 4)
                await until_found(self._constrained, TIMEOUT_S)
                running.append(tasks.create_task(self._look()))
                yield
            finally:
                for task in running:
                    task.cancel()
                for process in self._processes.values():
                    await process.end()

    async def _start(self, role: str, log: Path) -> Process:
        delay_s = self._options.late_timer_ms / 1000 if role == WRITER else 0.0
        task = {
            "role": role,
            "bootstrap": self._cluster.bootstrap,
            "chunk_bytes": CHUNK_BYTES,
            "timer_delay_s": delay_s,
        }
        with log.open("wb") as errors:
            return await Process.start("tests.chaos.latency_client", json.dumps(task), log=errors)

    async def _follow(self, role: str, process: Process) -> None:
        while (line := await process.line()) is not None:
            self.truth.add(role, line["slot"])
        if await process.ended() != 0:
            raise Wrong(f"the {role} has ended by itself")

    async def _constrained(self) -> bool:
        """Create the constraint; false while the group does not read yet."""
        options = self._options
        try:
            await self._client.latency.create(NAME, PATH, options.limit_ms, window_ms=round(options.window_s * 1000))
        except InvalidArgument:
            return False
        return True

    async def _look(self) -> None:
        while True:
            try:
                found = await self._client.latency.describe(NAME)
            except KeraError as error:
                self._looks.add(Look(time.monotonic(), "unknown", 0, str(error), 0, 0))
            else:
                requests_us = sum(hop.mean_us for hop in found.hops if hop.hop in {"send", "replicate"})
                measured = sum(hop.chunks > 0 for hop in found.hops)
                look = Look(time.monotonic(), found.state, found.mean_us, found.reason, requests_us, measured)
                self._looks.add(look)
            await asyncio.sleep(SLOT_S)  # sleep: between two looks

    def _say(self, role: str, **command: Any) -> None:
        self._processes[role].send_line(json.dumps(command))

    def _load(self, rate: float) -> None:
        self._rate = rate
        self._say(WRITER, rate=rate)

    # -- events ----------------------------------------------------------------------------------------------------

    async def rounds(self) -> None:
        """Wait until the constraint is held, and run all rounds."""
        options = self._options
        await until_found(self._was_held, TIMEOUT_S)
        if options.slow_work_ms:
            self._say(WORKER, work_s=options.slow_work_ms / 1000)
        for number in range(options.rounds):
            before = self._rate
            doubled = before * 2 <= RATES[1] and (before / 2 < RATES[0] or self._random.random() < 0.5)
            self._load(before * 2 if doubled else before / 2)
            await self._part(f"load {before:g} -> {self._rate:g}/s", time.monotonic())
            happening = [options.kinds[number % len(options.kinds)]] if not options.all_each else options.kinds
            gone = [await getattr(self, f"_{kind}")() for kind in happening]
            self._run.tell(f"{self._rate:g}/s; {', '.join(happening)}")
            for name in filter(None, gone if number + 1 < options.rounds else ()):
                await self._cluster.restart(name)
                await until_registered(self._client, broker_id_of(self._cluster, name))

    async def _was_held(self) -> bool:
        """Whether the constraint was held with measurements of all hops, within the initial limits of chunks."""
        last = self._looks.last
        return last is not None and last.state == "held" and last.measured >= 8

    async def _kill(self) -> str:
        """Kill the broker with most streamlets; returns its name."""
        owners = Counter[int]()
        for stream in STREAMLETS:
            described = await self._client.admin.describe_stream(stream)
            owners.update(each.broker_id for each in described.assignments.values())
        broker_id, streamlets = owners.most_common(1)[0]
        name = broker_name(self._cluster, broker_id)
        begun_s = time.monotonic()
        await self._cluster.kill(name)

        async def owned() -> bool:
            with contextlib.suppress(KeraError):
                streams = [await self._client.admin.describe_stream(stream) for stream in STREAMLETS]
                there = all(each.broker_id != broker_id for one in streams for each in one.assignments.values())
                return there and all(each.phase in FINISHED for each in await self._client.admin.recoveries())
            return False

        await until_found(owned, OUTAGE_S)
        outage_s = time.monotonic() - begun_s
        await self._part(f"kill {name} with {streamlets}", begun_s, outage_s=outage_s)
        return name

    async def _move(self) -> None:
        brokers = [broker_id_of(self._cluster, name) for name in broker_names(self._cluster)]
        moved = []
        for stream, count in ((FIRST, 2), (SECOND, 1)):
            described = await self._client.admin.describe_stream(stream)
            for streamlet in self._random.sample(range(STREAMLETS[stream]), count):
                owner = described.assignments[streamlet].broker_id
                target = self._random.choice([each for each in brokers if each != owner])
                await self._client.admin.move_streamlet(stream, streamlet, target)
                moved.append(f"{stream}{streamlet} {owner}->{target}")
        await self._part(f"move {', '.join(moved)}", time.monotonic())

    async def _writer(self) -> None:
        await self._jump(WRITER)

    async def _worker(self) -> None:
        await self._jump(WORKER)

    async def _jump(self, role: str) -> None:
        step_s = JUMP_S if self._jumps[role] % 2 == 0 else -JUMP_S
        self._jumps[role] += 1
        self._say(role, step_s=step_s)
        await self._part(f"{role}'s clock {step_s:+g} s", time.monotonic(), through=True)

    # -- verdict ---------------------------------------------------------------------------------------------------

    async def _part(self, what: str, at_s: float, *, outage_s: float = 0.0, through: bool = False) -> None:
        """Wait half a round, and judge. `through`: figures must be right from the event on, not just after a while."""
        options = self._options
        # Clients notice the end of an outage when they retry; until then it delays records.
        lost_s = outage_s and outage_s + BACKOFF_S_MAX
        end_s, within_s = at_s + lost_s + options.seconds / 2, lost_s + WINDOWS * options.window_s
        with saying(lambda: f"{what}: clients have told of nothing for {TIMEOUT_S:g} s"):
            async with asyncio.timeout(max(0.0, end_s - time.monotonic()) + TIMEOUT_S):
                while time.monotonic() < end_s or self.truth.known_until_s() < end_s:
                    await asyncio.sleep(SLOT_S)  # sleep: clients and looks go on meanwhile
        looks = self._looks.within(at_s, end_s)
        found = settled(looks, self.truth, at_s, within_s, round(options.limit_ms * 1000), options.window_s)
        calm = self._looks.within(at_s if through else at_s + within_s, end_s)
        figures = compared(calm, self.truth, options.window_s)
        told = self.truth.over(end_s - options.window_s, end_s)
        part = Part(
            what,
            outage_s,
            found,
            figures,
            self.truth.lags_ms(at_s, end_s),
            self.truth.explained_us(end_s, end_s - at_s) / 1000,
            told.records,
            told.records_us / 1000,
            self.truth.over(at_s, end_s).longest_us / 1000,
            looks[-1].mean_us / 1000 if looks else 0.0,
            max((look.mean_us for look in looks), default=0) / 1000,
        )
        self.parts.append(part)
        if (under_way_s := self._under_way_s()) > options.limit_ms / 1000 + 2 * SLOT_S + part.explained_ms / 1000:
            self.wrong.append(f"{what}: at its end, the load of {under_way_s:.2f} s is under way, or stuck")
        if (unseen := unseen_s(looks, at_s, end_s)) > UNSEEN_S_MAX + part.lags_ms[-1] / 1000:
            self.wrong.append(f"{what}: nobody has looked at the constraint for {unseen:.1f} s")
        if not part.records:
            self.wrong.append(f"{what}: no record came through in its last window")
        print(part, flush=True)
        for look in found.missed[:3]:
            self.wrong.append(
                f"{what}: {look.at_s - at_s:.2f} s later the constraint is {look.state} with {look.mean_us / 1000:.0f}"
                f" ms ({look.reason}); lags explain"
                f" {self.truth.explained_us(look.at_s, options.window_s) / 1000:.0f} ms"
            )
        for look, low_us, high_us, allowed_us in figures.wrong[:3]:
            self.wrong.append(
                f"{what}: {look.at_s - at_s:.2f} s later described as {look.mean_us / 1000:.0f} ms, and it was"
                f" {low_us / 1000:.0f} to {high_us / 1000:.0f}, give or take {allowed_us / 1000:.0f}"
            )

    def _under_way_s(self) -> float:
        """The records in flight, as their sending time at the current rate; clients report them slot by slot."""
        return (self.truth.totals[WRITER].sent - self.truth.totals[WORKER].records) / self._rate

    async def finish(self) -> None:
        """Wait until all records come to the end of the path, and check the totals. Raises `Wrong`."""
        self._say(WORKER, work_s=0.0)
        self._say(WRITER, stop=True)
        await self._end_of(WRITER)
        sent = self.truth.totals[WRITER].sent

        async def through() -> bool:
            return self.truth.totals[WORKER].records >= self.truth.totals[WRITER].sent

        with contextlib.suppress(TimeoutError):
            await until_found(through, TIMEOUT_S)
        self._say(WORKER, stop=True)
        await self._end_of(WORKER)
        writer, worker = self.truth.totals[WRITER], self.truth.totals[WORKER]
        for role, total in ((WRITER, writer), (WORKER, worker)):
            if total.errors:
                self.wrong.append(f"{role}: {len(total.errors)} errors that nobody caught: {total.errors[:3]}")
            if total.failed or total.acknowledged != total.sent:
                self.wrong.append(
                    f"{role}: {total.sent} records sent, {total.acknowledged} acknowledged, {total.failed} failed"
                )
            if total.late:
                self.wrong.append(
                    f"{role}: {total.late} times chunks were left beyond their deadlines for longer than the loop was"
                    f" busy, by {total.late_us / 1000:.1f} ms at most"
                )
        for stream in STREAMLETS:
            self.wrong += await check_records(self._client, stream, sent)
        self._run.seen += Counter(
            {"records": sent, "through": worker.records, "chunks beyond their deadlines": writer.late + worker.late}
        )

    async def _end_of(self, role: str) -> None:
        with saying(lambda: f"the {role} does not end within {TIMEOUT_S:g} s"):
            async with asyncio.timeout(TIMEOUT_S):
                await self._followed[role]


async def check_records(client: Client, stream: str, sent: int) -> list[str]:
    """Errors in the records of a stream: each record must exist once, in the order of its key."""
    due, wrong = [0] * KEYS, []
    async with asyncio.timeout(TIMEOUT_S), client.consumer(stream, start="earliest", end="latest") as consumer:
        async for chunk in consumer.batches():
            for value in chunk.batch.column("value").to_pylist():
                key, number, _ = head_of(value)
                if number != due[key]:
                    wrong.append(f"{stream}: record {number} of key {key} is where {due[key]} was due")
                due[key] = number + 1
    if sum(due) != sent:
        wrong.append(f"{stream}: {sum(due)} records, of {sent}")
    return wrong[:5]


async def hold(run: Run) -> ConstrainedPath:
    """Run all rounds; returns the findings, with all failures. Raises `Wrong` for an error that ends the run."""
    settings = {"report_grace_ms": round(GRACE_S * 1000), "heartbeats_missed_max": HEARTBEATS_MISSED_MAX}
    async with (
        control_cluster(
            run.folder / "data",
            backups=2,
            replication=1,
            arena_bytes=64 * MIB,
            backup_memory_bytes=64 * MIB,
            segment_bytes=256 * KIB,
            coordinator_settings=settings,
        ) as cluster,
        await connect(cluster) as client,
    ):
        path = ConstrainedPath(cluster, client, run)
        async with path.going(run.folder):
            await path.rounds()
            await path.finish()
        return path


async def work(run: Run) -> None:
    """Run it all, and judge. Raises `Wrong`."""
    options = run.arguments
    if options.seconds / 2 < WINDOWS * options.window_s + SHOWN_S:
        raise Wrong(f"half of {options.seconds:g} s is too short for {WINDOWS} windows, and some time to look")
    held = await hold(run)
    print(*table(held.parts, options.window_s), sep="\n")
    if held.wrong:
        raise ExceptionGroup("promises were broken", [Wrong(text) for text in held.wrong])


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this program."""
    parser.add_argument("--seconds", type=float, default=30.0, help="of a round; half of it after each thing")
    parser.add_argument("--limit-ms", type=float, default=300.0)
    parser.add_argument("--window-s", type=float, default=5.0)
    parser.add_argument("--all-each", action="store_true", help="all kinds in each round, and not one of them")
    parser.add_argument("--slow-work-ms", type=float, default=0.0, help="the application takes so long: has to fail")
    parser.add_argument("--late-timer-ms", type=float, default=0.0, help="the writer's timer is late: has to fail")


LATENCY = Program(__doc__ or "", "the constraint was held, and described as it was", work, 20, KINDS, options)
