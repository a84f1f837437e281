"""A steady load for half an hour: does anything get slower, or grow?

First the machine's capacity is measured for some seconds, with a consumer behind the producer. Then a share of it
(``--load``) is held: a producer sends records of 100 bytes in batches, a consumer with push keeps up, and with
``--backups`` each chunk is on this many backups, too. The broker's log stays in its memory, bounded by retention, and
flushes are put off: half an hour of it would fill a disk, and measure that. Every few seconds is recorded:

* the time to acknowledgement, and to the consumer, from when a batch was due, not from when it was sent (HDR
  histograms, without coordinated omission); how late the producer itself was;
* of each process: its own memory and the shared one apart, processor time, file descriptors, threads.

At the end the first five minutes are compared with the last five (of a short run, its first and its last third). Exit
code 1 when latencies, memory, processor time, descriptors or threads have drifted beyond the thresholds, the rate was
not held, or a record is missing. Writes JSON, a page, and a plot.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import IN_MEMORY, describe, directory, machine, parser, say, size
from bench.compare.contestant import Command, Failed, Role
from bench.compare.processes import Process as WorkerProcess
from bench.compare.rounds import until_seen
from bench.compare.worker import Result, Task
from bench.compare.workload import Workload
from bench.soak_worker import Interval
from kera.cli.bench._cpu import cpu_seconds
from kera.cli.bench._latency import Latencies
from kera.client import Client
from kera.core.base.settings import GIB, KIB, MIB
from kera.local.cluster import LocalCluster

RECORD_BYTES = 100
SEGMENT_BYTES = 8 * MIB
STREAM = "soak"
WINDOW_S = 300.0
INTERVALS_MIN = 12
NOTHING = {"p99": float("inf")}
"""Stands for an interval without an acknowledged or seen record."""
PERCENTILES = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9, "max": 100.0}
TALK_TIMEOUT_S = 60.0
LEAD_NS = 200_000_000
"""The time between the order to begin and the beginning of the measurement."""


# -- figures ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Process:
    """A process at one moment."""

    anon_bytes: int
    """Its own memory."""
    shmem_bytes: int
    """The shared memory that it has touched: at most the arena."""
    descriptors: int
    threads: int
    cpu_s: float
    """Processor time so far."""

    @classmethod
    def of(cls, pid: int) -> Process:
        """The current state of a process. Raises `OSError` if the process is gone."""
        rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return cls(
            anon_bytes=int(rows["RssAnon"].split()[0]) << 10,
            shmem_bytes=int(rows["RssShmem"].split()[0]) << 10,
            descriptors=sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
            threads=int(rows["Threads"]),
            cpu_s=cpu_seconds([pid]),
        )


@dataclasses.dataclass(frozen=True)
class Row:
    """An interval: its figures of clients, and the processes at its end."""

    number: int
    acknowledged: int
    seen: int
    latencies: Mapping[str, Mapping[str, float]]
    """Milliseconds of ack, end_to_end and late, by percentile."""
    processes: Mapping[str, Process]


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """The thresholds of drift, from the first window to the last one."""

    p99_ratio_max: float = 1.5
    p99_slack_ms: float = 1.0
    """A p99 up to this is allowed, whatever the ratio says: below it, changes are noise."""
    growth_bytes_max: int = 16 * MIB
    growth_ratio_max: float = 0.05
    """Allowed growth of a process's own memory: bytes, and a share of the first window; the greater one applies."""
    cpu_ratio_max: float = 1.25
    cpu_slack_cores: float = 0.02
    descriptors_max: int = 8
    threads_max: int = 4
    rate_share_min: float = 0.99
    """Share of the intended rate."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One comparison."""

    what: str
    first: float
    last: float
    unit: str
    allowed: str
    ok: bool


