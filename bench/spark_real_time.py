"""Spark's real-time mode: how long a record takes from when it was due until a sink in the JVM has it.

    python -m bench.spark_real_time

KerA with the columnar engine, and Kafka with Spark's own source, in one session and in turns; brokers and producers are
those of `bench.spark_engines`, and a round before is not counted. A producer sends 1,000 records per second, each with
the time when it was due. A query in real-time mode hands each to a `ForeachWriter` in Java (``DueSink.java``), which
notes when it came: no Python on the way. Checked: each record comes exactly once.

Reported: p50, p99 and the longest time of all records after the warm-up. And apart: of the records that were due while
the query stood still between two micro-batches, which are those due after the last one of a task had come and before
its next first one; and of the rest. Then how long a task stands still between two micro-batches, and what of that the
query's progress tells.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyspark
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from bench import kafka
from bench.common import Figures, alternating, directory, machine, parser, say
from bench.common import describe as describe_machine
from bench.due import DIGITS
from bench.spark_engines import DRAIN_S, PARTITIONS, PRODUCER_START_S, Bench, Contestant, session
from bench.spark_read import Wrong
from kera.core.base.settings import MIB
from kera.local.cluster import LocalCluster

SINK = Path(__file__).with_name("DueSink.java")
CONTESTANTS = ("columnar", "kafka")
ARENA_BYTES = 256 * MIB
START_S = 60.0
"""The time limit until a query has its tasks running."""
HEAD = 2
"""Longs at the beginning of a task's file: the times of its opening and closing."""
PARTS = ("all", "between micro-batches", "the rest")
OWN = ("latestOffset", "queryPlanning", "walCommit", "commitOffsets", "commitBatch")
"""Names of a query's progress for the time outside tasks."""


@dataclass(frozen=True)
class Task:
    """The times of one task of a micro-batch, in microseconds of the wall clock."""

    epoch: int
    partition: int
    opened_us: int
    closed_us: int
    """0: the task is not closed yet."""
    due_us: npt.NDArray[np.int64]
    came_us: npt.NDArray[np.int64]


def tasks(folder: Path) -> list[Task]:
    """All tasks so far, ordered within each partition."""
    found = []
    for path in folder.iterdir():
        epoch, partition = map(int, path.name.split("-"))
        longs = np.fromfile(path, np.int64)
        if len(longs) < HEAD or longs[0] == 0:
            continue  # the file is still being made
        due_us, came_us = longs[HEAD::2], longs[HEAD + 1 :: 2]
        count = int(np.count_nonzero(came_us))
        found.append(Task(epoch, partition, int(longs[0]), int(longs[1]), due_us[:count], came_us[:count]))
    return sorted(found, key=lambda task: (task.partition, task.epoch))


def waited(found: Sequence[Task]) -> npt.NDArray[np.bool_]:
    """For each record of `found`, whether it was due while its task stood still between two micro-batches."""
    parts = []
    for before, task in zip((None, *found), found, strict=False):
        follows = before is not None and before.partition == task.partition and len(task.came_us) > 0
        parts.append(task.due_us <= task.came_us[0] if follows else np.zeros(len(task.due_us), bool))
    return np.concatenate(parts)


def stills_ms(found: Sequence[Task], from_us: int) -> list[float]:
    """How long tasks stood still, from the end of one until the start of the next one of its partition."""
    return [
        (after.opened_us - before.closed_us) / 1e3
        for before, after in pairwise(found)
        if before.partition == after.partition and before.closed_us >= from_us
    ]


class RealTime:
    """The measurement, with everything started."""

    def __init__(
        self, arguments: argparse.Namespace, figures: Figures, spark: SparkSession, bench: Bench, root: Path
    ) -> None:
        self._arguments = arguments
        self._figures = figures
        self._spark = spark
        self._bench = bench
        self._root = root

    def run(self) -> None:
        """Run all contestants and rounds."""
        by_name = {each.name: each for each in self._bench.contestants}
        for number, name in enumerate(alternating(list(by_name), self._arguments.rounds + 1)):
            counts = number >= len(by_name)  # the code is warm
            say(f"real-time mode: {name}" + ", to warm up" * (not counts))
            seconds = self._arguments.seconds if counts else self._arguments.warm_up
            self._round(by_name[name], f"due-{number}", seconds, counts=counts)

    def _round(self, contestant: Contestant, stream: str, seconds: float, *, counts: bool) -> None:
        folder = self._root / stream
        folder.mkdir()
        self._bench.create(stream, contestant)
        query = self._query(contestant, stream, folder)
        try:
            with self._bench.producer(contestant, stream, self._arguments.warm_up + seconds) as producer:
                _wait(query, lambda: len(tasks(folder)) >= PARTITIONS, START_S)
                producer.go()
                sent, late_s = producer.result(self._arguments.warm_up + seconds + PRODUCER_START_S)
            _wait(query, lambda: sum(len(task.due_us) for task in tasks(folder)) >= sent, DRAIN_S)
            progresses = [json.loads(progress.json) for progress in query.recentProgress]
        finally:
            query.stop()
        found = tasks(folder)
        due_us = np.concatenate([task.due_us for task in found])
        if len(due_us) != sent or len(np.unique(due_us)) != sent:
            raise Wrong(f"{contestant.name}: {len(due_us)} records came, {len(np.unique(due_us))} different of {sent}")
        if counts:
            self._add(contestant.name, found, progresses, late_s)

    def _query(self, contestant: Contestant, stream: str, folder: Path) -> StreamingQuery:
        due_us = sf.substring("value", 1, DIGITS).cast("string").cast("long")
        frame = contestant.load(self._spark.readStream, stream).select(due_us)
        trigger = f"{self._arguments.batch_seconds} seconds"
        writer: DataStreamWriter = frame.writeStream.outputMode("update")
        writer = writer.trigger(realTime=trigger)  # type: ignore[call-overload]  # not in its overloads
        rows_max = 2 * self._arguments.rate * (self._arguments.batch_seconds + int(DRAIN_S))
        jvm = self._spark._jvm
        assert jvm is not None  # noqa: S101 - a session in this process has one
        writer._jwrite.foreach(jvm.DueSink(str(folder), rows_max))
        query: StreamingQuery = writer.option("checkpointLocation", str(self._root / f"checkpoint-{stream}")).start()
        return query

    def _add(self, name: str, found: Sequence[Task], progresses: list[dict[str, Any]], late_s: float) -> None:
        due_us = np.concatenate([task.due_us for task in found])
        late_ms = (np.concatenate([task.came_us for task in found]) - due_us) / 1e3
        from_us = int(due_us.min() + self._arguments.warm_up * 1e6)
        counts, between = due_us >= from_us, waited(found)
        for part, chosen in zip(PARTS, (counts, counts & between, counts & ~between), strict=True):
            if not chosen.any():
                raise Wrong(f"{name}: no records {part}; more --seconds are needed")
            some_ms = late_ms[chosen]
            values = (np.percentile(some_ms, 50), np.percentile(some_ms, 99), some_ms.max())
            say(f"  {part}: {len(some_ms)} records, p50 / p99 / max " + " / ".join(f"{value:.1f}" for value in values))
            self._figures.add(f"{name}, {part}: records", len(some_ms), "")
            for what, value in zip(("p50", "p99", "max"), values, strict=True):
                self._figures.add(f"{name}, {part}: {what}", float(value), "ms")
        for still_ms in stills_ms(found, from_us):
            self._figures.add(f"{name}: stands still", still_ms, "ms")
        for progress in progresses:
            for what in OWN:
                self._figures.add(f"{name}: progress, {what}", progress["durationMs"].get(what, 0), "ms")
        self._figures.add(f"{name}: producer late by at most", late_s * 1e3, "ms")


