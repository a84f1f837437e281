"""Figures of the thesis with Kafka beside KerA: workloads of the comparison, played by its contestants.

Some files of `bench/workloads` are an experiment: a contestant is a series, and the number at the end of a workload's
name is the x of a point. A point fails, with the reason, if the contestant cannot play it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.compare.kera import SEGMENT_BYTES, memory_bytes
from bench.compare.rounds import run_workload
from bench.compare.workload import FOLDER, Workload, load
from bench.experiments.measure import Measured, sample_of
from bench.experiments.setup import Claim, Experiment, Place, Point, Setup

CONTESTANTS = {
    "kera-memory": "KerA, in memory",
    "kafka": "Kafka, confluent-kafka",
    "kafka-java": "Kafka, its own client in Java",
}
"""The series by contestant."""
KERA, KAFKA, KAFKA_JAVA = CONTESTANTS.values()
BOTH_CLIENTS = (KAFKA, KAFKA_JAVA)
MEMORY = " KerA writes nothing to disk here, and Kafka writes its log to the page cache."


WORKLOADS = {
    "kafka_chunks": "chunks/chunks-*.toml",
    "kafka_streamlets": "streamlets/divided-*.toml",
    "kafka_clients": "clients/clients-*.toml",
}
"""The files of an experiment by its name."""


def workloads(name: str) -> list[tuple[int, Workload]]:
    """The workloads of an experiment, by x."""
    loads = map(load, FOLDER.glob(WORKLOADS[name]))
    return sorted(((int(each.name.rpartition("-")[2]), each) for each in loads), key=lambda pair: pair[0])


def _points(name: str, series: tuple[str, ...] = (KERA, KAFKA, KAFKA_JAVA)) -> tuple[Point, ...]:
    return tuple(Point(of, x, _setup(each)) for of in series for x, each in workloads(name))


def _setup(workload: Workload) -> Setup:
    of_kera = {"segment_bytes": SEGMENT_BYTES, "arena_bytes": memory_bytes(workload)} | workload.settings.get(
        "kera", {}
    )
    return Setup(
        Place(**of_kera),
        streamlets=workload.streamlets,
        chunk_bytes=int(workload.batch_bytes),
        producers=workload.producers * workload.clients,
        batch_records=workload.batch_records,
    )


CHUNKS = Experiment(
    name="kafka_chunks",
    figures="8.7",
    title="Chunk size: KerA and Kafka",
    x_label="chunk size, KiB (Kafka's batch.size: as many records)",
    points=_points("kafka_chunks"),
    thesis="From 1 to 32 KiB larger chunks bring more to both, and KerA is ahead of Kafka.",
    claims=(
        Claim("Larger chunks bring more to KerA in memory: 32 over 1 KiB", (KERA, 32), (KERA, 1), least=1.2),
        *(
            Claim(f"They do to Kafka: {series}, 32 over 1 KiB", (series, 32), (series, 1), least=1.2)
            for series in BOTH_CLIENTS
        ),
        *(
            Claim(f"KerA in memory is ahead: over {series}, {kib} KiB", (KERA, kib), (series, kib), least=1)
            for kib in (1, 32)
            for series in BOTH_CLIENTS
        ),
    ),
    note="One broker, one producer, one partition; batches of 8,192 records, of which the client makes the chunks."
    + MEMORY,
    others=BOTH_CLIENTS,
)
PARTITIONS = Experiment(
    name="kafka_streamlets",
    figures="8.8",
    title="Partitions, with requests of 1 MiB: KerA and Kafka",
    x_label="partitions (a request has as much of each)",
    points=_points("kafka_streamlets"),
    thesis="With more partitions in a request of fixed size throughput falls, for KerA less than for Kafka (which"
    " loses up to 30 times at 512 and 1,024).",
    claims=(
        Claim("KerA in memory keeps a fifth at least: 1,024 over 1", (KERA, 1024), (KERA, 1), least=0.2),
        *(
            Claim(f"Kafka keeps a fifth at most: {series}, 1,024 over 1", (series, 1024), (series, 1), most=0.2)
            for series in BOTH_CLIENTS
        ),
        *(
            Claim(f"KerA in memory is ahead: over {series}, 1,024", (KERA, 1024), (series, 1024), least=1)
            for series in BOTH_CLIENTS
        ),
    ),
    note="One broker and one producer. Kafka's batch.size is set so that its requests are alike." + MEMORY,
    others=BOTH_CLIENTS,
)
CLIENTS = Experiment(
    name="kafka_clients",
    figures="8.9",
    title="Producers of one broker: KerA and Kafka",
    x_label="producers",
    points=_points("kafka_clients", (KERA, KAFKA)),
    thesis="With up to 64 clients KerA holds some 30 M records/s in all (four brokers), ahead of Kafka.",
    claims=(
        *(
            Claim(f"The total stays: {series}, 64 over 4 producers", (series, 64), (series, 4), least=0.7)
            for series in (KERA, KAFKA)
        ),
        *(
            Claim(f"KerA in memory is ahead of Kafka: {clients} producers", (KERA, clients), (KAFKA, clients), least=1)
            for clients in (4, 64)
        ),
    ),
    note="Producers share two processes, each with connections of its own. Kafka's tool in Java is a JVM for each"
    " producer, of which two cores cannot run 64, so it takes no part." + MEMORY,
    others=BOTH_CLIENTS,
)
EXPERIMENTS = (CHUNKS, PARTITIONS, CLIENTS)


def measure(experiment: Experiment, *, rounds: int, seconds: float, folder: Path) -> Measured:
    """Run all rounds of all workloads."""
    found = Measured()
    wanted = {point.series for point in experiment.points}
    names = [name for name, series in CONTESTANTS.items() if series in wanted]
    for x, workload in workloads(experiment.name):
        recorded = run_workload(workload.model_copy(update={"seconds": seconds}), names, rounds, folder)
        for name, record in recorded["contestants"].items():
            add(found, (CONTESTANTS[name], x), record)
    return found


def add(found: Measured, key: tuple[str, int], record: dict[str, Any]) -> None:
    """Add the rounds of a contestant in a workload as samples of a point, and the reasons of failures."""
    errors = [error for played in record["rounds"] for error in played["errors"]]
    if good := [sample_of(played) for played in record["rounds"] if not played["errors"]]:
        found.samples[key] = good
    if why := record["reason"] or "; ".join(errors):
        found.failures[key] = why
