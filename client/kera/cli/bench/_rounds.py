"""Rounds of a measurement: make streams, start workers together, aggregate their figures, delete streams.

Each round has new streams and new processes. It deletes its streams at the end, so that all rounds use the same memory
of the brokers. The clock starts after all preparations: connections, warm-up and, for `consume`, the records.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from kera.cli._run import extra, run_async
from kera.cli.bench._cpu import cpu_seconds
from kera.cli.bench._settings import BenchSettings, ConsumeSettings, arena_bytes_of, backup_memory_bytes_of
from kera.core.base.settings import MIB
from kera.core.base.sizes import format_size
from kera.core.base.spelling import plural

if TYPE_CHECKING:
    from kera.client import StreamConfig, StreamDescription

SEGMENT_BYTES = 8 * MIB


@dataclasses.dataclass
class Round:
    """Figures of one round."""

    records: int
    record_bytes: int
    seconds: float
    """Time from the first record to the last acknowledgement, or to the last arrival at the consumer."""
    producers_cpu_s: float
    consumers_cpu_s: float
    brokers_cpu_s: float | None
    """None: the brokers are not processes of this command."""
    chunks: int
    latencies: list[str]
    backups_cpu_s: float | None = None
    """None: there are no backups, or they are not processes of this command."""
    config: StreamConfig | None = None
    """Settings of the stream that was written to."""


@dataclasses.dataclass
class MeasuredCluster:
    """The cluster that is measured."""

    bootstrap: str
    broker_pids: list[int]
    """Empty for a cluster that was started elsewhere."""
    own: bool
    backup_pids: list[int] = dataclasses.field(default_factory=list)

    def cpu_seconds(self) -> tuple[float, float]:
        """Return the processor time of its brokers and of its backups so far."""
        return cpu_seconds(self.broker_pids), cpu_seconds(self.backup_pids)


def run(name: str, settings: BenchSettings) -> int:
    """Run ``kera bench <name>``."""
    # gRPC's support of forks has no use here, and logs a line for each process that starts while a client is connected.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    return run_async(_run(name, settings))


async def _run(name: str, settings: BenchSettings) -> int:
    from kera.cli.bench import _report

    reports = []
    async with _cluster(settings) as cluster:
        for record_bytes in settings.record_bytes:
            rounds = []
            for number in range(1, settings.rounds + 1):
                _say(f"{record_bytes} B records: round {number} of {settings.rounds}")
                rounds.append(await _round(name, settings, cluster, int(record_bytes)))
            report = _report.make(name, settings, cluster, int(record_bytes), rounds)
            print(_report.to_line(report), flush=True)
            reports.append(report)
    print(f"\n{_report.to_table(reports)}", file=sys.stderr)
    return 0


@contextlib.asynccontextmanager
async def _cluster(settings: BenchSettings) -> AsyncIterator[MeasuredCluster]:
    """Context manager that yields the cluster at `bootstrap`, or a temporary one with enough memory."""
    if settings.bootstrap is not None:
        yield MeasuredCluster(settings.bootstrap, [], own=False)
        return
    with extra("server"):
        from kera.local.cluster import LocalCluster

    arena_bytes = arena_bytes_of(settings, SEGMENT_BYTES)
    backup_memory_bytes = backup_memory_bytes_of(settings, SEGMENT_BYTES)
    what = f"{plural(settings.brokers, 'broker')} with {format_size(arena_bytes)} of shared memory each"
    if settings.backups:
        what += f", {plural(settings.backups, 'backup')} with {format_size(backup_memory_bytes)} each"
    _say(f"starting {what}")
    cluster = LocalCluster(
        brokers=settings.brokers,
        backups=settings.backups,
        arena_bytes=arena_bytes,
        backup_memory_bytes=backup_memory_bytes,
        segment_bytes=SEGMENT_BYTES,
    )
    async with cluster:
        brokers, backups = (
            [pid for name, pid in cluster.processes.items() if name.startswith(kind)] for kind in ("broker", "backup")
        )
        yield MeasuredCluster(cluster.bootstrap, brokers, own=True, backup_pids=backups)


async def _round(name: str, settings: BenchSettings, cluster: MeasuredCluster, record_bytes: int) -> Round:
    stream = f"kera-bench-{os.getpid()}"
    warm_up = stream + "-warm-up"
    async with _streams(settings, cluster.bootstrap, [stream, warm_up]) as config:
        tasks = _tasks(name, settings, cluster.bootstrap, record_bytes, stream, warm_up)
        measured = await (_consume_after if name == "consume" else _measure)(tasks, cluster)
    return dataclasses.replace(measured, config=config)


@contextlib.asynccontextmanager
async def _streams(settings: BenchSettings, bootstrap: str, names: Sequence[str]) -> AsyncIterator[StreamConfig]:
    """Context manager that creates streams with these names and the same settings, and deletes them at the end."""
    from kera.cli._client import connected

    async with connected(bootstrap) as client:
        made: list[StreamDescription] = []
        try:
            for name in names:
                stream = await client.admin.create_stream(
                    name,
                    streamlets=settings.streamlets,
                    entries=settings.entries,
                    codec=settings.codec,
                    replication=settings.replication,
                    virtual_logs=settings.virtual_logs,
                    durability=settings.durability,
                )
                made.append(stream)
            yield made[0].config
        finally:
            for stream in made:
                await client.admin.delete_stream(stream.name)


def _tasks(
    name: str, settings: BenchSettings, bootstrap: str, record_bytes: int, stream: str, warm_up: str
) -> list[Any]:
    """Return a task per producer and, except for `produce`, one for a consumer."""
    from kera.cli.bench._worker import Task

    records = settings.records_of(record_bytes)
    shared: dict[str, Any] = {
        "bootstrap": bootstrap,
        "stream": stream,
        "warm_up_stream": warm_up,
        "record_bytes": record_bytes,
        "transport": settings.transport,
    }
    filling = name == "consume"  # producers only fill the stream: as fast as they can, in full chunks
    tasks = [
        Task(
            role="produce",
            mode="send_batch" if filling else settings.mode,
            records=records // settings.producers + (number < records % settings.producers),
            seconds=None if filling else settings.seconds,
            rate=0 if filling else settings.rate / settings.producers,
            chunk_bytes=settings.chunk_bytes,
            producer_settings={
                "chunk_bytes_max": settings.chunk_bytes,
                "request_bytes_max": settings.request_bytes,
                "buffer_bytes_max": settings.buffer_bytes,
                "requests_in_flight_max": settings.requests_in_flight,
                "linger_ms": settings.linger_ms,
                "latency_target_ms": settings.latency_target_ms,
            },
            **shared,
        )
        for number in range(settings.producers)
    ]
    if isinstance(settings, ConsumeSettings):
        consumer_settings = {
            "shared_memory": settings.shared_memory,
            "verify_checksums": settings.verify_checksums,
        }
        tasks.append(Task(role="consume", mode=settings.read, consumer_settings=consumer_settings, **shared))
    return tasks


async def _measure(tasks: list[Any], cluster: MeasuredCluster) -> Round:
    """Measure producers, and consumers if there are any, at the same time."""
    from kera.cli.bench._processes import workers

    async with workers(tasks) as all_workers:
        producers = [worker for worker in all_workers if worker.task.role == "produce"]
        consumers = [worker for worker in all_workers if worker.task.role == "consume"]
        for group in (
            producers,
            consumers,
        ):  # in this order, as a consumer warms up with the records of the producers' warm-up
            await asyncio.gather(*(worker.ready() for worker in group))
        before_s = cluster.cpu_seconds()
        for worker in (*consumers, *producers):
            worker.go()
        produced = await asyncio.gather(*(worker.result() for worker in producers))
        total = sum(result.records for result in produced)
        for worker in consumers:
            worker.tell_total(total)
        consumed = await asyncio.gather(*(worker.result() for worker in consumers))
        after_s = cluster.cpu_seconds()
    return _put_together(produced, consumed, cluster, before_s, after_s)


async def _consume_after(tasks: list[Any], cluster: MeasuredCluster) -> Round:
    """Run the producers first, unmeasured; then measure the consumer."""
    from kera.cli.bench._processes import workers

    async with workers([task for task in tasks if task.role == "produce"]) as producers:
        await asyncio.gather(*(worker.ready() for worker in producers))
        for worker in producers:
            worker.go()
        produced = await asyncio.gather(*(worker.result() for worker in producers))
    async with workers([task for task in tasks if task.role == "consume"]) as consumers:
        await asyncio.gather(*(worker.ready() for worker in consumers))
        before_s = cluster.cpu_seconds()
        for worker in consumers:
            worker.go()
            worker.tell_total(sum(result.records for result in produced))
        consumed = await asyncio.gather(*(worker.result() for worker in consumers))
        after_s = cluster.cpu_seconds()
    for result in consumed:
        result.latencies = ""  # records that were written before have an age, and not a latency
    return _put_together([], consumed, cluster, before_s, after_s)


def _put_together(
    produced: Sequence[Any],
    consumed: Sequence[Any],
    cluster: MeasuredCluster,
    before_s: tuple[float, float],
    after_s: tuple[float, float],
) -> Round:
    seen = consumed or produced  # the last stage that was measured
    start_ns = min(result.start_ns for result in (*produced, *consumed))
    if produced:
        start_ns = min(result.start_ns for result in produced)
    end_ns = max(result.end_ns for result in seen)
    return Round(
        records=sum(result.records for result in seen),
        record_bytes=sum(result.record_bytes for result in seen),
        seconds=(end_ns - start_ns) / 1e9,
        producers_cpu_s=sum(result.cpu_s for result in produced),
        consumers_cpu_s=sum(result.cpu_s for result in consumed),
        brokers_cpu_s=after_s[0] - before_s[0] if cluster.own else None,
        backups_cpu_s=after_s[1] - before_s[1] if cluster.backup_pids else None,
        chunks=sum(result.chunks for result in consumed),
        latencies=[result.latencies for result in seen if result.latencies],
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
