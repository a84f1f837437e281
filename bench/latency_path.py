"""A path that waits for full chunks, and what a latency constraint makes of it: ``bench.latency --part path``.

Figures 7 and 8 of Lohrmann, Warneke and Kao, *Nephele Streaming*, drawn again: four inputs come into a stream, each
into a streamlet of its own; an application merges four records into one, another one passes these on, and a reader
reads them. So the path has three streams and two applications, each a process, and the later streams have a quarter of
the rate. Before, chunks of 32 KiB go when they are full and no sooner: there is a constraint already, of an hour, which
lets all chunks fill for as long as they take. Then it is altered, while all goes on.

Beside it is the effect of the paper's own law (3.5.1), computed and not measured: a chunk size becomes ``size x 0.98 **
(milliseconds that records wait in it on average)``, while the constraint is violated and no more than once per window,
after what was measured with the size before is gone; and 1.1 times as large if records do not wait.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import struct
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import IN_MEMORY, Broker, Figures, broker, say
from bench.cpu import run_s
from kera.client import Client, LatencyDescription
from kera.client.producing.open_chunks.records import RECORD_OVERHEAD_BYTES
from kera.core.base.process import DIE_WITH_PARENT_VARIABLE, die_with_parent
from kera.core.base.settings import KIB, MIB
from kera.core.errors import KeraError

PACKETS, MERGED, ENCODED = STREAMS = ("packets", "merged", "encoded")
MERGE, ENCODE = "merge", "encode"
PATH = (PACKETS, f"group:{MERGE}", MERGED, f"group:{ENCODE}", ENCODED)
NAME = "path"
INPUTS = 4
CHUNK_BYTES = 32 * KIB
RECORD_BYTES = 128
HOUR_MS = 3_600_000.0
ROLES = ("source", MERGE, ENCODE)
LEARNT_S = 10.0
"""Time until writers follow advice, and earlier chunks have gone."""
LOOK_S = 0.25
SETTLED_WINDOWS = 4
"""The number of windows after which it gives up."""
_HEAD = struct.Struct("<QQ")
"""Fields of a value: its number, and when it was sent, in microseconds."""


# -- the paper's law -----------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A step of the paper's law."""

    at_s: float
    mean_ms: float
    sizes: tuple[int, ...]
    """Sizes of chunks in bytes, by channel."""
    chunks_per_s: float


def law(
    rates: Sequence[float], buffers: Sequence[int], rest_ms: float, limit_ms: float, window_s: float, *, most: int = 60
) -> list[Step]:
    """The sizes, step by step, until the constraint is held; at most `most` steps.

    `rates`: records a second that come to a buffer of each channel; `buffers`: the number of buffers of each;
    `rest_ms`: the time of everything except filling.
    """
    record, sizes, at_s, found = RECORD_BYTES + RECORD_OVERHEAD_BYTES, [CHUNK_BYTES] * len(rates), 0.0, list[Step]()
    for _ in range(most):
        records = [max(1, math.ceil(size / record)) for size in sizes]
        filling_s = [(count - 1) / rate for count, rate in zip(records, rates, strict=True)]
        waits_ms = [500 * each for each in filling_s]
        mean_ms = sum(waits_ms) + rest_ms
        # Measurements with earlier sizes have to leave the window, and as long as no chunk is full nothing is measured.
        at_s += window_s + max(filling_s)
        chunks = sum(many * rate / count for many, rate, count in zip(buffers, rates, records, strict=True))
        found.append(Step(at_s, mean_ms, tuple(sizes), chunks))
        if mean_ms <= limit_ms:
            break
        sizes = [next_size(size, wait_ms) for size, wait_ms in zip(sizes, waits_ms, strict=True)]
    return found


def next_size(size: int, wait_ms: float) -> int:
    """The next size of chunks whose records wait for so long on average: formulas 2 and 3, with the paper's
    constants.
    """
    if wait_ms > 5:
        return max(200, int(size * 0.98**wait_ms))
    return min(CHUNK_BYTES, int(size * 1.1)) if wait_ms < 1 else size


