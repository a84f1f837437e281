"""How late records are: figures 2, 7 and 8 of *Nephele Streaming*, measured by `bench.latency` and its path.

Also the savings of targets with many streamlets, which are not in the paper: it has no records with keys.

The experiments compare times and processor time of records, and not MB/s. A limit, and a window, are series of their
own, with the same figure everywhere, so that claims about them are ratios too.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from bench import latency, latency_path
from bench.common import IN_MEMORY, Broker, broker, say
from bench.experiments.measure import Measured
from bench.experiments.setup import Claim, Experiment, Point, Sample, Setup
from kera.client import Client
from kera.core.base.settings import GIB, MIB

RATES = (1, 1_000, 10_000, 100_000)
LIMIT_MS = 50
TARGET, LIMIT = f"target of {LIMIT_MS} ms", "the target"
SMALL, MIDDLE, LARGE = (policy.name for policy in latency.FIXED)
POLICIES = {**{policy.name: policy for policy in latency.FIGURE}, TARGET: latency.target(LIMIT_MS)}

COST_STREAMLETS, COST_RATE, COST_LIMIT_MS = 64, 20_000, 200
AT_ONCE, COST_TARGET, FULL_CHUNKS = latency.AT_ONCE.name, f"target of {COST_LIMIT_MS} ms", latency.FULL.name
COST_POLICIES = {AT_ONCE: latency.AT_ONCE, COST_TARGET: latency.target(COST_LIMIT_MS), FULL_CHUNKS: latency.FULL}
HELD, ALL = "windows of 1 s in which the target is held, percent", "all windows, percent"

PATH_RATE = 30
PATH_LIMIT_MS, WINDOW_S = 300.0, 15.0
FULL, CONSTRAINT, UNTIL, WINDOW = "full chunks", "constraint of 300 ms", "until it is held", "a window"

FIGURE_2 = Experiment(
    name="latency",
    figures="latency (Nephele Streaming, figure 2)",
    title="Records of 128 bytes in chunks that go full, at once, or in time",
    x_label="records a second",
    points=tuple(
        Point(series, rate, Setup(consumer="push", rate=rate)) for series in (*POLICIES, LIMIT) for rate in RATES
    ),
    thesis="(Nephele Streaming.) At low rates records wait in large buffers for minutes, at high ones all sizes are"
    " quick; flushing each record is quick at low rates, and brings little at high ones.",
    claims=(
        Claim("Full chunks take minutes: 64 KiB over the target, 1/s", (LARGE, 1), (TARGET, 1), 1000, metric="latency"),
        Claim(
            "At high rates sizes hardly differ: 64 over 16 KiB, 100,000/s",
            (LARGE, 100_000),
            (MIDDLE, 100_000),
            most=4,
            metric="latency",
        ),
        Claim("Flushing costs: over 64 KiB, 10,000/s", ("flush", 10_000), (LARGE, 10_000), 10, metric="cpu"),
        *(
            Claim(f"The target is held on average: {rate:,}/s", (TARGET, rate), (LIMIT, rate), most=1, metric="latency")
            for rate in RATES
        ),
        *(
            Claim(
                f"It costs no more than 1.5 times a fixed size: {size}, {rate:,}/s",
                (TARGET, rate),
                (size, rate),
                most=1.5,
                metric="cpu",
            )
            for rate in (10_000, 100_000)
            for size in (SMALL, MIDDLE, LARGE)
        ),
        Claim(
            f"Nor than the largest size that holds it at a low rate: {SMALL}, 1,000/s",
            (TARGET, 1_000),
            (SMALL, 1_000),
            most=1.5,
            metric="cpu",
        ),
        Claim(
            f"Nor there than a size that waits for several times as long: {LARGE}, 1,000/s",
            (TARGET, 1_000),
            (LARGE, 1_000),
            most=1.5,
            metric="cpu",
        ),
    ),
    plotted="latency",
    note="Until a record is acknowledged; processor time is of producer and broker, less what they take when nothing is"
    " sent. Where no chunk has become full, what its records would wait for is reckoned. At 1,000 records a second a"
    " chunk of 64 KiB takes four tenths of a second to fill, so it saves chunks that a target of 50 ms needs.",
)
COST = Experiment(
    name="latency_cost",
    figures="latency (cost of chunks)",
    title="Records with keys in 64 streamlets, read as they come: at once, with a target, and in full chunks",
    x_label="records a second",
    points=tuple(
        Point(series, COST_RATE, Setup(streamlets=COST_STREAMLETS, consumer="push", rate=COST_RATE))
        for series in (*COST_POLICIES, HELD, ALL)
    ),
    thesis="(Not in a paper.) A chunk costs the same whatever is in it, so fewer of them are made where it is known how"
    " late records may be.",
    claims=(
        Claim(
            "A target of 200 ms costs a fifth at most", (AT_ONCE, COST_RATE), (COST_TARGET, COST_RATE), 5, metric="cpu"
        ),
        Claim("It is held in 99 of 100 windows", (HELD, COST_RATE), (ALL, COST_RATE), 0.99, metric="latency"),
        Claim(
            "It costs little more than full chunks do",
            (COST_TARGET, COST_RATE),
            (FULL_CHUNKS, COST_RATE),
            most=1.5,
            metric="cpu",
        ),
    ),
    plotted="latency",
    note="From when a record is accepted until its reader has it; processor time is of producer, broker and reader. A"
    " window counts by the mean of its records, by when they were accepted.",
)
PATH = Experiment(
    name="latency_path",
    figures="latency (Nephele Streaming, figures 7 and 8)",
    title="A path of three streams and two applications, with full chunks and with a constraint",
    x_label="records a second at its end (four inputs are merged)",
    points=tuple(
        Point(series, PATH_RATE, Setup(consumer="push", rate=PATH_RATE, chunk_bytes=latency_path.CHUNK_BYTES))
        for series in (FULL, CONSTRAINT, UNTIL, WINDOW)
    ),
    thesis="(Nephele Streaming.) With buffers of 32 KB, 3.5 to 5.5 s; with sizes that are adapted 340 ms, nine minutes"
    " later; with tasks that are chained as well, a thirteenth or less, with the throughput as it was.",
    claims=(
        Claim("A constraint brings a thirteenth", (FULL, PATH_RATE), (CONSTRAINT, PATH_RATE), 13, metric="latency"),
        Claim("With as many records", (CONSTRAINT, PATH_RATE), (FULL, PATH_RATE), 0.95, metric="consumed"),
        Claim("Within three windows", (UNTIL, PATH_RATE), (WINDOW, PATH_RATE), most=3, metric="latency"),
    ),
    plotted="latency",
    note="One machine, and records of 128 bytes where the paper has packets of video. There is no chaining of tasks.",
)
EXPERIMENTS = (FIGURE_2, PATH, COST)


def sample(mean_ms: float, *, records_per_s: float = 0.0, cpu_us: float = 0.0) -> Sample:
    """A run in the form of the page."""
    mb_per_s = records_per_s * latency.RECORD_BYTES / 1e6
    return Sample(mb_per_s, mb_per_s, 0.0, 0.0, 0.0, 0.0, mean_ms=mean_ms, cpu_us=cpu_us)


def measure(experiment: Experiment, *, rounds: int, seconds: float, folder: Path) -> Measured:
    """Measure all points of an experiment; a path is measured by windows, so `seconds` only applies to the others."""
    if experiment is PATH:
        return Measured(asyncio.run(_path(folder, rounds)), {})
    if experiment is COST:
        return Measured(asyncio.run(_cost(folder, rounds, seconds)), {})
    return Measured(asyncio.run(_figure_2(folder, rounds, seconds)), {})


async def _path(folder: Path, rounds: int) -> dict[tuple[str, int], list[Sample]]:
    samples: dict[tuple[str, int], list[Sample]] = {}
    for number in range(rounds):
        where, load = folder / f"path-{number}", os.getloadavg()[0]
        run = await latency_path.measure(where, rate=PATH_RATE, limit_ms=PATH_LIMIT_MS, window_s=WINDOW_S)
        for series, one in samples_of(run).items():
            samples.setdefault((series, PATH_RATE), []).append(dataclasses.replace(one, load=load))
            say(f"{series}: {one.mean_ms:,.0f} ms")
    return samples


def samples_of(run: latency_path.Run) -> dict[str, Sample]:
    """The samples by series. A constraint that was never held counts with the time of the search, and a window."""
    settled = run.settled_windows if math.isfinite(run.settled_windows) else latency_path.SETTLED_WINDOWS + 1
    return {
        FULL: sample(run.before.mean_ms, records_per_s=run.before.rate, cpu_us=run.before.cpu_us),
        CONSTRAINT: sample(run.after.mean_ms, records_per_s=run.after.rate, cpu_us=run.after.cpu_us),
        UNTIL: sample(settled * WINDOW_S * 1000),
        WINDOW: sample(WINDOW_S * 1000),
    }


def cost_samples_of(runs: Mapping[str, latency.Run]) -> dict[str, Sample]:
    """The samples by series, from the reader's figures of each policy."""
    found = {}
    for series, run in runs.items():
        if run.seen is None:
            raise SystemExit("nobody has read")
        found[series] = sample(run.seen.mean_ms, records_per_s=run.rate, cpu_us=run.cpu_us)
        if series == COST_TARGET:
            found |= {HELD: sample(100 * run.seen.held(COST_LIMIT_MS)), ALL: sample(100)}
    return found


