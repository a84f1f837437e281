"""How long records wait, and cost, when chunks go full, each by itself, or in time: ``python -m bench.latency``.

Figure 2 of Lohrmann, Warneke and Kao, *Nephele Streaming*, drawn again: one producer sends records of 128 bytes, 1 to a
million a second, in chunks of 4, 16 and 64 KiB that go when they are full and no sooner; with a flush after each
record; without linger; and with a latency target of 50 ms. ``--part cost`` has records with keys in 1, 64 and 1,024
streamlets instead, without linger and with targets of 10, 50, 200 and 1,000 ms, and somebody who reads them
(`bench.latency_reader`). ``--part path`` is figures 7 and 8, see `bench.latency_path`.

Latency is from when a record is accepted until it is acknowledged (a sample of at most 5,000 of a run), with a reader
also until that has it; processor time is that of producer, broker and reader, less what they take when the loop sends
nothing. A run takes `--seconds`. If that does not fill a chunk, the waiting time is computed: half of the average time
that a chunk takes to fill. Such figures are marked with ``~``; processor time of a few records means little.

The cost of a record that does not depend on chunks, for accepting, encoding, storing and reading, is the row ``full
chunks`` of ``--part cost``: chunks of 64 KiB that go when they are full. A target cannot do better.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench import latency_path
from bench.common import IN_MEMORY, Broker, Figures, broker, directory, parser, say
from bench.cpu import run_s
from bench.latency_reader import Reader, Seen
from kera.client import Client, Producer
from kera.client.producing.open_chunks.records import RECORD_OVERHEAD_BYTES
from kera.core.base.process import DIE_WITH_PARENT_VARIABLE, die_with_parent
from kera.core.base.settings import KIB, MIB

PARTS = ("figure", "cost", "path")
STREAM = "items"
RECORD_BYTES = 128
KEYS = 10_000
RATES = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
STREAMLETS = (1, 64, 1_024)
COST_RATES = (1_000, 20_000, 200_000)
TARGETS_MS = (10, 50, 200, 1_000)
SAMPLES_MAX = 1_000
TICK_S = 0.001
BURST_MAX = 10_000
"""Maximum of overdue records, before the buffer is looked at again."""
NEVER_MS = 3_600_000
WARM_UP = 200
COMPARED_MIN = 1_000
"""Records a second: at lower rates, other load of the machine hides the processor time."""
SMALLEST_SHARE_US = 0.01
"""Least cost of a record that counts for a ratio: less is noise."""


class Policy(NamedTuple):
    """A policy for when chunks go."""

    name: str
    settings: dict[str, Any]
    flushes: bool = False
    sends: bool = True

    @property
    def chunk_records(self) -> int | None:
        """The number of records that a chunk waits for; None: it need not become full."""
        if "chunk_bytes_max" not in self.settings:
            return None
        return math.ceil(int(self.settings["chunk_bytes_max"]) / (RECORD_OVERHEAD_BYTES + RECORD_BYTES))


NOTHING = Policy("nothing", {}, sends=False)
FIXED = [Policy(f"{size} KiB", {"chunk_bytes_max": size * KIB, "linger_ms": NEVER_MS}) for size in (4, 16, 64)]
AT_ONCE = Policy("no linger", {"linger_ms": 0})
FULL = Policy("full chunks", {"chunk_bytes_max": 64 * KIB, "linger_ms": NEVER_MS})
FIGURE = [*FIXED, Policy("flush", {"linger_ms": 0}, flushes=True), AT_ONCE]


def target(ms: int) -> Policy:
    """The policy of chunks that go in time for a target."""
    return Policy(f"{ms} ms", {"latency_target_ms": ms})


# -- the producer, a process of its own ----------------------------------------------------------------------------


class Waits:
    """The waits of a sample of records."""

    def __init__(self, expected: float) -> None:
        self.each = max(1, math.ceil(expected / SAMPLES_MAX))
        self.ms: list[float] = []

    def add(self, pending: Any) -> None:
        """Time one record."""
        accepted_s = time.perf_counter()
        pending.add_done_callback(lambda _: self.ms.append((time.perf_counter() - accepted_s) * 1000))


async def send_at_rate(producer: Producer, policy: Policy, rate: int, seconds: float, *, keyed: bool) -> dict[str, Any]:
    """Send the due records each millisecond, or each record alone; returns the figures."""
    value = b"x" * RECORD_BYTES
    keys = [b"key-%d" % number for number in range(KEYS)]
    waits, send, sent, total = Waits(rate * seconds), producer.send, 0, max(1, int(rate * seconds))
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    while sent < total and (gone_s := time.perf_counter() - begun_s) < seconds:
        due = min(total, sent + BURST_MAX, int(gone_s * rate) + 1)
        if due > sent and policy.sends:
            for number in range(sent, due):
                pending = send(STREAM, value, keys=keys[number % KEYS]) if keyed else send(STREAM, value)
                if number % waits.each == 0:
                    waits.add(pending)
                if policy.flushes:
                    await producer.flush()
                    if time.perf_counter() - begun_s > seconds:
                        due = number + 1
                        break
            await producer.drain()
        sent = max(sent, due)
        ahead_s = begun_s + sent / rate - time.perf_counter()
        await asyncio.sleep(max(TICK_S, ahead_s) if ahead_s > -TICK_S else 0)
    if policy.chunk_records is None:
        await producer.flush()
    took_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
    found = sorted(waits.ms)  # records in chunks that are not full are not included
    await producer.flush()
    return {"sent": sent, "took_s": took_s, "cpu_s": cpu_s, "ms": found}


async def work(task: dict[str, Any]) -> None:
    """One run: prints ``ready``, begins at the input, and prints its figures."""
    policy = Policy(*task["policy"])
    async with await Client.connect(task["bootstrap"]) as client, client.producer(**policy.settings) as producer:
        await producer.prepare(STREAM)
        for number in range(WARM_UP if policy.sends else 0):
            producer.send(STREAM, b"x", keys=b"%d" % number if task["keyed"] else ())
            if number % 10 == 0:
                await producer.flush()
        await producer.flush()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        done = await send_at_rate(producer, policy, task["rate"], task["seconds"], keyed=task["keyed"])
        print(json.dumps(done), flush=True)
        await asyncio.to_thread(sys.stdin.readline)


# -- runs ----------------------------------------------------------------------------------------------------------


class Cpu(NamedTuple):
    """Processor time of each process."""

    producer: float
    broker: float
    reader: float = 0.0

    def less(self, other: Cpu, times: float) -> Cpu:
        """The excess over `times` the other; never negative."""
        return Cpu(*(max(0.0, one - times * each) for one, each in zip(self, other, strict=True)))

    def times(self, factor: float) -> Cpu:
        """A multiple of it."""
        return Cpu(*(factor * each for each in self))


NO_TIME = Cpu(0.0, 0.0)


class Run(NamedTuple):
    """The figures of one run."""

    rate: float
    """The rate that was achieved."""
    mean_ms: float
    p99_ms: float
    reckoned: bool
    each_us: Cpu
    """For a record."""
    chunks_per_s: float
    seen: Seen | None
    """A reader's figures; None: there was no reader."""

    @property
    def cpu_us(self) -> float:
        """Processor time for a record."""
        return sum(self.each_us)


