"""The benchmarks by name: ``python -m bench`` lists them, ``python -m bench compare --quick`` runs one.

A name is that of the module with ``-`` for ``_``. The module takes the place of this process and gets all further
arguments. Before that, this one looks for what the benchmark needs besides ``make setup``: ``python -m bench.compare``
leaves that to the caller.
"""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BUILD_JAR = "spark_connector/jvm/build.py"

Need = Literal["java", "java if there", "compiler", "jar", "kafka"]
SPARK: tuple[Need, ...] = ("jar", "java")
HELP = {"-h", "--help"}


class Benchmark(NamedTuple):
    """A line of the list."""

    takes: str
    """The approximate time that it takes with its defaults."""
    text: str
    needs: tuple[Need, ...] = ()


BENCHMARKS = {
    "compare": Benchmark("30 min", "KerA beside Kafka, NATS, RabbitMQ and Redis", ("java if there",)),
    "smoke": Benchmark("3 min", "the gate: ratios beside those that were recorded"),
    "references": Benchmark("seconds", "the machine alone, as the gate's ratios have it"),
    "experiments": Benchmark("1 hour", "the thesis's experiments, repeated; Kafka beside some", ("java if there",)),
    "age": Benchmark("seconds", "the age of recorded results, in commits and days"),
    "latency": Benchmark("20 min", "latency and cost of chunks that go full, at once, or in time"),
    "soak": Benchmark("30 min", "a steady load; fails if anything drifts"),
    "fairness": Benchmark("4 min", "waits of other clients beside the largest requests"),
    "fairness-deep": Benchmark("5 min", "waits of other clients beside small requests about much"),
    "quotas": Benchmark("minutes", "waits of a client beside one that takes all it can, with and without quotas"),
    "console": Benchmark("minutes", "pages of the console, on a cluster with many streams"),
    "stages": Benchmark("90 s", "the cost of each stage of a chunk's way, beside the machine's limits"),
    "request-cost": Benchmark("minutes", "a write request: broker, backup, and the kernel's part"),
    "write-cost": Benchmark("minutes", "a write request: the broker's writer, with either core"),
    "producer-cost": Benchmark("minutes", "a batch: the producer, with either core"),
    "record-cost": Benchmark("minutes", "a record that is sent or read by itself, with either core"),
    "lone": Benchmark("3 min", "a record that travels alone: client, broker, backup; without asyncio; small batches"),
    "native-cost": Benchmark("minutes", "the functions of the native core, beside the same in Python"),
    "small-requests": Benchmark("2 min", "small requests from a program in C, with either core"),
    "grpc-writes": Benchmark("4 min", "writes over gRPC, from Python and from Java"),
    "shared-ring": Benchmark("2 min", "chunks through a socket, and through memory that two processes share"),
    "sync-sdk": Benchmark("minutes", "the SDK without asyncio, beside the one with it"),
    "security": Benchmark("minutes", "authentication and encryption, over TCP and gRPC"),
    "replication-table": Benchmark("6 min", "time to acknowledgement over streamlets, producers and virtual logs"),
    "replication-cost": Benchmark("minutes", "memory and copies that replication costs a broker"),
    "replicated-requests": Benchmark("minutes", "requests through broker and backup, without the producer's work"),
    "recovery": Benchmark("minutes", "a broker that is killed: timeline of its recovery"),
    "migration": Benchmark("10 min", "waits of producers while streamlets move"),
    "log-disk": Benchmark("minutes", "segments to disk and back, beside the disk itself"),
    "log-catchup": Benchmark("minutes", "a stream larger than the memory, with a reader at each end"),
    "log-start": Benchmark("minutes", "starts with a long history; memory of groups and streams"),
    "log-streams": Benchmark("minutes", "10,000 streams on one broker"),
    "sustained-disk": Benchmark("3 min", "a minute as fast as it goes, in memory and on disk"),
    "flush-cost": Benchmark("minutes", "a segment for the thread that flushes it"),
    "arena-prefault": Benchmark("minutes", "memory that was faulted in before, and huge pages"),
    "epochs": Benchmark("4 min", "readers of epochs, beside plain ones and a strict merge"),
    "epochs-live": Benchmark("3 min", "delay of readers of epochs; entries without writers"),
    "read-cost": Benchmark("minutes", "readers of small chunks, each alone and put together"),
    "wide-stream": Benchmark("minutes", "a stream of thousands of streamlets that has little to read"),
    "shares": Benchmark("minutes", "shares of the consumers of a group in a small stream"),
    "push-loop": Benchmark("minutes", "100 GB through push: copies by the broker, and growth"),
    "connect": Benchmark("2 min", "copies from Kafka and to it, with MirrorMaker 2 beside", ("kafka", "java")),
    "connect-values": Benchmark("minutes", "copies into values of Avro and JSON, beside columns"),
    "spark-engines": Benchmark("15 min", "Spark's reads with both engines, beside Kafka", SPARK),
    "spark-read": Benchmark("minutes", "Spark's reads: pushed, pulled, Parquet, and memory", SPARK),
    "spark-write": Benchmark("minutes", "Spark's writes with both engines, beside Kafka", SPARK),
    "spark-small": Benchmark("minutes", "Spark's reads of small chunks, beside large ones", SPARK),
    "spark-written": Benchmark("minutes", "Spark's counts of what was written at a low rate", SPARK),
    "spark-paced": Benchmark("10 min", "micro-batches of Spark with a latency target and without", SPARK),
    "spark-real-time": Benchmark("5 min", "Spark's real-time mode, beside Kafka", ("jar", "compiler")),
    "epochs-spark": Benchmark("minutes", "records that Spark drops as late, with epochs and without", SPARK),
}