def windows(rows: Sequence[Row], interval_s: float, window_s: float = WINDOW_S) -> tuple[list[Row], list[Row]]:
    """The first and the last `window_s`, or thirds. The very first interval warms up and does not count."""
    useful = list(rows[1:]) if len(rows) > 1 else list(rows)
    count = max(1, min(int(window_s / interval_s), len(useful) // 3))
    return useful[:count], useful[-count:]


def compare(first: Sequence[Row], last: Sequence[Row], interval_s: float, limits: Thresholds) -> list[Finding]:
    """The findings between two windows. For latencies, the median of the intervals counts."""
    found = []
    for name in ("ack", "end_to_end"):
        before, after = (
            statistics.median(row.latencies.get(name, NOTHING)["p99"] for row in rows) for rows in (first, last)
        )
        allowed = max(before * limits.p99_ratio_max, limits.p99_slack_ms)
        found.append(
            Finding(f"{name.replace('_', ' ')}, p99", before, after, "ms", f"≤ {allowed:.3g}", after <= allowed)
        )
    for process in sorted(first[0].processes):
        found += _of_process(process, first, last, interval_s, limits)
    return found


def _of_process(
    process: str, first: Sequence[Row], last: Sequence[Row], interval_s: float, limits: Thresholds
) -> list[Finding]:
    def median(rows: Sequence[Row], field: str) -> float:
        return float(statistics.median(getattr(row.processes[process], field) for row in rows))

    found = []
    before, after = median(first, "anon_bytes"), median(last, "anon_bytes")
    allowed = before + max(limits.growth_bytes_max, before * limits.growth_ratio_max)
    found.append(
        Finding(f"{process}: own memory", before / MIB, after / MIB, "MiB", f"≤ {allowed / MIB:.0f}", after <= allowed)
    )
    for field, most in (("descriptors", limits.descriptors_max), ("threads", limits.threads_max)):
        before, after = median(first, field), median(last, field)
        found.append(
            Finding(f"{process}: {field}", before, after, "", f"≤ {before + most:.0f}", after <= before + most)
        )
    before, after = (cores_of(process, rows, interval_s) for rows in (first, last))
    allowed = max(before * limits.cpu_ratio_max, before + limits.cpu_slack_cores)
    found.append(Finding(f"{process}: processor", before, after, "cores", f"≤ {allowed:.2f}", after <= allowed))
    return found


def cores_of(process: str, rows: Sequence[Row], interval_s: float) -> float:
    """The number of cores that a process used in a window; unknown for a single interval."""
    if len(rows) < 2:
        return 0.0
    cpu_s = rows[-1].processes[process].cpu_s - rows[0].processes[process].cpu_s
    return cpu_s / ((rows[-1].number - rows[0].number) * interval_s)


def totals(
    rows: Sequence[Row], rate: float, interval_s: float, acknowledged: int, seen: int, limits: Thresholds
) -> list[Finding]:
    """Check that the rate was held, and that everything has arrived."""
    held = statistics.fmean(row.acknowledged for row in rows[1:] or rows) / interval_s
    least = rate * limits.rate_share_min
    return [
        Finding("rate held", rate / 1e6, held / 1e6, "M records/s", f"≥ {least / 1e6:.3g}", held >= least),
        Finding("acknowledged, and seen by the consumer", acknowledged, seen, "records", "equal", acknowledged == seen),
    ]


# -- workers ---------------------------------------------------------------------------------------------------


class Worker:
    """A producer or the consumer, from here."""

    def __init__(self, task: Task, folder: Path) -> None:
        self.intervals: dict[int, Interval] = {}
        self.process = WorkerProcess(
            task, Command([sys.executable, "-m", "bench.soak_worker"]), folder / f"{task.role}-{task.index}.log"
        )

    def finished(self) -> Result:
        """Take its output until it is done. Raises `Failed`."""
        timeout_s = self.process.task.settings["interval_s"] + TALK_TIMEOUT_S
        while "number" in (message := self.process.answer(timeout_s)):
            interval = Interval(**message)
            self.intervals[interval.number] = interval
        return Result(**message)


@contextlib.contextmanager
def workers(
    arguments: argparse.Namespace, bootstrap: str, stream: str, *, rate: float, seconds: float
) -> Iterator[tuple[list[Worker], Worker]]:
    """Producers and the consumer, ready; they are gone at the end."""
    workload = Workload(
        name="soak",
        title="Soak",
        record_bytes=RECORD_BYTES,
        producers=arguments.producers,
        consumers=1,
        rate=rate,
        batch_bytes=arguments.chunk_bytes,
        seconds=seconds,
    )
    settings = {"bootstrap": bootstrap, "stream": stream, "interval_s": arguments.interval}

    def task(role: Role, index: int) -> Task:
        return Task(role=role, index=index, workload=workload, settings=settings)

    with directory(arguments) as folder, contextlib.ExitStack() as stack:
        made = []
        for each in (*(task("produce", index) for index in range(arguments.producers)), task("consume", 0)):
            made.append(Worker(each, folder))
            stack.callback(made[-1].process.end)
        for worker in made:
            worker.process.answer(TALK_TIMEOUT_S)
        yield made[:-1], made[-1]


async def load(producers: Sequence[Worker], consumer: Worker, start_ns: int) -> tuple[list[Result], Result]:
    """Let them run to their end, the consumer until it has everything or sees nothing more. Raises `Failed`."""
    for worker in (consumer, *producers):
        worker.process.tell(f"go {start_ns}")
    try:
        async with asyncio.TaskGroup() as tasks:  # the first failure ends everything
            consumed = tasks.create_task(asyncio.to_thread(consumer.finished))
            produced = await asyncio.gather(*(asyncio.to_thread(worker.finished) for worker in producers))
            acknowledged = sum(result.acknowledged for result in produced)
            await asyncio.to_thread(until_seen, [consumer.process], acknowledged, TALK_TIMEOUT_S)
            consumer.process.tell("stop")
    except* Failed as errors:
        raise Failed(str(errors.exceptions[0])) from errors
    return produced, consumed.result()


# -- the soak ----------------------------------------------------------------------------------------------------


class Soak:
    """One run of the soak."""

    def __init__(self, arguments: argparse.Namespace, cluster: LocalCluster, client: Client) -> None:
        self._arguments = arguments
        self._cluster = cluster
        self._client = client
        self.samples: dict[int, dict[str, Process]] = {}

    async def most(self) -> float:
        """Records per second that reach the consumer at full speed."""
        seconds: float = self._arguments.max_seconds
        async with self._stream("most") as stream:
            with self._workers(stream, 0, seconds) as (producers, consumer):
                _, consumed = await load(producers, consumer, _soon_ns())
        return consumed.records / seconds

    async def hold(self, rate: float) -> tuple[list[Row], int, int]:
        """Hold a rate for the requested time. Returns the rows, and the numbers of records acknowledged and seen."""
        async with self._stream(STREAM) as stream:
            with self._workers(stream, rate, self._arguments.minutes * 60) as (producers, consumer):
                everyone = [worker.process for worker in (*producers, consumer)]
                pids = {**self._cluster.processes, **{process.name: process.pid for process in everyone}}
                start_ns = _soon_ns()
                sampling = asyncio.create_task(self._sample(pids, start_ns))
                try:
                    produced, consumed = await load(producers, consumer, start_ns)
                finally:
                    sampling.cancel()
        rows = rows_of(producers, consumer, self.samples)
        return rows, sum(result.acknowledged for result in produced), consumed.seen

    async def _sample(self, pids: Mapping[str, int], start_ns: int) -> None:
        interval_s: float = self._arguments.interval
        number = 0
        while True:
            due_ns = start_ns + int((number + 1) * interval_s * 1e9)
            await asyncio.sleep((due_ns - time.monotonic_ns()) / 1e9)
            with contextlib.suppress(OSError):  # at the end workers go
                self.samples[number] = {name: Process.of(pid) for name, pid in pids.items()}
            number += 1
            if number * interval_s % 60 < interval_s:
                say(f"{number * interval_s / 60:.0f} of {self._arguments.minutes:g} minutes")

    @contextlib.asynccontextmanager
    async def _stream(self, name: str) -> AsyncIterator[str]:
        kept_bytes = self._arguments.arena_bytes // 3
        await self._client.admin.create_stream(name, replication=self._arguments.backups, retention_bytes=kept_bytes)
        yield name
        await self._client.admin.delete_stream(name)

    def _workers(
        self, stream: str, rate: float, seconds: float
    ) -> contextlib.AbstractContextManager[tuple[list[Worker], Worker]]:
        return workers(self._arguments, self._cluster.bootstrap, stream, rate=rate, seconds=seconds)


def _soon_ns() -> int:
    return time.monotonic_ns() + LEAD_NS


def rows_of(producers: Sequence[Worker], consumer: Worker, samples: Mapping[int, Mapping[str, Process]]) -> list[Row]:
    """The rows of intervals that all workers know; other intervals are left out."""
    rows = []
    for number, processes in sorted(samples.items()):
        parts = [worker.intervals.get(number) for worker in (*producers, consumer)]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            continue
        merged: dict[str, Latencies] = {}
        for part in known:
            for name, text in part.latencies.items():
                merged.setdefault(name, Latencies()).add_encoded(text)
        times = {
            name: {label: each.ms(percentile) for label, percentile in PERCENTILES.items()}
            for name, each in merged.items()
        }
        rows.append(Row(number, sum(part.records for part in known[:-1]), known[-1].records, times, processes))
    return rows


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, and judge the drift."""
    limits = Thresholds(p99_ratio_max=arguments.p99_ratio_max, growth_bytes_max=arguments.growth_bytes_max)
    found_machine = machine(Path.cwd())
    made = LocalCluster(
        backups=arguments.backups,
        arena_bytes=arguments.arena_bytes,
        backup_memory_bytes=arguments.arena_bytes,
        segment_bytes=SEGMENT_BYTES,
        broker_settings=IN_MEMORY,
        backup_settings=IN_MEMORY,
    )
    async with made as cluster, await Client.connect(cluster.bootstrap) as client:
        soak = Soak(arguments, cluster, client)
        say(f"as fast as it goes, for {arguments.max_seconds:g} s")
        most = await soak.most()
        rate: float = most * arguments.load
        say(f"{most * RECORD_BYTES / 1e6:,.0f} MB/s; holding {arguments.load:.0%} of it, {rate:,.0f} records/s")
        rows, acknowledged, seen = await soak.hold(rate)
    if len(rows) < INTERVALS_MIN // 2:
        raise Failed(f"only {len(rows)} intervals are known of all processes: too few to compare")
    first, last = windows(rows, arguments.interval)
    findings = [
        *totals(rows, rate, arguments.interval, acknowledged, seen, limits),
        *compare(first, last, arguments.interval, limits),
    ]
    return {
        "bench": "soak",
        "machine": found_machine,
        "minutes": arguments.minutes,
        "interval_s": arguments.interval,
        "load": arguments.load,
        "backups": arguments.backups,
        "producers": arguments.producers,
        "chunk_bytes": arguments.chunk_bytes,
        "most_records_per_s": most,
        "rate": rate,
        "window_s": len(first) * arguments.interval,
        "thresholds": dataclasses.asdict(limits),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "ok": all(finding.ok for finding in findings),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


# -- report ------------------------------------------------------------------------------------------------


def page(found: Mapping[str, Any]) -> str:
    """The page, as Markdown."""
    verdict = "nothing has drifted" if found["ok"] else "**something has drifted**"
    rate = found["rate"]
    load = (
        f"{rate / 1e6:.2f} M records/s of {RECORD_BYTES} bytes ({rate * RECORD_BYTES / 1e6:,.0f} MB/s), by"
        f" {found['producers']} producer(s), in chunks of {found['chunk_bytes'] >> 10} KiB;"
        f" {found['backups']} backup(s); one consumer that is pushed to."
        f" Compared are the first and the last {found['window_s']:g} s."
    )
    lines = [
        f"# Soak: {found['minutes']:g} minutes at {found['load']:.0%} of the maximum",
        "",
        f"Verdict: {verdict}. {load}",
        "",
        describe(dict(found["machine"])),
        "",
        "![latency, processor, memory, descriptors over time](soak.png)",
        "",
        "| what | first | last | unit | allowed | |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {finding['what']} | {_short(finding['first'])} | {_short(finding['last'])} | {finding['unit']} |"
        f" {finding['allowed']} | {'ok' if finding['ok'] else '**drift**'} |"
        for finding in found["findings"]
    ]
    return "\n".join(lines) + "\n"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main() -> int:
    """Run the soak."""
    made = parser(__doc__)
    made.add_argument("--minutes", type=float, default=30.0)
    made.add_argument("--load", type=float, default=0.7, help="share of the maximum that is held")
    made.add_argument("--backups", type=int, default=0, help="how many have each chunk, too")
    made.add_argument("--producers", type=int, default=1)
    made.add_argument("--chunk-bytes", type=size, default=256 * KIB)
    made.add_argument("--arena-bytes", type=size, default=6 * GIB, help="of the broker, and of each backup")
    made.add_argument("--interval", type=float, default=10.0, metavar="SECONDS", help="between two samples")
    made.add_argument("--max-seconds", type=float, default=10.0, help="for which the maximum is measured")
    made.add_argument("--p99-ratio-max", type=float, default=Thresholds.p99_ratio_max)
    made.add_argument("--growth-bytes-max", type=size, default=Thresholds.growth_bytes_max)
    made.add_argument("--out", type=Path, default=Path("bench/results/soak"), help="where the results go")
    arguments = made.parse_args()
    # A short run has some intervals, too.
    arguments.interval = min(arguments.interval, arguments.minutes * 60 / INTERVALS_MIN)
    try:
        found = asyncio.run(run(arguments))
    except Failed as error:
        say(f"the soak has failed: {error}")
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "soak.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    (arguments.out / "README.md").write_text(text := page(found), encoding="utf-8")
    plot(found, arguments.out / "soak.png")
    print(text)
    return 0 if found["ok"] else 1


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Latencies, processor, memory and descriptors over time."""
    from bench.soak_plot import plot as draw  # noqa: PLC0415 - matplotlib is wanted at the end only

    draw(found, path)


if __name__ == "__main__":
    sys.exit(main())