async def _cost(folder: Path, rounds: int, seconds: float) -> dict[tuple[str, int], list[Sample]]:
    samples: dict[tuple[str, int], list[Sample]] = {}
    async with _in_memory(folder) as (made, client):
        idle = await latency.idle_share(made, client, COST_RATE, seconds, pushed=True)
        for _ in range(rounds):
            runs, load = {}, os.getloadavg()[0]
            for series, policy in COST_POLICIES.items():
                runs[series] = await latency.measure(
                    made, client, policy, COST_RATE, seconds, idle, COST_STREAMLETS, pushed=True
                )
                say(f"{series}: {runs[series].cpu_us:.2f} us a record")
            for series, one in cost_samples_of(runs).items():
                samples.setdefault((series, COST_RATE), []).append(dataclasses.replace(one, load=load))
    return samples


@contextlib.asynccontextmanager
async def _in_memory(folder: Path) -> AsyncIterator[tuple[Broker, Client]]:
    async with (
        broker(folder / "latency", arena_bytes=2 * GIB, segment_bytes=MIB // 4, **IN_MEMORY) as made,
        await Client.connect(made.cluster.bootstrap) as client,
    ):
        yield made, client


async def _figure_2(folder: Path, rounds: int, seconds: float) -> dict[tuple[str, int], list[Sample]]:
    samples: dict[tuple[str, int], list[Sample]] = {}
    async with _in_memory(folder) as (made, client):
        for rate in RATES:
            idle = await latency.idle_share(made, client, rate, seconds)
            for _ in range(rounds):
                for series, policy in POLICIES.items():
                    load = os.getloadavg()[0]
                    run = await latency.measure(made, client, policy, rate, seconds, idle)
                    one = sample(run.mean_ms, records_per_s=run.rate, cpu_us=run.cpu_us)
                    samples.setdefault((series, rate), []).append(dataclasses.replace(one, load=load))
                    say(f"{rate:,}/s, {series}: {run.mean_ms:,.1f} ms, {run.cpu_us:.2f} us a record")
                samples.setdefault((LIMIT, rate), []).append(sample(LIMIT_MS))
    return samples
