"""The cost of a batch for a producer, with and without the native core: ``python -m bench.producer_cost``.

From the call of `send_batch` to the frames for the transport, and from the answer to the awaited result; and small
batches one after the other, until all are delivered. No broker, and no socket. Each core runs in processes of its own,
in turns; the least counts.
"""

from __future__ import annotations

import asyncio
from itertools import count
from time import perf_counter_ns
from typing import Any, NamedTuple

import pyarrow as pa

from bench.native_cost import beside
from bench.stages.around import MESSAGE_BYTES_MAX, Cluster, deliver, header_of, until_sent
from bench.stages.producing import stored
from kera.cli.bench._payload import make_value
from kera.client.producing.encoding.partitioner import streamlet_of
from kera.client.producing.producer import Producer
from kera.client.settings import ProducerSettings
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.rpc.frames import HEADER_BYTES
from kera.v1 import broker_pb2

RECORD_BYTES = 100
BATCHES = 60
SMALL_ROWS = (1, 10, 100, 1000)
SMALL_BYTES = 20 << 20
SMALL_BATCHES_MAX = 20_000
_KEYS = DEFAULT_SCHEMA.field("keys").type


class Kind(NamedTuple):
    """Batches of one kind: each becomes a chunk with this number of records in each streamlet."""

    streamlets: int
    records: int
    keyed: bool = True
    payload: str = "auto"

    def __str__(self) -> str:
        keys = "" if self.keyed else ", without keys"
        return f"{self.streamlets:,} x {self.records:,} records, {self.payload}{keys}"


KINDS = [
    Kind(1, 10, keyed=False),
    Kind(1, 2000, keyed=False),
    Kind(16, 600),
    Kind(256, 39),
    Kind(1024, 10),
    Kind(1024, 10, payload="arrow"),
]


def batch_of(kind: Kind) -> pa.RecordBatch:
    """Rows of all streamlets, in turns."""
    rows = kind.streamlets * kind.records
    values = pa.array([make_value(RECORD_BYTES)] * rows, pa.binary())
    if not kind.keyed:
        return pa.record_batch({"value": values})
    keys: dict[int, bytes] = {}
    for number in count():
        keys.setdefault(streamlet_of(b"%d" % number, kind.streamlets), b"%d" % number)
        if len(keys) == kind.streamlets:
            break
    column = pa.array([[key] for key in keys.values()] * kind.records, _KEYS)
    return pa.record_batch({"keys": column, "value": values})


async def measure_kind(kind: Kind) -> tuple[int, int]:
    """Nanoseconds up to the frames, and for the answers; the first batch also connects, and does not count."""
    cluster: Any = Cluster(streamlets=kind.streamlets)
    settings = ProducerSettings(
        chunk_bytes_max=1 << 20, request_bytes_max=MESSAGE_BYTES_MAX, payload=kind.payload, linger_ms=0
    )
    batch, there, back = batch_of(kind), [], []
    async with Producer(cluster, settings) as producer:
        await producer.prepare("s")
        for _ in range(BATCHES):
            begun_ns = perf_counter_ns()
            delivery = await producer.send_batch("s", batch)
            await until_sent(cluster.wire)
            there.append(perf_counter_ns() - begun_ns)
            answered_ns, left = 0, kind.streamlets
            while left:
                await until_sent(cluster.wire)
                chunks, took_ns = await answer(cluster)
                left -= chunks
                answered_ns += took_ns
            begun_ns = perf_counter_ns()
            await delivery
            back.append(answered_ns + perf_counter_ns() - begun_ns)
    cluster.close()
    return min(there[1:]), min(back[1:])


async def answer(cluster: Any) -> tuple[int, int]:
    """Answer the next request as if its chunks were stored; returns their number, and the producer's nanoseconds."""
    frame = memoryview(b"".join(memoryview(piece) for piece in cluster.wire.sent.pop(0)))
    head = frame[HEADER_BYTES : HEADER_BYTES + header_of([frame]).head_bytes]
    chunks = broker_pb2.MultiWriteChunksRequest.FromString(bytes(head)).chunk_count
    return chunks, await deliver(cluster.channel_made, cluster.wire, stored([frame], chunks))


async def measure_small(rows: int) -> float:
    """Nanoseconds of a batch of `rows` rows, when many are sent one after the other."""
    cluster: Any = Cluster()
    batch = pa.record_batch({"value": pa.array([make_value(RECORD_BYTES)] * rows, pa.binary())})
    batches = min(SMALL_BATCHES_MAX, SMALL_BYTES // (rows * RECORD_BYTES))

    async def answers() -> None:
        while True:
            while cluster.wire.sent:
                await answer(cluster)
            await asyncio.sleep(0)

    async with Producer(cluster, ProducerSettings()) as producer:
        await producer.prepare("s")
        answering = asyncio.create_task(answers())
        begun_ns = perf_counter_ns()
        for _ in range(batches):
            await producer.send_batch("s", batch)
        await producer.flush()
        took_ns = perf_counter_ns() - begun_ns
        answering.cancel()
    cluster.close()
    return took_ns / batches


async def measure() -> dict[str, float]:
    """Nanoseconds of each kind, with the core of this process."""
    found: dict[str, float] = {}
    for kind in KINDS:
        there_ns, back_ns = await measure_kind(kind)
        found |= {f"{kind}: send_batch": there_ns, f"{kind}: answer": back_ns}
    for rows in SMALL_ROWS:
        found[small_name(rows)] = await measure_small(rows)
    return found


def small_name(rows: int) -> str:
    """The name of a figure."""
    return f"batches of {rows:,} row{'s' * (rows > 1)}, each"


def table(python: dict[str, float], fast: dict[str, float]) -> str:
    """Both cores beside each other, in Markdown."""
    rows = ["| batch | Python, us | native, us | a chunk, native, us | |", "|---|--:|--:|--:|--:|"]
    for kind in KINDS:
        for part in ("send_batch", "answer"):
            name = f"{kind}: {part}"
            rows.append(
                f"| {name} | {python[name] / 1000:,.1f} | {fast[name] / 1000:,.1f} |"
                f" {fast[name] / kind.streamlets / 1000:.2f} | {python[name] / fast[name]:.1f}× |"
            )
    rows += [
        f"| {name} | {python[name] / 1000:,.1f} | {fast[name] / 1000:,.1f} | | {python[name] / fast[name]:.1f}× |"
        for name in map(small_name, SMALL_ROWS)
    ]
    return "\n".join(rows)


def main() -> None:
    """Measure as the command line says."""
    beside("bench.producer_cost", lambda: asyncio.run(measure()), table, "Measure what a batch costs a producer.")


if __name__ == "__main__":
    main()
