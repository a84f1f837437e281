"""Micro-batches of Spark with ``latencyTarget`` and without: how long they take, and how late records are.

    python -m bench.spark_paced

A stream is written with a backlog of 10 M records; then a producer adds 5,000 a second, and when that has gone on for
half a minute behind the backlog, 50,000 a second. All that time a query reads the stream from its beginning, hashes
each value several times, so that a record costs about as much as in a small query of one's own, and hands it to the
sink ``noop``. Once without a target, once with one, on streams of their own, in turns; the first round of a query that
is not counted has warmed the code.

Reported per phase (backlog, slow, fast): how many micro-batches began in it, how long they took, and how late the
oldest record of each was when it was done. A micro-batch is of the backlog if its oldest record is; of the first three
of those only the number counts, as the planner learns from them. Checked: each
record comes once. ``drained`` is the rate over the backlog, until the first micro-batch that has nothing of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime as dt
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.query import StreamingQuery

from bench.common import Figures, alternating, broker, directory, parser, say
from bench.spark_engines import session
from bench.spark_read import Wrong
from kera.cli.bench._payload import make_batch
from kera.client import Client
from kera.core.base.settings import MIB
from kera.core.format.schema import DEFAULT_SCHEMA

RECORD_BYTES = 100
STORED_BYTES = 128
"""Maximum size of a record, with its part of the chunk."""
FILL_ROWS = 2_000
TICK_S = 0.02
STREAMLETS = 4
WAIT_S = 600.0
QUERIES = ("plain", "paced")
PHASES = ("backlog", "slow", "fast")


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch that took records; times in seconds of the wall clock."""

    begun_s: float
    taken_s: float
    records: int
    oldest_s: float

    @property
    def done_s(self) -> float:
        """The time of its end."""
        return self.begun_s + self.taken_s

    @property
    def late_s(self) -> float:
        """The age of its oldest record at its end."""
        return self.done_s - self.oldest_s