# -- processes of the path -----------------------------------------------------------------------------------------


async def feed(client: Client, rate: float) -> None:
    """Send `rate` records a second to each input."""
    async with client.producer(chunk_bytes_max=CHUNK_BYTES) as producer:
        await producer.prepare(PACKETS)
        begun_s, number, rest = time.perf_counter(), 0, bytes(RECORD_BYTES - _HEAD.size)
        while True:
            while number < (time.perf_counter() - begun_s) * rate:
                value = _HEAD.pack(number, time.time_ns() // 1000) + rest
                for streamlet in range(INPUTS):
                    producer.send(PACKETS, value, streamlet=streamlet)
                number += 1
            await producer.drain()
            await asyncio.sleep(max(0.001, begun_s + number / rate - time.perf_counter()))


class Merger:
    """Merges the records with the same number, one from each input."""

    def __init__(self, inputs: int) -> None:
        self._inputs = inputs
        self._waiting: dict[int, tuple[int, int]] = {}
        """By number: how many inputs have come, and when the oldest was sent."""

    def take(self, values: Iterable[bytes]) -> Iterable[bytes]:
        """The records that are now complete. A merged record counts as sent when its oldest part was."""
        for value in values:
            number, sent_us = _HEAD.unpack_from(value)
            there, oldest_us = self._waiting.pop(number, (0, sent_us))
            oldest_us = min(oldest_us, sent_us)
            if there + 1 == self._inputs:
                yield _HEAD.pack(number, oldest_us) + value[_HEAD.size :]
            else:
                self._waiting[number] = there + 1, oldest_us


async def pass_on(client: Client, group: str, source: str, sink: str, inputs: int) -> None:
    """One of the applications."""
    merger = Merger(inputs)
    async with (
        client.producer(chunk_bytes_max=CHUNK_BYTES) as producer,
        client.group_consumer(group, [source]) as consumer,
    ):
        await producer.prepare(sink)
        async for chunk in consumer.batches():
            for value in merger.take(chunk.batch.column("value").to_pylist()):
                producer.send(sink, value)
            await producer.drain()


async def work(task: dict[str, Any]) -> None:
    """Be one of the processes, until it is killed."""
    async with await Client.connect(task["bootstrap"]) as client:
        if task["role"] == MERGE:
            await pass_on(client, MERGE, PACKETS, MERGED, INPUTS)
        elif task["role"] == ENCODE:
            await pass_on(client, ENCODE, MERGED, ENCODED, 1)
        else:
            await feed(client, task["rate"])


@contextlib.asynccontextmanager
async def running(bootstrap: str, rate: float) -> AsyncIterator[list[int]]:
    """All processes of the path, by their process ids."""
    processes: list[asyncio.subprocess.Process] = []
    try:
        for role in ROLES:
            task = json.dumps({"role": role, "bootstrap": bootstrap, "rate": rate})
            processes.append(
                await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "bench.latency_path", task),
                    env={**os.environ, DIE_WITH_PARENT_VARIABLE: "1"},
                )
            )
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


# -- measurements ----------------------------------------------------------------------------------------------


class Arrival(NamedTuple):
    """The arrival of a chunk at the end of the path."""

    at_s: float
    records: int
    waited_ms: float
    """Mean time since its records were sent."""


class Phase(NamedTuple):
    """The measurements of some time."""

    mean_ms: float
    """From the sending of records until the reader has them at the end of the path."""
    rate: float
    """Records a second at the end."""
    chunks_per_s: float
    """Chunks of all streams."""
    cpu_us: float
    """Processor time of broker and processes for each record at the end."""
    described: LatencyDescription