def listed() -> str:
    """The list, as text."""
    width = max(map(len, BENCHMARKS))
    lines = [f"  {name:{width}}  {each.takes:>7}  {each.text}" for name, each in BENCHMARKS.items()]
    return "\n".join(["python -m bench NAME [ARGUMENT …]; NAME --help lists the arguments.", "", *lines])


def module_of(name: str) -> str:
    """The module that a name stands for."""
    return f"bench.{name.replace('-', '_')}"


def environment(needs: Sequence[Need]) -> dict[str, str] | None:
    """The environment of a benchmark; None if something is missing, which standard error then names."""
    made = dict(os.environ)
    if "jar" in needs and not _ran(sys.executable, BUILD_JAR, "--check", stderr=subprocess.DEVNULL):
        print("bench: the jar of the Spark connector is missing or not current: run make jar", file=sys.stderr)
        return None
    if "kafka" in needs and not _ran("sh", "scripts/kafka.sh"):
        return None
    if {"java", "java if there", "compiler"}.intersection(needs):
        kind = ["--compiler"] if "compiler" in needs else []
        java = _output("sh", "scripts/java.sh", *kind)
        if java is None and "java if there" not in needs:
            return None
        made.pop("SPARK_HOME", None)  # it would bring in another Spark than the environment's
        made.pop("JAVA_HOME", None)
        made |= {"PYSPARK_PYTHON": sys.executable} | ({"JAVA_HOME": java} if java else {})
    return made


def _ran(*command: str, stderr: int | None = None) -> bool:
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=stderr, check=False).returncode == 0


def _output(*command: str) -> str | None:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def main(arguments: Sequence[str]) -> int:
    """List the benchmarks, or become one of them. The exit code."""
    if not arguments or arguments[0] in HELP:
        print(listed())
        return 0
    name, *rest = arguments
    if name not in BENCHMARKS:
        close = difflib.get_close_matches(name.replace("_", "-"), BENCHMARKS, n=1)
        hint = f"did you mean {close[0]}?" if close else "python -m bench lists them"
        print(f"bench: there is no benchmark {name}: {hint}", file=sys.stderr)
        return 2
    made = environment(() if HELP.intersection(rest) else BENCHMARKS[name].needs)
    if made is not None:
        os.execve(sys.executable, [sys.executable, "-m", module_of(name), *rest], made)  # noqa: S606 - that is its job
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