def _wait(query: StreamingQuery, condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if not query.isActive:
            raise Wrong(f"the query has ended: {query.exception()}")
        if time.monotonic() > deadline:
            raise Wrong(f"nothing came for {seconds:.0f} s")
        time.sleep(0.1)


def sink_jar(root: Path) -> Path:
    """Compile the sink. Raises `Wrong`."""
    classes, made = root / "classes", root / "due-sink.jar"
    javac = shutil.which("javac", path=f"{os.environ.get('JAVA_HOME', '')}/bin:{os.environ.get('PATH', '')}")
    if javac is None:
        raise Wrong("there is no javac")
    spark = Path(pyspark.__file__).parent / "jars" / "*"
    argv = [javac, "--release", "17", "-proc:none", "-cp", str(spark), "-d", str(classes), str(SINK)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise Wrong(done.stdout)
    with zipfile.ZipFile(made, "w") as archive:
        for path in classes.rglob("*.class"):
            archive.write(path, path.relative_to(classes))
    return made


def run(arguments: argparse.Namespace, root: Path) -> None:
    """Start everything, and measure."""
    figures = Figures("spark_real_time", arguments, root)
    head = describe_machine(machine(root))
    names = list(arguments.contestants)
    with contextlib.ExitStack() as stack:
        parts = broker = None
        if "kafka" in names:
            try:
                parts = kafka.bring()
                broker = stack.enter_context(kafka.running(parts, root / "kafka"))
                figures.notes["kafka"] = f"Kafka {kafka.BROKER_VERSION}; {parts.spark_module}"
            except kafka.Missing as error:
                names.remove("kafka")
                figures.notes["kafka"] = f"not measured: {error}"
                say(figures.notes["kafka"])
        cluster = stack.enter_context(LocalCluster.running(arena_bytes=ARENA_BYTES))
        jars = [sink_jar(root), *(parts.spark if parts else [])]
        spark = session(arguments.cores, root, jars, columnar=True)
        stack.callback(spark.stop)
        bench = Bench(arguments, figures, spark, cluster, broker, parts, names, root)
        RealTime(arguments, figures, spark, bench, root).run()
    table(figures, names, head)
    if arguments.json is not None:
        arguments.json.write_text(figures.json() + "\n")


def table(figures: Figures, names: Sequence[str], head: str) -> None:
    """Contestants side by side: median (least-most)."""
    print(f"{head}\n\n| | {' | '.join(names)} |\n|{'---|' * (1 + len(names))}")
    rows = [f", {part}: {what}" for part in PARTS for what in ("records", "p50", "p99", "max")]
    rows += [": stands still", *(f": progress, {what}" for what in OWN), ": producer late by at most"]
    for row in rows:
        cells = [f"{name}{row}" for name in names]
        known = [figures.cell(cell) if cell in figures.names else "" for cell in cells]
        print(f"| {row.lstrip(',: ')}{', ms' * (not row.endswith('records'))} | {' | '.join(known)} |")
    for name, note in figures.notes.items():
        print(f"\n{name}: {note}")
    sys.stdout.flush()


def main() -> int:
    """Measure."""
    made = parser(__doc__)
    made.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    made.add_argument("--cores", type=int, default=2, help="of Spark: local[2]; a task takes one for good")
    made.add_argument("--rate", type=int, default=1000, help="records per second")
    made.add_argument("--batch-seconds", type=int, default=10, help="how long a micro-batch lasts: the trigger")
    made.add_argument("--seconds", type=float, default=40.0, help="how long a round takes")
    made.add_argument("--warm-up", type=float, default=12.0, help="seconds of it before that do not count")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--json", type=Path, help="a file for all samples")
    arguments = made.parse_args()
    with directory(arguments) as root:
        run(arguments, root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
