"""Consumers on the broker's host: pushed through shared memory, against pulled through its sockets (figure 8.17).

* Following: a producer sends as fast as it can while 1, 2 or 4 consumers follow, each of which reads all
  records. The result is the time until each of them has all.
* Reading: the stream is in the broker's memory, without a writer, and the consumers read all of it at the same time.
  They have read it before, so the broker's memory is in their page tables.

Sides take turns in each round; a round of following has a stream of its own. A batch fills a chunk, with a call for
each; checksums are verified by broker and consumers. A consumer opens each chunk as an Arrow batch and counts its rows;
it does not look at values.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from bench.common import Broker, broker, say
from bench.cpu import run_s
from bench.experiments.measure import Measured
from bench.experiments.setup import RECORD_BYTES, Claim, Consumer, Experiment, Place, Point, Sample, Setup
from kera.cli.bench._processes import Worker, workers
from kera.cli.bench._worker import WARM_UP_BYTES, Result, Task
from kera.client import Client
from kera.core.base.settings import KIB, MIB

CONSUMERS = (1, 2, 4)
SIDES: dict[Consumer, str] = {"push": "pushed", "pull": "pulled"}
SHARED_MEMORY: dict[Consumer, str] = {"push": "always", "pull": "never"}
REPLICATION = (0, 1, 2)
BACKED_UP = Place(backups=max(REPLICATION))
STREAMLETS, SEGMENT_BYTES, CHUNK_BYTES = 2, 8 * MIB, 256 * KIB
BYTES_PER_S = 250_000_000
"""Bytes of values in a round, for each second that the round should take."""
STORED_SHARE = 1.3
"""Maximum size of a round in the broker's memory for each byte of its values."""


def following(side: str, replication: int) -> str:
    """The name of a series."""
    return f"following, {side}, R = {replication}"


def reading(side: str) -> str:
    """The name of a series without a producer."""
    return f"reading, {side}"


def _points() -> list[Point]:
    found = []
    base = Setup(BACKED_UP, streamlets=STREAMLETS, chunk_bytes=CHUNK_BYTES)
    for number, (consumer, side) in itertools.product(CONSUMERS, SIDES.items()):
        setup = dataclasses.replace(base, consumer=consumer)
        found.append(Point(reading(side), number, setup))
        found += [
            Point(following(side, copies), number, dataclasses.replace(setup, replication=copies))
            for copies in REPLICATION
        ]
    found.sort(key=lambda point: (point.x, point.setup.replication, point.series.startswith("reading")))
    return found


EXPERIMENT = Experiment(
    name="locality",
    figures="8.17",
    title="Consumers: local, through shared memory, against remote",
    x_label="consumers (each of everything)",
    points=_points(),
    thesis="Local consumers bring up to 60 % more; more copies bring less, with either.",
    claims=(
        *(
            Claim(
                f"Local consumers bring more: {number}, R = {replication}",
                (following("pushed", replication), number),
                (following("pulled", replication), number),
                least=1.1,
                metric="consumed",
            )
            for replication, number in itertools.product(REPLICATION, CONSUMERS)
        ),
        *(
            Claim(
                f"More copies bring less: R = 2 over 0, {side}, 1 consumer",
                (following(side, 2), 1),
                (following(side, 0), 1),
                most=0.95,
                metric="consumed",
            )
            for side in SIDES.values()
        ),
        Claim(
            "Local consumers cost less than half: reading, 4 consumers",
            (reading("pushed"), 4),
            (reading("pulled"), 4),
            least=2,
            metric="per_core",
        ),
    ),
    plotted="consumed",
    note="The producer has a call for each chunk of 256 KiB. Consumed is the size of the stream over the time until"
    " all consumers have read it all: a consumer that falls behind leaves the producer more of the machine. Remote"
    " consumers pull, over a unix socket of this machine, which is faster than a network.",
)


def measure(experiment: Experiment, *, rounds: int, seconds: float, folder: Path) -> Measured:
    """Measure all points."""
    del folder
    return Measured(asyncio.run(_measure(experiment.points, rounds, int(seconds * BYTES_PER_S))), {})


