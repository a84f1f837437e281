"""Measures points: a cluster for each `Place`, and each round of each point played by `bench.compare`'s workers.

Points of a place take turns, round by round, so that what disturbs one disturbs the others as much. A round has streams
of its own, which are deleted with all they take when the next one begins. Only a point with very many streams, which
take longer to make than anything else, keeps them for its other rounds, and these come last.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.common import IN_MEMORY, say
from bench.compare.contestant import Command, Failed, Role
from bench.compare.rounds import Stage
from bench.compare.workload import Workload
from bench.experiments.setup import RECORD_BYTES, Experiment, Place, Point, Sample, Setup
from kera.cli.bench._latency import Latencies
from kera.client import Client
from kera.core.base.settings import MIB
from kera.core.errors import KeraError, UnknownStream
from kera.local.cluster import LocalCluster, RunningCluster

PRODUCER_PROCESSES_MAX = 2
"""More producers share processes: more are useless on two cores, and each takes a second to start."""
WARM_UP_S = 0.7
STREAMS_AT_ONCE = 64
REPLACED_STREAMS_MAX = 100
"""More streams than this are kept: making a stream takes some milliseconds."""
BUFFER_CHUNKS = 1000
BUFFER_BYTES_MAX, BUFFERS_BYTES_MAX = 64 * MIB, 256 * MIB
"""The maximum of one producer's buffer, and of all buffers together."""


class Prepared:
    """A setup on a cluster, as a running contestant of `bench.compare`."""

    def __init__(self, site: Site, setup: Setup) -> None:
        self._site = site
        self._setup = setup
        self._streams: list[str] = []

    def processes(self) -> dict[str, int]:
        """The daemons."""
        return self._site.cluster.processes

    def prepare(self, number: int) -> None:
        """Create new streams, and remove those of the last round, of whichever setup; or use the streams that the
        setup has kept.
        """
        setup = self._setup
        config = {
            "streamlets": setup.streamlets,
            "entries": setup.entries,
            "replication": setup.replication,
            "virtual_logs": setup.virtual_logs,
        }
        names = [f"round-{number}-{each}" for each in range(setup.streams)]
        self._streams = self._site.streams_of(setup, names, config)

    def worker(self, role: Role, index: int) -> Command:
        """The project's own worker process."""
        del role, index
        setup = self._setup
        settings: dict[str, Any] = {
            "bootstrap": self._site.cluster.bootstrap,
            "streams": self._streams,
            "producer": {
                "request_bytes_max": setup.request_bytes,
                "requests_in_flight_max": setup.requests_in_flight,
                "buffer_bytes_max": buffer_bytes_of(setup),
            },
            "consumer": {
                "shared_memory": "always" if setup.consumer == "push" else "never",
                "verify_checksums": setup.verify,
                "validate_chunks": setup.verify,
            },
        }
        return Command([sys.executable, "-m", "bench.compare.kera_worker"], settings)


class Site:
    """A cluster, and the streams of the last round on it."""

    def __init__(self, cluster: RunningCluster, folder: Path) -> None:
        self.cluster = cluster
        self._folder = folder
        self._streams: list[str] = []
        """Streams to delete before the next round."""
        self._kept: dict[Setup, list[str]] = {}
        self._numbers = itertools.count()

    def measure(self, setup: Setup, *, seconds: float, read_backlog_bytes: int = 0) -> Sample:
        """Run one round. `read_backlog_bytes`: this much is written first, and only reading is measured. Raises
        `Failed`.
        """
        workload = workload_of(setup, seconds, read_backlog_bytes)
        played = Stage(Prepared(self, setup), self._folder).play(workload, next(self._numbers), others=())
        if played["errors"]:
            raise Failed("; ".join(played["errors"]))
        return sample_of(played)

    def streams_of(self, setup: Setup, names: list[str], config: dict[str, Any]) -> list[str]:
        """The streams that the setup has kept, or new ones; other streams are deleted unless they are kept. Raises
        `Failed`.
        """
        made = self._kept.get(setup)
        self._replace(names if made is None else [], config)
        if made is None and setup.streams > REPLACED_STREAMS_MAX:
            self._kept[setup], self._streams = names, []
        return names if made is None else made

    def _replace(self, names: list[str], config: dict[str, Any]) -> None:
        async def replace() -> None:
            async with await Client.connect(self.cluster.bootstrap) as client:

                async def delete(name: str) -> None:
                    with contextlib.suppress(UnknownStream):  # not all were made, if that failed
                        await client.admin.delete_stream(name)

                await _for_each(self._streams, delete)
                self._streams = names
                await _for_each(names, lambda name: client.admin.create_stream(name, **config))

        try:
            asyncio.run(replace())
        except* KeraError as errors:
            raise Failed(str(errors.exceptions[0])) from errors


async def _for_each(names: Iterable[str], action: Callable[[str], Awaitable[object]]) -> None:
    waiting = iter(names)

    async def work() -> None:
        for name in waiting:
            await action(name)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(STREAMS_AT_ONCE):
            tasks.create_task(work())