class Feeder:
    """Adds records at a variable rate, from a thread of its own."""

    def __init__(self, bootstrap: str, stream: str) -> None:
        self.rate = 0
        self.sent = 0
        self.failed: BaseException | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(bootstrap, stream), daemon=True)

    @contextlib.contextmanager
    def running(self) -> Iterator[Feeder]:
        """Feed until the block ends, and everything is sent."""
        self._thread.start()
        try:
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop feeding; all records have been acknowledged then."""
        self._stopped.set()
        self._thread.join()
        if self.failed is not None:
            raise self.failed

    def _run(self, bootstrap: str, stream: str) -> None:
        try:
            asyncio.run(self._feed(bootstrap, stream))
        except BaseException as error:  # noqa: BLE001 - raised where the caller waits for it
            self.failed = error

    async def _feed(self, bootstrap: str, stream: str) -> None:
        async with await Client.connect(bootstrap) as client, client.producer(payload="lean") as producer:
            owed, last_s = 0.0, time.monotonic()
            while not self._stopped.is_set():
                now_s = time.monotonic()
                owed, last_s = owed + self.rate * (now_s - last_s), now_s
                if (rows := int(owed)) > 0:
                    await producer.send_batch(stream, _stamped(rows))
                    owed -= rows
                    self.sent += rows
                await asyncio.sleep(TICK_S)
            await producer.flush()


def _stamped(rows: int, at_us: int | None = None) -> pa.RecordBatch:
    batch = make_batch(RECORD_BYTES, rows)
    stamps = pa.array(np.full(rows, time.time_ns() // 1000 if at_us is None else at_us))
    index = DEFAULT_SCHEMA.get_field_index("timestamp")
    return batch.set_column(index, DEFAULT_SCHEMA.field(index), stamps.cast(DEFAULT_SCHEMA.field(index).type))


async def fill(bootstrap: str, stream: str, records: int) -> None:
    """Make the stream, with a backlog."""
    async with await Client.connect(bootstrap) as client:
        await client.admin.create_stream(stream, streamlets=STREAMLETS)
        batch = _stamped(FILL_ROWS)
        async with client.producer(payload="lean") as producer:
            for _ in range(records // FILL_ROWS):
                await producer.send_batch(stream, batch)
            await producer.flush()


async def remove(bootstrap: str, stream: str) -> None:
    """Delete the stream to make room."""
    async with await Client.connect(bootstrap) as client:
        await client.admin.delete_stream(stream)


def start(
    spark: SparkSession, bootstrap: str, stream: str, root: Path, arguments: argparse.Namespace, *, paced: bool
) -> StreamingQuery:
    """Start the query; its progress has its figures."""
    reader = spark.readStream.format("kera").option("kera.bootstrap.servers", bootstrap)
    reader = reader.option("engine", arguments.engine).option("startingOffsets", "earliest")
    if paced:
        reader = reader.option("latencyTarget", f"{round(arguments.target * 1000)}ms")
    value = sf.col("value")
    for _ in range(arguments.hashes):
        value = sf.sha2(value, 256).cast("binary")
    seen = reader.load(stream).select(value.alias("value"), "timestamp")
    seen = seen.observe(
        "seen", sf.unix_micros(sf.min("timestamp")).alias("oldest_us"), sf.count(sf.lit(1)).alias("records")
    )
    writer = seen.writeStream.format("noop").option("checkpointLocation", str(root / f"checkpoint-{stream}"))
    return writer.start()


def micro_batches(query: StreamingQuery) -> list[MicroBatch]:
    """All micro-batches so far that took records."""
    found = []
    for progress in query.recentProgress:
        said: dict[str, Any] = json.loads(progress.json)
        seen = said.get("observedMetrics", {}).get("seen", {})
        if not said["numInputRows"] or not seen.get("records"):
            continue
        found.append(
            MicroBatch(
                begun_s=dt.datetime.fromisoformat(said["timestamp"]).timestamp(),
                taken_s=said["durationMs"]["triggerExecution"] / 1000,
                records=int(seen["records"]),
                oldest_s=int(seen["oldest_us"]) / 1e6,
            )
        )
    return found


def wait(query: StreamingQuery, records: int) -> None:
    """Wait until the query has read this many records."""
    until_s = time.monotonic() + WAIT_S
    while sum(each.records for each in micro_batches(query)) < records:
        if query.exception() is not None or time.monotonic() > until_s:
            raise Wrong(f"{query.exception() or 'it takes too long'}")
        time.sleep(0.1)


class Paced:
    """The measurement, with everything started."""

    def __init__(
        self, arguments: argparse.Namespace, figures: Figures, spark: SparkSession, bootstrap: str, root: Path
    ) -> None:
        self._arguments = arguments
        self._figures = figures
        self._spark = spark
        self._bootstrap = bootstrap
        self._root = root

    def run(self) -> None:
        """Run all queries and rounds."""
        self._round("plain", "warm", counts=False)
        for number, name in enumerate(alternating(QUERIES, self._arguments.rounds)):
            say(f"{name}, round {number // len(QUERIES) + 1}")
            self._round(name, f"{name}-{number}", counts=True)

    def _round(self, name: str, stream: str, *, counts: bool) -> None:
        arguments = self._arguments
        backlog = arguments.backlog // (1 if counts else 10) // FILL_ROWS * FILL_ROWS
        seconds = arguments.seconds if counts else 2.0
        asyncio.run(fill(self._bootstrap, stream, backlog))
        with Feeder(self._bootstrap, stream).running() as feeder:
            feeder.rate = arguments.slow
            begun_s = time.time()
            query = start(self._spark, self._bootstrap, stream, self._root, arguments, paced=name == "paced")
            try:
                wait(query, backlog)
                slow_s = time.time()
                time.sleep(seconds)
                feeder.rate, fast_s = arguments.fast, time.time()
                time.sleep(seconds)
                feeder.stop()
                wait(query, backlog + feeder.sent)
            finally:
                query.stop()
        found = micro_batches(query)
        total = sum(each.records for each in found)
        if total != backlog + feeder.sent:
            raise Wrong(f"{name}: {total:,} records came, {backlog + feeder.sent:,} were sent")
        asyncio.run(remove(self._bootstrap, stream))
        say(
            "  thousand records in s: "
            + ", ".join(f"{each.records / 1000:.0f} in {each.taken_s:.2f}" for each in found)
        )
        if counts:
            of_backlog = [each for each in found if each.oldest_s < begun_s]
            self._add(name, "backlog", of_backlog)
            self._figures.add(f"{name}, drained", _rate(of_backlog), "records/s")
            behind = found[len(of_backlog) :]
            self._add(name, "slow", [each for each in behind if slow_s < each.begun_s < fast_s])
            self._add(name, "fast", [each for each in behind if each.begun_s >= fast_s])

    def _add(self, name: str, phase: str, found: list[MicroBatch]) -> None:
        if not found:
            raise Wrong(f"{name}: no micro-batch at all in phase {phase}")
        settled, target_s = found[3:] if phase == "backlog" and len(found) > 3 else found, self._arguments.target
        for what, value, unit in (
            ("micro-batches", len(found), ""),
            ("duration, median", statistics.median(each.taken_s for each in settled), "s"),
            ("duration, longest", max(each.taken_s for each in settled), "s"),
            ("late, median", statistics.median(each.late_s for each in settled), "s"),
            ("late, latest", max(each.late_s for each in settled), "s"),
            ("duration within the target", _share([each.taken_s <= target_s for each in settled]), "%"),
            ("in time", _share([each.late_s <= target_s for each in settled]), "%"),
        ):
            self._figures.add(f"{name}, {phase}, {what}", value, unit)


def _share(of: list[bool]) -> float:
    return 100 * sum(of) / len(of)


def _rate(found: list[MicroBatch]) -> float:
    return sum(each.records for each in found) / (found[-1].done_s - found[0].begun_s)


def print_table(figures: Figures) -> None:
    """Both queries, phase by phase, in Markdown; then all samples as JSON."""
    print("| | without | with a target |\n|---|--:|--:|")
    for what in dict.fromkeys(name.split(", ", 1)[1] for name in figures.names):
        unit = figures.unit(f"plain, {what}")
        print(f"| {what} {unit} | {figures.cell(f'plain, {what}')} | {figures.cell(f'paced, {what}')} |")
    print(f"\ndrained: {figures.median('paced, drained') / figures.median('plain, drained'):.0%} of full speed")
    least = figures.median("paced, slow, micro-batches") / figures.median("plain, slow, micro-batches")
    print(f"slow: {least:.0%} of the micro-batches")
    print("\n" + figures.json(), flush=True)


async def run(arguments: argparse.Namespace, root: Path) -> None:
    """Write, read, and print."""
    figures = Figures("spark_paced", arguments, root)
    most = arguments.backlog + (arguments.slow * (WAIT_S / 10) + arguments.fast * arguments.seconds)
    arena_bytes = (int(most) * STORED_BYTES * 2 // (8 * MIB) + 16) * 8 * MIB
    async with broker(None, arena_bytes=arena_bytes, segment_bytes=8 * MIB) as made:
        spark = await asyncio.to_thread(session, 2, root, (), columnar=arguments.engine == "columnar")
        try:
            spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", "100000")
            await asyncio.to_thread(Paced(arguments, figures, spark, made.cluster.bootstrap, root).run)
        finally:
            spark.stop()
    print_table(figures)


def main() -> int:
    """Measure as the command line says."""
    made = parser(__doc__)
    made.add_argument("--backlog", type=int, default=10_000_000, help="records")
    made.add_argument("--slow", type=int, default=5_000, help="records a second")
    made.add_argument("--fast", type=int, default=50_000, help="records a second")
    made.add_argument("--seconds", type=float, default=30.0, help="of each of the two rates")
    made.add_argument("--target", type=float, default=2.0, help="seconds")
    made.add_argument("--hashes", type=int, default=4, help="of each value, one after the other")
    made.add_argument("--engine", choices=("columnar", "python"), default="columnar")
    made.add_argument("--rounds", type=int, default=2)
    arguments = made.parse_args()
    with directory(arguments) as root:
        asyncio.run(run(arguments, root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