def mean_and_rate(arrivals: Sequence[Arrival]) -> tuple[float, float]:
    """The mean and rate of some arrivals. Raises `SystemExit` if there are fewer than two."""
    if len(arrivals) < 2:
        raise SystemExit(f"{len(arrivals)} chunks have come to the end of the path: take a longer window")
    records = sum(each.records for each in arrivals)
    mean_ms = sum(each.waited_ms * each.records for each in arrivals) / records
    # From arrival to arrival: chunks arrive whole, so the amount within a time is known only to a chunk.
    return mean_ms, (records - arrivals[0].records) / (arrivals[-1].at_s - arrivals[0].at_s)


async def read(client: Client, arrivals: list[Arrival]) -> None:
    """Note the arrivals at the end of the path."""
    async with client.consumer(ENCODED) as consumer:
        async for chunk in consumer.batches():
            now_us, values = time.time_ns() / 1000, chunk.batch.column("value").to_pylist()
            sent_us = [_HEAD.unpack_from(value)[1] for value in values]
            waited_ms = (now_us - sum(sent_us) / len(sent_us)) / 1000
            arrivals.append(Arrival(time.perf_counter(), len(values), waited_ms))


class Run(NamedTuple):
    """The phases of a run."""

    before: Phase
    after: Phase
    settled_windows: float
    """The time from the change of the constraint until it was held for the rest; infinite if it was not."""


class _Path:
    """A running path."""

    def __init__(self, made: Broker, client: Client, pids: list[int], window_s: float) -> None:
        self._made, self._client, self._pids, self._window_s = made, client, pids, window_s
        self.arrivals: list[Arrival] = []

    async def constrain(self) -> None:
        """Let all chunks fill, as soon as both applications read; returns when brokers know the constraint."""
        async with asyncio.timeout(60):
            while True:
                try:
                    await self._client.latency.create(NAME, PATH, HOUR_MS, window_ms=round(self._window_s * 1000))
                except KeraError:
                    await asyncio.sleep(LOOK_S)
                else:
                    break
        async with asyncio.timeout(60 + 4 * self._window_s):
            while not lets_fill(await self._client.latency.describe(NAME)):
                await asyncio.sleep(LOOK_S)

    async def phase(self, seconds: float) -> Phase:
        """Measure for `seconds`."""
        first, begun_s, cpu_s = len(self.arrivals), time.perf_counter(), self._cpu_s()
        chunks = (await self._made.metrics())["chunks_appended_total"]
        await asyncio.sleep(seconds)
        mean_ms, rate = mean_and_rate(self.arrivals[first:])
        took_s, cpu_s = time.perf_counter() - begun_s, self._cpu_s() - cpu_s
        chunks = (await self._made.metrics())["chunks_appended_total"] - chunks
        described = await self._client.latency.describe(NAME)
        return Phase(mean_ms, rate, chunks / took_s, cpu_s / took_s / rate * 1e6, described)

    def _cpu_s(self) -> float:
        return sum(map(run_s, (self._made.pid, *self._pids)))

    async def settled(self, limit_ms: float) -> float:
        """Alter the limit, and watch `SETTLED_WINDOWS`; returns the time after which it was held for the rest."""
        await self._client.latency.alter(NAME, limit_ms=limit_ms)
        begun_s, since_s = time.perf_counter(), math.inf
        while (now_s := time.perf_counter() - begun_s) < SETTLED_WINDOWS * self._window_s:
            held = holds(await self._client.latency.describe(NAME), limit_ms)
            since_s = min(since_s, now_s) if held else math.inf
            await asyncio.sleep(LOOK_S)
        return since_s / self._window_s


def lets_fill(described: LatencyDescription) -> bool:
    """Whether chunks of all streams are advised to wait."""
    return all(hop.advised_us > 0 for hop in described.hops if hop.hop == "gather")


def holds(described: LatencyDescription, limit_ms: float) -> bool:
    """Whether the measurements of the last window hold the limit."""
    return described.state == "held" and described.mean_us <= limit_ms * 1000