@contextlib.contextmanager
def site(place: Place, folder: Path) -> Iterator[Site]:
    """A running cluster. Raises `Failed`."""
    try:
        with LocalCluster.running(
            brokers=place.brokers,
            backups=place.backups,
            arena_bytes=place.arena_bytes,
            backup_memory_bytes=place.arena_bytes,
            segment_bytes=place.segment_bytes,
            broker_settings=IN_MEMORY,
            backup_settings=IN_MEMORY,
        ) as cluster:
            yield Site(cluster, folder)
    except KeraError as error:
        raise Failed(error.message) from error


def processes_of(setup: Setup) -> int:
    """The number of processes of its producers."""
    return min(setup.producers, PRODUCER_PROCESSES_MAX)


def buffer_bytes_of(setup: Setup) -> int:
    """The buffer of a producer: 1,000 chunks, as in the thesis, but at least those that it may have in flight.

    Many small chunks take longer to make than a round has: a larger buffer would never be full.
    """
    in_flight_bytes = (setup.requests_in_flight + 1) * max(setup.request_bytes, setup.chunk_bytes)
    most_bytes = BUFFERS_BYTES_MAX // setup.producers
    batches_bytes = 4 * setup.batch_records * RECORD_BYTES
    return max(in_flight_bytes, batches_bytes, min(BUFFER_CHUNKS * setup.chunk_bytes, BUFFER_BYTES_MAX, most_bytes))


def workload_of(setup: Setup, seconds: float, read_backlog_bytes: int = 0) -> Workload:
    """The setup as a workload of `bench.compare`."""
    processes = processes_of(setup)
    if setup.producers % processes:
        raise ValueError(f"{setup.producers} producers cannot share {processes} processes evenly")
    return Workload(
        name="point",
        title="a point of an experiment",
        record_bytes=RECORD_BYTES,
        streams=setup.streams,
        streamlets=setup.streamlets,
        producers=processes,
        clients=setup.producers // processes,
        consumers=0 if setup.consumer is None else 1,
        durability="replicated" if setup.replication else "leader",
        replicas=setup.replication,
        send=setup.send,
        keys=setup.keys,
        batch_records=setup.batch_records,
        read=setup.consumer or "push",
        batch_bytes=setup.chunk_bytes,
        rate=setup.rate,
        backlog_bytes=read_backlog_bytes,
        seconds=seconds,
        warm_up_seconds=WARM_UP_S,
    )


def sample_of(played: dict[str, Any]) -> Sample:
    """The figures of a round."""
    produced, consumed = played["produced"], played["consumed"]
    written_gb, read_gb = (found["bytes"] / 1e9 if found else 0.0 for found in (produced, consumed))
    cpu_s: dict[str, float] = played["cpu_s"]

    def per_gb(kind: str, size_gb: float) -> float:
        return sum(value for name, value in cpu_s.items() if name.startswith(kind)) / size_gb if size_gb else 0.0

    ack = Latencies()
    if "ack" in played["latencies"]:
        ack.add_encoded(played["latencies"]["ack"])
    return Sample(
        produced_mb_per_s=written_gb * 1e3 / produced["seconds"] if produced else 0.0,
        consumed_mb_per_s=read_gb * 1e3 / consumed["seconds"] if consumed else None,
        producers_s_per_gb=per_gb("producer", written_gb),
        brokers_s_per_gb=per_gb("broker", written_gb or read_gb),
        backups_s_per_gb=per_gb("backup", written_gb),
        consumers_s_per_gb=per_gb("consumer", read_gb),
        ack_p50_ms=ack.ms(50) if ack.count else None,
        ack_p99_ms=ack.ms(99) if ack.count else None,
        load=played["load"],
    )


@dataclasses.dataclass
class Measured:
    """The results of an experiment."""

    samples: dict[tuple[str, int], list[Sample]] = dataclasses.field(default_factory=dict)
    failures: dict[tuple[str, int], str] = dataclasses.field(default_factory=dict)


def measure(experiment: Experiment, *, rounds: int, seconds: float, folder: Path) -> Measured:
    """Run all rounds of all points."""
    found = Measured()
    points = sorted(experiment.points, key=lambda point: repr(point.setup.place))
    for place, group in itertools.groupby(points, key=lambda point: point.setup.place):
        here = list(group)
        say(f"{experiment.name}: {place.brokers} broker(s), {place.backups} backup(s), {len(here)} points")
        with site(place, folder) as cluster:
            for point in turns(here, rounds):
                key = (point.series, point.x)
                try:
                    sample = cluster.measure(point.setup, seconds=seconds)
                except Failed as error:
                    say(f"  {point.series}, {point.x}: failed: {error}")
                    found.failures[key] = str(error)
                    continue
                say(f"  {point.series}, {point.x}: {_words(sample)}")
                found.samples.setdefault(key, []).append(sample)
    return found


def turns(points: Sequence[Point], rounds: int) -> list[Point]:
    """Each point this often, in turn; points that keep their streams come after all others, as they need to be
    alone.
    """
    keeping = [point for point in points if point.setup.streams > REPLACED_STREAMS_MAX]
    others = [point for point in points if point not in keeping]
    return others * rounds + keeping * rounds


def _words(sample: Sample) -> str:
    words = f"{sample.produced_mb_per_s:,.0f} MB/s"
    if sample.consumed_mb_per_s is not None:
        words += f", consumed {sample.consumed_mb_per_s:,.0f}"
    return words