async def _measure(points: Sequence[Point], rounds: int, round_bytes: int) -> dict[tuple[str, int], list[Sample]]:
    samples: dict[tuple[str, int], list[Sample]] = {}
    arena_bytes = int(2 * round_bytes * STORED_SHARE) + 3 * WARM_UP_BYTES + 32 * SEGMENT_BYTES * STREAMLETS
    async with (
        broker(
            None,
            arena_bytes=arena_bytes // SEGMENT_BYTES * SEGMENT_BYTES,
            segment_bytes=SEGMENT_BYTES,
            backups=max(REPLICATION),
        ) as made,
        await Client.connect(made.cluster.bootstrap) as client,
    ):
        bench = Bench(made, client, round_bytes // RECORD_BYTES)
        async with bench.streams(0) as (read, warm_up):
            await bench.fill(read, warm_up)
            for point in [*points] * rounds:
                load = os.getloadavg()[0]
                if point.series.startswith("reading"):
                    one = await bench.read(point, read)
                else:
                    one = await bench.follow(point)
                one.load = load
                say(f"  {point.series}, {point.x}: {one.consumed_mb_per_s:,.0f} MB/s")
                samples.setdefault((point.series, point.x), []).append(one)
    return samples


class Bench:
    """Rounds with one broker."""

    def __init__(self, made: Broker, client: Client, records: int) -> None:
        self._broker = made
        self._client = client
        self._records = records
        self._names = map("round-{}".format, itertools.count())

    @contextlib.asynccontextmanager
    async def streams(self, replication: int) -> AsyncIterator[tuple[str, str]]:
        """A new stream to measure, and another to warm up."""
        names = next(self._names), next(self._names)
        for name in names:
            await self._client.admin.create_stream(name, streamlets=STREAMLETS, replication=replication)
        try:
            yield names
        finally:
            for name in names:
                await self._client.admin.delete_stream(name)
            await self._broker.until(lambda metrics: metrics["arena_slots_leased"] == 0)

    async def fill(self, stream: str, warm_up: str) -> None:
        """Write the data for reading."""
        async with workers([self._producer(stream, warm_up)]) as (filling,):
            await filling.ready()
            filling.go()
            await filling.result()

    async def read(self, point: Point, stream: str) -> Sample:
        """Measure consumers of stored data, which warm up by reading them."""
        async with workers([self._consumer(stream, stream, point.setup.consumer)] * point.x) as readers:
            await asyncio.gather(*(each.ready() for each in readers))
            return await self._measured([], readers)

    async def follow(self, point: Point) -> Sample:
        """Measure a producer at full speed, and consumers behind it."""
        async with self.streams(point.setup.replication) as (stream, warm_up):
            reading_tasks = [self._consumer(stream, warm_up, point.setup.consumer)] * point.x
            async with workers([self._producer(stream, warm_up)]) as producers, workers(reading_tasks) as readers:
                for group in (producers, readers):  # consumers warm up with the producers' warm-up records
                    await asyncio.gather(*(each.ready() for each in group))
                return await self._measured(producers, readers)

    def _producer(self, stream: str, warm_up: str) -> Task:
        return Task(
            role="produce",
            mode="send_batch",
            records=self._records,
            chunk_bytes=CHUNK_BYTES,
            producer_settings={"chunk_bytes_max": CHUNK_BYTES, "buffer_bytes_max": 16 * MIB},
            **self._shared(stream, warm_up),
        )

    def _consumer(self, stream: str, warm_up: str, consumer: Consumer | None) -> Task:
        settings = {"shared_memory": SHARED_MEMORY[consumer or "push"]}
        return Task(role="consume", mode="batches", consumer_settings=settings, **self._shared(stream, warm_up))

    def _shared(self, stream: str, warm_up: str) -> dict[str, Any]:
        return {
            "bootstrap": self._broker.cluster.bootstrap,
            "stream": stream,
            "warm_up_stream": warm_up,
            "record_bytes": RECORD_BYTES,
            "transport": "auto",
        }

    async def _measured(self, producers: Sequence[Worker], readers: Sequence[Worker]) -> Sample:
        before = self._daemons_s()
        for each in (*readers, *producers):
            each.go()
        produced = list(await asyncio.gather(*(each.result() for each in producers)))
        for each in readers:
            each.tell_total(self._records)
        consumed = list(await asyncio.gather(*(each.result() for each in readers)))
        after = self._daemons_s()
        return sample_of(produced, consumed, {name: after[name] - before[name] for name in after})

    def _daemons_s(self) -> dict[str, float]:
        return {name: run_s(pid) for name, pid in self._broker.cluster.processes.items()}


def sample_of(produced: Sequence[Result], consumed: Sequence[Result], daemons_s: dict[str, float]) -> Sample:
    """The figures of a round: the throughput until the last consumer has everything, and processor time per GB of
    that.
    """
    values_bytes = max(each.record_bytes for each in consumed)
    begun_ns = min(each.start_ns for each in produced or consumed)

    def mb_per_s(results: Sequence[Result]) -> float:
        return values_bytes / 1e6 / ((max(each.end_ns for each in results) - begun_ns) / 1e9) if results else 0.0

    def per_gb(times_s: Sequence[float]) -> float:
        return sum(times_s) / (values_bytes / 1e9)

    return Sample(
        produced_mb_per_s=mb_per_s(produced),
        consumed_mb_per_s=mb_per_s(consumed),
        producers_s_per_gb=per_gb([each.cpu_s for each in produced]),
        brokers_s_per_gb=per_gb([used for name, used in daemons_s.items() if name.startswith("broker")]),
        backups_s_per_gb=per_gb([used for name, used in daemons_s.items() if name.startswith("backup")]),
        consumers_s_per_gb=per_gb([each.cpu_s for each in consumed]),
    )