async def measure(
    made: Broker,
    client: Client,
    policy: Policy,
    rate: int,
    seconds: float,
    idle: Cpu,
    streamlets: int | None = None,
    *,
    pushed: bool | None = None,
) -> Run:
    """One run with a stream of its own.

    `idle`: the processor time of a second without records. `streamlets`: records have keys. `pushed`: how a reader gets
    the records; None: there is no reader.
    """
    await client.admin.create_stream(STREAM, streamlets=streamlets or 1)
    bootstrap, reader = made.cluster.bootstrap, None
    task = {"policy": policy, "bootstrap": bootstrap, "rate": rate, "seconds": seconds, "keyed": streamlets is not None}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.latency", "--worker", json.dumps(task)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, DIE_WITH_PARENT_VARIABLE: "1"},
        limit=MIB,
    )
    if process.stdin is None or process.stdout is None:
        raise SystemExit("a process without pipes")
    try:
        async with asyncio.timeout(seconds * 3 + 120):
            if pushed is not None:
                reader = await Reader.started(bootstrap, STREAM, pushed=pushed)
            if await process.stdout.readline() != b"ready\n":
                raise SystemExit(f"the producer has ended ({policy.name}, {rate} a second)")
            broker_s, chunks = run_s(made.pid), (await made.metrics())["chunks_appended_total"]
            if reader is not None:
                reader.begin()
            process.stdin.write(b"go\n")
            done = json.loads(await process.stdout.readline())
            warm_up, sent = (WARM_UP, done["sent"]) if policy.sends else (0, 0)
            seen = None if reader is None else await reader.seen(warm_up + sent)
            broker_s = run_s(made.pid) - broker_s
            chunks = (await made.metrics())["chunks_appended_total"] - chunks
            process.stdin.write(b"end\n")
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        if reader is not None:
            await reader.kill()
        await client.admin.delete_stream(STREAM)
    ms, records = done["ms"], policy.chunk_records
    mean_ms = p99_ms = math.nan
    reckoned = not ms and records is not None
    if reckoned and records is not None:
        mean_ms, p99_ms = 500 * (records - 1) / rate, 990 * (records - 1) / rate
    elif ms:
        mean_ms, p99_ms = sum(ms) / len(ms), ms[min(len(ms) - 1, len(ms) * 99 // 100)]
    cpu_s = Cpu(done["cpu_s"], broker_s, 0.0 if seen is None else seen.cpu_s).less(idle, done["took_s"])
    rate_kept, chunks_per_s = done["sent"] / done["took_s"], chunks / done["took_s"]
    return Run(rate_kept, mean_ms, p99_ms, reckoned, cpu_s.times(1e6 / done["sent"]), chunks_per_s, seen)


async def idle_share(made: Broker, client: Client, rate: int, seconds: float, *, pushed: bool | None = None) -> Cpu:
    """The processor time of a second of the loop at that rate without records."""
    run = await measure(made, client, NOTHING, rate, min(seconds, 3.0), NO_TIME, pushed=pushed)
    return run.each_us.times(run.rate / 1e6)


async def figure(made: Broker, client: Client, arguments: argparse.Namespace, figures: Figures) -> None:
    """Figure 2."""
    goal = target(50)
    for rate in arguments.rates or RATES:
        idle = await idle_share(made, client, rate, arguments.seconds)
        runs: dict[str, Run] = {}
        for _ in range(arguments.rounds):
            for policy in [*FIGURE, goal]:
                run = await measure(made, client, policy, rate, arguments.seconds, idle)
                runs[policy.name] = run if policy.name not in runs else better(run, runs[policy.name])
                note(figures, f"{rate:,}/s, {policy.name}", run)
        if rate >= COMPARED_MIN:
            say_ratios(figures, rate, runs, goal)


def better(one: Run, other: Run) -> Run:
    """The run that was disturbed less."""
    return min(one, other, key=lambda run: run.cpu_us)


def say_ratios(figures: Figures, rate: int, runs: Mapping[str, Run], goal: Policy) -> None:
    """Print the ratios that claims about a rate use.

    A chunk size that takes longer to fill than the target allows is no alternative to the target. So the cost of the
    target is compared with the best size of all, and with the best size that holds the target at this rate.
    """
    of_64_us = max(runs["64 KiB"].cpu_us, SMALLEST_SHARE_US)
    figures.add(f"{rate:,}/s: flush / 64 KiB", runs["flush"].cpu_us / of_64_us, "x the processor time")
    fixed = [runs[policy.name] for policy in FIXED]
    for name, those in (
        ("best fixed", fixed),
        ("best fixed that holds it", in_time(fixed, goal.settings["latency_target_ms"])),
    ):
        if those:
            best_us = max(min(run.cpu_us for run in those), SMALLEST_SHARE_US)
            figures.add(f"{rate:,}/s: {goal.name} / {name}", runs[goal.name].cpu_us / best_us, "x the processor time")


def in_time(runs: Sequence[Run], limit_ms: float) -> list[Run]:
    """The runs whose records were acknowledged within the limit on average."""
    return [run for run in runs if run.mean_ms <= limit_ms]


def note(figures: Figures, name: str, run: Run) -> None:
    """Keep a run, and print its figures."""
    mark = "~" if run.reckoned else ""
    say(
        f"{name}: {run.rate:,.0f}/s kept, {mark}{run.mean_ms:,.1f} ms, p99 {mark}{run.p99_ms:,.1f} ms,"
        f" {run.cpu_us:.2f} us a record, {run.chunks_per_s:,.1f} chunks/s"
        + ("" if run.seen is None else f", read {run.seen.mean_ms:,.1f} ms, p99 {run.seen.p99_ms:,.1f} ms")
    )
    figures.add(f"{name}: kept", run.rate, "1/s")
    figures.add(f"{name}: mean" + (" (reckoned)" if run.reckoned else ""), run.mean_ms, "ms")
    figures.add(f"{name}: p99" + (" (reckoned)" if run.reckoned else ""), run.p99_ms, "ms")
    figures.add(f"{name}: processor time", run.cpu_us, "us")
    figures.add(f"{name}: chunks", run.chunks_per_s, "1/s")


async def cost(made: Broker, client: Client, arguments: argparse.Namespace, figures: Figures) -> None:
    """Measure the savings of targets where there are many streamlets."""
    pushed = arguments.reader == "push"
    for streamlets in arguments.streamlets or STREAMLETS:
        for rate in arguments.rates or COST_RATES:
            idle = await idle_share(made, client, rate, arguments.seconds, pushed=pushed)
            policies = [AT_ONCE, *(target(ms) for ms in arguments.targets or TARGETS_MS)]
            if fills(FULL, streamlets, rate, arguments.seconds):
                policies.append(FULL)
            runs: dict[str, Run] = {}
            for _ in range(arguments.rounds):
                for policy in policies:
                    run = await measure(made, client, policy, rate, arguments.seconds, idle, streamlets, pushed=pushed)
                    runs[policy.name] = run if policy.name not in runs else better(run, runs[policy.name])
                    note(figures, f"{streamlets:,} x {rate:,}/s, {policy.name}", run)
            figures.notes[f"{streamlets:,} x {rate:,}/s"] = "\n\n" + cost_table(policies, runs)


def fills(policy: Policy, streamlets: int, rate: int, seconds: float) -> bool:
    """Whether chunks become full several times in a run."""
    return policy.chunk_records is not None and policy.chunk_records * streamlets * 3 <= rate * seconds


COST_HEAD = (
    "| | chunks/s | us a record | of producer / broker / reader | less than at once | acknowledged, mean / p99, ms"
    " | read, mean / p99, ms | held, by mean / p99 |"
)


def cost_table(policies: Sequence[Policy], runs: Mapping[str, Run]) -> str:
    """The table for one number of streamlets and records a second."""
    lines = [
        COST_HEAD,
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for policy in policies:
        run = runs[policy.name]
        seen, limit_ms = run.seen, policy.settings.get("latency_target_ms")
        parts = " / ".join(f"{each:.2f}" for each in run.each_us)
        times = runs[AT_ONCE.name].cpu_us / max(run.cpu_us, SMALLEST_SHARE_US)
        read = held = ""
        if seen is not None:
            read = f"{seen.mean_ms:,.1f} / {seen.p99_ms:,.1f}"
            held = "" if limit_ms is None else f"{seen.held(limit_ms):.0%} / {seen.held_p99(limit_ms):.0%}"
        lines.append(
            f"| {policy.name} | {run.chunks_per_s:,.0f} | {run.cpu_us:.2f} | {parts} | {times:.1f} x"
            f" | {run.mean_ms:,.1f} / {run.p99_ms:,.1f} | {read} | {held} |"
        )
    return "\n".join(lines)


async def measure_all(arguments: argparse.Namespace) -> None:
    """Measure on a cluster of its own, which keeps everything in memory."""
    parts = PARTS if arguments.part == "all" else (arguments.part,)
    with directory(arguments) as where:
        figures = Figures("latency", arguments, where)
        if set(parts) - {"path"}:
            async with (
                broker(
                    where / "rates", arena_bytes=arguments.arena_mib * MIB, segment_bytes=MIB // 4, **IN_MEMORY
                ) as made,
                await Client.connect(made.cluster.bootstrap) as client,
            ):
                if "figure" in parts:
                    await figure(made, client, arguments, figures)
                if "cost" in parts:
                    await cost(made, client, arguments, figures)
        if "path" in parts:
            await latency_path.part(where, arguments, figures)
        figures.print()


def main(argv: list[str] | None = None) -> None:
    """See the head of this module."""
    made = parser(__doc__)
    made.add_argument("--part", choices=["all", *PARTS], default="all")
    made.add_argument("--seconds", type=float, default=5.0, help="of each run")
    made.add_argument("--rounds", type=int, default=1)
    made.add_argument("--rates", type=int, nargs="*", help="records a second")
    made.add_argument("--streamlets", type=int, nargs="*", help="of --part cost")
    made.add_argument("--targets", type=int, nargs="*", help="of --part cost, in milliseconds")
    made.add_argument("--reader", choices=["push", "pull"], default="push", help="of --part cost")
    made.add_argument("--arena-mib", type=int, default=2_048, help="memory of the broker: all of a run stays in it")
    made.add_argument("--path-rate", type=float, default=30.0, help="of --part path: records a second of each input")
    made.add_argument("--limit-ms", type=float, default=300.0, help="of --part path")
    made.add_argument("--window-s", type=float, default=15.0, help="of --part path")
    made.add_argument("--worker", help=argparse.SUPPRESS)
    arguments: Any = made.parse_args(argv)
    if arguments.worker:
        die_with_parent()
        asyncio.run(work(json.loads(arguments.worker)))
    else:
        asyncio.run(measure_all(arguments))


if __name__ == "__main__":
    main()
