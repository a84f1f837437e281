"""The thesis's experiments (chapter 8) as tables. The text beside the points says what each figure showed.

Everything runs on one machine: clients, brokers and backups share its cores. The thesis had 16 cores for each broker
and others for clients; so its effects of parallelism cannot be expected here, as the notes say.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from bench.experiments.epochs import EXPERIMENT as EPOCHS
from bench.experiments.kafka import EXPERIMENTS as KAFKA
from bench.experiments.latency import EXPERIMENTS as LATENCY
from bench.experiments.locality import EXPERIMENT as LOCALITY
from bench.experiments.setup import Claim, Experiment, Place, Point, Setup
from kera.core.base.settings import GIB, KIB, MIB

CHUNKS_KIB = (1, 4, 16, 64)
STREAMLETS = (1, 4, 16, 64, 256, 1024)
DIVIDED = 8_192
"""Records of a batch that the producer divides into chunks: about a MiB with the overhead of chunks."""
KEYED = 10_000
REPLICATED = Place(backups=1, arena_bytes=4 * GIB)
BACKED_UP_TWICE = Place(backups=2, arena_bytes=3 * GIB)


def _over_chunks(series: str, setup: Setup, sizes_kib: Iterable[int] = CHUNKS_KIB) -> Iterator[Point]:
    """A series over chunk sizes, with a chunk of each streamlet in a request."""
    for kib in sizes_kib:
        chunk_bytes = kib * KIB
        sized = dataclasses.replace(setup, chunk_bytes=chunk_bytes, request_bytes=chunk_bytes * setup.streamlets)
        yield Point(series, kib, sized)


def _producers() -> Experiment:
    def points() -> Iterator[Point]:
        for streamlets, in_flight in itertools.product((1, 16), (1, 5)):
            setup = Setup(streamlets=streamlets, requests_in_flight=in_flight, batch_records=DIVIDED)
            yield from _over_chunks(_pipelined(streamlets, in_flight), setup)
        yield from _over_chunks(calls, Setup())

    one, sixteen, pipelined = _pipelined(1, 1), _pipelined(16, 1), _pipelined(1, 5)
    calls = f"{pipelined}, a call for each chunk"
    return Experiment(
        name="chunk_size_producer",
        figures="8.3, 8.4",
        title="One producer: chunk size, streamlets, requests in flight",
        x_label="chunk size, KiB (a request has a chunk of each streamlet)",
        points=tuple(points()),
        thesis="Larger requests, by larger chunks or by more streamlets, bring substantially more; so do 5 requests in"
        " flight. Checksums of records cost the producer a factor of 3, and then pipelining hardly matters.",
        claims=(
            Claim("Larger chunks bring more, with 1 streamlet: 64 over 1 KiB", (one, 64), (one, 1), least=2),
            Claim("Larger chunks bring more, with 16 streamlets: 64 over 1 KiB", (sixteen, 64), (sixteen, 1), least=2),
            Claim(
                "More streamlets a request bring more: 16 over 1, chunks of 4 KiB", (sixteen, 4), (one, 4), least=1.2
            ),
            Claim(
                "Requests in flight bring more: 5 over 1, 1 streamlet, 16 KiB",
                (pipelined, 16),
                (one, 16),
                least=1.1,
            ),
            Claim(
                "A call for each chunk costs most of a small one: over batches that are divided, 1 KiB",
                (calls, 1),
                (pipelined, 1),
                most=0.5,
                metric="per_core",
            ),
        ),
        note=f"The producer gets batches of {DIVIDED:,} records and makes the chunks, as the thesis's producer makes"
        " them of records; in the last series the application calls it for each chunk, of 8 records with 1 KiB."
        " Producers always make checksums, one for each chunk, so there is no series without them. The table of"
        " the checksum's cost has what they cost in process.",
    )


def _pipelined(streamlets: int, in_flight: int) -> str:
    return f"{streamlets} streamlet{'s' * (streamlets > 1)}, {in_flight} in flight"


def _consumers() -> Experiment:
    one, sixteen, unverified = "1 streamlet", "16 streamlets", "16 streamlets, unverified"
    written = Setup(streamlets=16, consumer="pull", batch_records=DIVIDED)
    return Experiment(
        name="chunk_size_consumer",
        figures="8.5, 8.6",
        title="One producer and one consumer that pulls: chunk size, checksums",
        x_label="chunk size, KiB (a request of the producer has a chunk of each streamlet)",
        points=(
            *_over_chunks(one, dataclasses.replace(written, streamlets=1)),
            *_over_chunks(sixteen, written),
            *_over_chunks(unverified, dataclasses.replace(written, verify=False)),
            *_over_chunks("16 streamlets, pushed", dataclasses.replace(written, consumer="push")),
        ),
        thesis="As with producers, larger chunks and more streamlets bring more; a consumer that is not pipelined"
        " gets up to 5.9 of a pipelined producer's 7.8 M records/s. With checksums it keeps up with the producer.",
        claims=(
            Claim("Larger chunks bring more: 64 over 1 KiB", (sixteen, 64), (sixteen, 1), least=2, metric="consumed"),
            Claim(
                "Checksums do not limit the consumer: verified over unverified, 64 KiB",
                (sixteen, 64),
                (unverified, 64),
                least=0.85,
                metric="consumed",
            ),
        ),
        plotted="consumed",
        note="What the consumer has seen counts, not what was written: one that falls behind shows.",
    )


def _streamlets() -> Experiment:
    place = Place(segment_bytes=2 * MIB)
    divided, fixed = "chunk = 1 MiB / streamlets", "chunks of 16 KiB, a call for each"
    calls = f"{divided}, a call for each"
    keyed = f"batches of {KEYED:,} records with keys"

    def points() -> Iterator[Point]:
        for streamlets in STREAMLETS:
            setup = Setup(place, streamlets=streamlets, chunk_bytes=MIB // streamlets)
            yield Point(divided, streamlets, dataclasses.replace(setup, batch_records=DIVIDED))
            yield Point(calls, streamlets, setup)
            yield Point(fixed, streamlets, dataclasses.replace(setup, chunk_bytes=16 * KIB))
            by_keys = dataclasses.replace(setup, chunk_bytes=256 * KIB, batch_records=KEYED, keys="random")
            yield Point(keyed, streamlets, by_keys)

    return Experiment(
        name="streamlets",
        figures="8.8",
        title="Streamlets, with requests of 1 MiB",
        x_label="streamlets",
        points=tuple(points()),
        thesis="With more partitions in a request of fixed size throughput falls, for KerA less than for Kafka (which"
        " loses up to 30 times at 512 and 1,024).",
        claims=(
            Claim("Streamlets alone cost little: 1,024 over 1, chunks of 16 KiB", (fixed, 1024), (fixed, 1), least=0.7),
            Claim(
                "Smaller chunks cost, and less than Kafka's 30 times: 1,024 over 1, chunk = request / streamlets",
                (divided, 1024),
                (divided, 1),
                least=1 / 30,
                most=1,
            ),
            Claim("Keys that spread each batch cost half at most: 1,024 over 1", (keyed, 1024), (keyed, 1), least=0.5),
            Claim(
                "A call for each chunk costs most of a small one: over batches that are divided, 1,024",
                (calls, 1024),
                (divided, 1024),
                most=0.5,
                metric="per_core",
            ),
        ),
        note=f"One broker and one producer. Batches of {DIVIDED:,} records, about a request, are divided by the"
        " producer, which changes two things at once, streamlets and chunk size: at 1,024 streamlets a chunk has"
        " 8 records. In the second series the application calls the producer for each of these chunks; the third"
        " changes only the number of streamlets; in the last one keys divide a batch. Segments have 2 MiB, as each"
        " streamlet has an open one.",
    )


def _streams() -> Experiment:
    place = Place(segment_bytes=256 * KIB, arena_bytes=8 * GIB)
    series = "chunks of 16 KiB"
    return Experiment(
        name="streams",
        figures="many streams (chapter 1)",
        title="Streams of one broker, all written by one producer",
        x_label="streams",
        points=tuple(Point(series, streams, Setup(place, streams=streams)) for streams in (1, 100, 1000, 10_000)),
        thesis="KerA is meant for clusters of very many streams; the thesis has no figure of it.",
        claims=(Claim("Streams cost little: 10,000 over 1", (series, 10_000), (series, 1), least=0.7),),
        note="A stream has one streamlet, and gets every n-th chunk, with a call for each. Segments of 256 KiB, as each"
        " stream has an open one.",
    )


def _clients() -> Experiment:
    series = "all producers together"
    return Experiment(
        name="clients",
        figures="8.9, 8.11",
        title="Producers of one broker, and one consumer of everything",
        x_label="producers",
        points=tuple(
            Point(
                series,
                producers,
                Setup(
                    streamlets=32,
                    request_bytes=128 * KIB,
                    producers=producers,
                    consumer="push",
                    batch_records=DIVIDED,
                ),
            )
            for producers in (1, 4, 16, 64)
        ),
        thesis="With up to 64 clients KerA holds some 30 M records/s in all (four brokers). With 32 instead of 16"
        " clients each has somewhat more than half: the total stays at about 40 M.",
        claims=(Claim("The total stays: 64 over 4 producers", (series, 64), (series, 4), least=0.7),),
        note="Up to 64 producers share at most 2 processes, and all share the machine's cores, so the total says what"
        " more clients cost, not what more clients' machines bring.",
    )


def _brokers() -> Experiment:
    series = "4 producers"
    return Experiment(
        name="brokers",
        figures="8.10",
        title="Brokers, all on this machine",
        x_label="brokers",
        points=tuple(
            Point(
                series,
                brokers,
                Setup(
                    Place(brokers=brokers, arena_bytes=6 * GIB // brokers),
                    streamlets=32,
                    producers=4,
                    batch_records=DIVIDED,
                ),
            )
            for brokers in (1, 2, 4)
        ),
        thesis="More nodes bring more; Kafka with four times as many nodes has half of KerA's throughput.",
        claims=(
            Claim(
                "More brokers bring more: 4 over 1",
                (series, 4),
                (series, 1),
                least=1.5,
                parallel="brokers work side by side",
            ),
        ),
        note="On two cores one broker with its producers has both busy already. The series show the cost of"
        " more processes and of smaller requests.",
    )


def _virtual_logs() -> Experiment:
    plain, parallel = "16 streamlets, Q = 1, chunks of 16 KiB", "8 streamlets, Q = 8, chunks of 64 KiB"
    beside = "broker, backup and producers work side by side"

    def points() -> Iterator[Point]:
        base = Setup(REPLICATED, replication=1, producers=8, batch_records=DIVIDED)
        for logs in (1, 2, 4, 8, 16):
            yield Point(plain, logs, dataclasses.replace(base, streamlets=16, virtual_logs=logs))
            yield Point(
                parallel,
                logs,
                dataclasses.replace(base, streamlets=8, entries=8, virtual_logs=logs, chunk_bytes=64 * KIB),
            )

    return Experiment(
        name="virtual_logs",
        figures="8.12, 8.16",
        title="Virtual logs, one backup",
        x_label="virtual logs of the stream",
        points=tuple(points()),
        thesis="With one active group a streamlet, more virtual logs bring nothing (8.12); with 8, four are best, and"
        " 2, 8 and 16 are slightly behind (8.16).",
        claims=(
            Claim("More virtual logs bring nothing with Q = 1: 16 over 1", (plain, 16), (plain, 1), most=1.15),
            Claim("A few help with Q = 8: 4 over 1", (parallel, 4), (parallel, 1), least=1.05, parallel=beside),
            Claim(
                "More than a few do not: 16 over 4", (parallel, 16), (parallel, 4), least=0.7, most=1.1, parallel=beside
            ),
        ),
        note="A broker is one event loop, so virtual logs overlap waiting for backups, not work. Backups keep this in"
        " memory.",
    )


def _active_groups() -> Experiment:
    one = Setup(REPLICATED, streamlets=4, virtual_logs=4, replication=1, producers=8, batch_records=DIVIDED)
    four = dataclasses.replace(one, entries=4)
    return Experiment(
        name="active_groups",
        figures="8.13",
        title="Active groups of a streamlet (Q), one backup, 4 virtual logs, 8 producers",
        x_label="chunk size, KiB (requests of 4 chunks)",
        points=(*_over_chunks("Q = 1", one), *_over_chunks("Q = 4", four)),
        thesis="Four active groups a streamlet instead of one bring 20 instead of 16 M records/s: appends do not wait"
        " for each other.",
        claims=(
            Claim(
                "More active groups bring more: Q = 4 over 1, 64 KiB",
                ("Q = 4", 64),
                ("Q = 1", 64),
                least=1.1,
                parallel="broker, backup and producers work side by side",
            ),
            Claim("More active groups cost nothing: Q = 4 over 1, 16 KiB", ("Q = 4", 16), ("Q = 1", 16), least=0.85),
        ),
        note="Here one loop does all appends, so none waits for a lock of another, and there is nothing to be gained"
        " by Q.",
    )


def _replication() -> Experiment:
    base = Setup(BACKED_UP_TWICE, streamlets=4, entries=4, virtual_logs=4, producers=4, batch_records=DIVIDED)

    def points() -> Iterator[Point]:
        for in_flight, replication in itertools.product((1, 5), (0, 1, 2)):
            setup = dataclasses.replace(base, replication=replication, requests_in_flight=in_flight)
            yield from _over_chunks(_replicated(replication, in_flight), setup, (1, 16, 64))

    r0, r1, r2 = (_replicated(replication, 1) for replication in (0, 1, 2))
    return Experiment(
        name="replication",
        figures="8.14, 8.15",
        title="Backups of each chunk (R), 4 producers, 4 active groups, 4 virtual logs",
        x_label="chunk size, KiB (requests of 4 chunks)",
        points=tuple(points()),
        thesis="Larger chunks bring more, whatever R is. For small chunks R = 1 and 2 are about the same; else each"
        " copy more costs, since requests wait for it.",
        claims=(
            Claim("Larger chunks bring more with R = 1: 64 over 1 KiB", (r1, 64), (r1, 1), least=2),
            Claim("Larger chunks bring more with R = 2: 64 over 1 KiB", (r2, 64), (r2, 1), least=2),
            Claim("A backup costs: R = 1 over 0, 64 KiB", (r1, 64), (r0, 64), most=0.95),
            Claim("Another one costs more: R = 2 over 1, 64 KiB", (r2, 64), (r1, 64), most=0.95),
            Claim("With small chunks it hardly does: R = 2 over 1, 1 KiB", (r2, 1), (r1, 1), least=0.75),
            Claim(
                "Requests in flight hide the waiting: R = 1, 5 over 1, 16 KiB",
                (_replicated(1, 5), 16),
                (r1, 16),
                least=1.05,
            ),
        ),
        note="Backups share the two cores with the broker and the producers, so a copy costs processor time that the"
        " thesis took from other machines.",
    )


def _replicated(replication: int, in_flight: int) -> str:
    return f"R = {replication}, {in_flight} in flight"


EXPERIMENTS: tuple[Experiment, ...] = (
    _producers(),
    _consumers(),
    _streamlets(),
    _streams(),
    _clients(),
    _brokers(),
    _virtual_logs(),
    _active_groups(),
    _replication(),
    LOCALITY,
    *KAFKA,
    EPOCHS,
    *LATENCY,
)