async def measure(where: Path, *, rate: float, limit_ms: float, window_s: float, arena_bytes: int = 256 * MIB) -> Run:
    """Measure before and after, on a cluster of its own. `rate`: records a second of each of four inputs."""
    async with (
        broker(where, arena_bytes=arena_bytes, segment_bytes=MIB // 4, **IN_MEMORY) as made,
        await Client.connect(made.cluster.bootstrap) as client,
    ):
        for stream in STREAMS:
            await client.admin.create_stream(stream, streamlets=INPUTS if stream == PACKETS else 1)
        async with running(made.cluster.bootstrap, rate) as pids:
            path = _Path(made, client, pids, window_s)
            reading = asyncio.create_task(read(client, path.arrivals))
            try:
                await path.constrain()
                await asyncio.sleep(window_s + LEARNT_S)
                before = await path.phase(2 * window_s)
                settled = await path.settled(limit_ms)
                return Run(before, await path.phase(2 * window_s), settled)
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)


# -- output -------------------------------------------------------------------------------------------------


def bars(before: LatencyDescription, after: LatencyDescription) -> str:
    """Hops before and after as a table, with bars to the scale of the longest hop."""
    most_us = max(1, *(hop.mean_us for each in (before, after) for hop in each.hops))
    lines = ["| stream | hop | before, ms | after, ms | |", "|---|---|--:|--:|---|"]
    for one, other in zip(before.hops, after.hops, strict=True):
        drawn = " / ".join("#" * round(40 * hop.mean_us / most_us) or "." for hop in (one, other))
        lines.append(
            f"| {one.stream} | {one.hop} | {one.mean_us / 1000:,.1f} | {other.mean_us / 1000:,.1f} | `{drawn}` |"
        )
    return "\n".join(lines)


def note(figures: Figures, run: Run, rate: float, limit_ms: float, window_s: float) -> None:
    """Keep the figures, and the effect of the paper's law."""
    for name, phase in (("before", run.before), ("after", run.after)):
        figures.add(f"{name}: mean, by the reader", phase.mean_ms, "ms")
        figures.add(f"{name}: mean, as described", phase.described.mean_us / 1000, "ms")
        figures.add(f"{name}: records at the end", phase.rate, "1/s")
        figures.add(f"{name}: chunks", phase.chunks_per_s, "1/s")
        figures.add(f"{name}: processor time of a record", phase.cpu_us, "us")
    figures.add("mean before / after", run.before.mean_ms / run.after.mean_ms, "x (at least 13)")
    figures.add("records after / before", run.after.rate / run.before.rate, "x (at least 0.95)")
    figures.add("settled after", run.settled_windows, "windows (at most 3)")
    figures.notes["hops"] = "\n\n" + bars(run.before.described, run.after.described)
    hops = run.after.described.hops
    rest_ms = sum(hop.mean_us for hop in hops if hop.hop != "gather") / 1000
    steps = law([rate] * len(STREAMS), [INPUTS, 1, 1], rest_ms, limit_ms, window_s)
    figures.add("the paper's law: steps", len(steps) - 1, "")
    figures.add("the paper's law: mean at the end", steps[-1].mean_ms, "ms (reckoned)")
    figures.add("the paper's law: chunks at the end", steps[-1].chunks_per_s, "1/s (reckoned)")
    figures.add("the paper's law: settled after", steps[-1].at_s / window_s, "windows (reckoned)")


async def part(where: Path, arguments: argparse.Namespace, figures: Figures) -> None:
    """Run ``--part path``."""
    rate, limit_ms, window_s = arguments.path_rate, arguments.limit_ms, arguments.window_s
    for number in range(arguments.rounds):
        run = await measure(where / f"path-{number}", rate=rate, limit_ms=limit_ms, window_s=window_s)
        say(
            f"path: {run.before.mean_ms:,.0f} -> {run.after.mean_ms:,.0f} ms, {run.before.rate:,.1f} ->"
            f" {run.after.rate:,.1f} records/s, settled after {run.settled_windows:.2f} windows"
        )
        note(figures, run, rate, limit_ms, window_s)


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(work(json.loads(sys.argv[1])))
