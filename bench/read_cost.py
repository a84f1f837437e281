"""How many rows a consumer reads in a second from chunks of each size, alone and put together.

    python -m bench.read_cost
    python -m bench.read_cost --part spread

Sizes: for each size a stream of one streamlet is written once, into the broker's memory, with records of 100 bytes;
then one consumer after the other reads it from its start to its end. Pulled and pushed, as batches and as records; with
``joined_bytes_max=0``, each chunk by itself, and with the default. All of that in turns; the best of each counts.

Spread: chunks of 1 KiB, one after the other to one stream, to 1,024 streamlets of a stream, and to 10,000 streams. One
producer writes some to each of the three in turns, with `send_batch`, a chunk to a call, and flushes; then one consumer
after the other pulls all of them, in turns with one of as many records in chunks of 256 KiB. Segments have room for one
of these, so memory has a slot for each stream. Checked: as many rows come as were written.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.common import Figures, broker, directory, parser, say, size
from bench.log_streams import for_each
from kera.cli.bench._payload import make_batch, records_per_chunk
from kera.client import Client, Producer
from kera.core.base.settings import KIB, MIB

RECORD_BYTES = 100
CHUNK_BYTES = (KIB, 4 * KIB, 16 * KIB, 256 * KIB)
RECORDS_SHARE = 8
"""The share of the stream that is read as records: making them takes longer than anything else."""
WAYS = {"pull": "never", "push": "always"}
SPREAD_SEGMENT_BYTES = 512 * KIB
"""Room for a chunk of 256 KiB."""
SPARE_BYTES = 128
"""Space left free in chunks of the spread: a batch that might not fit into one is checked more closely, which is
another question.
"""
JOINED: dict[str, dict[str, Any]] = {"alone": {"joined_bytes_max": 0}, "together": {}}


def stream_of(chunk_bytes: int) -> str:
    """The name of the stream with such chunks."""
    return f"chunks-{chunk_bytes}"


async def fill(client: Client, chunk_bytes: int, records: int) -> None:
    """Write the stream."""
    await client.admin.create_stream(stream_of(chunk_bytes), streamlets=1)
    rows = 10_000
    batch = make_batch(RECORD_BYTES, rows)
    async with client.producer(chunk_bytes_max=chunk_bytes, payload="lean") as producer:
        for _ in range(records // rows):
            await producer.send_batch(stream_of(chunk_bytes), batch)
        await producer.flush()


async def read(client: Client, chunk_bytes: int, way: str, joined: str, *, records_max: int | None) -> float:
    """Rows in a second; `records_max`: read as records, up to this many."""
    settings: dict[str, Any] = {"shared_memory": WAYS[way], **JOINED[joined]}
    count = 0
    begun_s = time.perf_counter()
    async with client.consumer(stream_of(chunk_bytes), start="earliest", end="latest", **settings) as consumer:
        if records_max is None:
            async for chunk in consumer.batches():
                count += chunk.batch.num_rows
        else:
            async for _ in consumer:
                count += 1
                if count == records_max:
                    break
    return count / (time.perf_counter() - begun_s)


async def run(arguments: argparse.Namespace, root: Path) -> None:
    """Write, read, and print."""
    figures = Figures("read_cost", arguments, root)
    records = arguments.stream_bytes // RECORD_BYTES
    arena_bytes = (len(CHUNK_BYTES) * 2 * arguments.stream_bytes // (8 * MIB) + 8) * 8 * MIB
    async with (
        broker(None, arena_bytes=arena_bytes, segment_bytes=8 * MIB) as made,
        await Client.connect(made.cluster.bootstrap) as client,
    ):
        for chunk_bytes in CHUNK_BYTES:
            await fill(client, chunk_bytes, records)
        kinds = list(product(CHUNK_BYTES, WAYS, JOINED, (None, records // RECORDS_SHARE)))
        for number in range(arguments.rounds):
            say(f"round {number + 1}")
            for chunk_bytes, way, joined, records_max in kinds:
                rate = await read(client, chunk_bytes, way, joined, records_max=records_max)
                what = "batches" if records_max is None else "records"
                name = f"{chunk_bytes // KIB} KiB, {way}, {what}, {joined}"
                figures.add(name, rate / 1e6, "M rows/s")
    print_table(figures)


# -- spread --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """The streamlets that the chunks go to, in turn."""

    name: str
    streams: list[str]
    streamlets: int = 1

    async def create(self, client: Client, producer: Producer) -> None:
        """Make the streams, and prepare the producer for them."""
        names = self.streams
        await for_each(len(names), lambda number: client.admin.create_stream(names[number], streamlets=self.streamlets))
        await for_each(len(names), lambda number: producer.prepare(names[number]))

    async def write(self, producer: Producer, batch: pa.RecordBatch, chunks: int) -> float:
        """Records in a second, until the last one is acknowledged."""
        begun_s = time.perf_counter()
        for stream, streamlet in islice(cycle(product(self.streams, range(self.streamlets))), chunks):
            await producer.send_batch(stream, batch, streamlet=streamlet)
        await producer.flush()
        records: int = chunks * batch.num_rows
        return records / (time.perf_counter() - begun_s)

    async def pull(self, client: Client, expected: int) -> float:
        """Rows in a second, when everything is read."""
        begun_s = time.perf_counter()
        count = 0
        async with client.consumer(*self.streams, start="earliest", end="latest", shared_memory="never") as consumer:
            async for chunk in consumer.batches():
                count += chunk.batch.num_rows
        if count != expected:
            raise SystemExit(f"{self.name}: {count:,} rows came, {expected:,} were written")
        return count / (time.perf_counter() - begun_s)


async def run_spread(arguments: argparse.Namespace, root: Path) -> None:
    """Write to all, read all, and print."""
    figures = Figures("read_cost", arguments, root)
    rows = records_per_chunk(RECORD_BYTES, KIB - SPARE_BYTES, lean=True)
    batch = make_batch(RECORD_BYTES, rows)
    chunks = arguments.stream_bytes // RECORD_BYTES // rows
    expected = arguments.rounds * chunks * rows
    streams = [f"stream-{number}" for number in range(arguments.streams)]
    small = [
        Spread("one stream", ["one"]),
        Spread(f"{arguments.streamlets:,} streamlets", ["wide"], arguments.streamlets),
        Spread(f"{arguments.streams:,} streams", streams),
    ]
    large = Spread("one stream, 256 KiB", ["large"])
    slots = arguments.streams + arguments.streamlets + 16 * (expected * 2 * RECORD_BYTES // SPREAD_SEGMENT_BYTES + 1)
    async with (
        broker(None, arena_bytes=slots * SPREAD_SEGMENT_BYTES, segment_bytes=SPREAD_SEGMENT_BYTES) as made,
        await Client.connect(made.cluster.bootstrap) as client,
    ):
        async with (
            client.producer(chunk_bytes_max=KIB, payload="lean") as producer,
            client.producer(chunk_bytes_max=256 * KIB, payload="lean") as producer_of_large,
        ):
            for spread in small:
                say(f"creating {spread.name}")
                await spread.create(client, producer)
            await large.create(client, producer_of_large)
            await producer_of_large.send_batch("large", make_batch(RECORD_BYTES, expected))
            for number, spread in product(range(arguments.rounds), small):
                say(f"round {number + 1}: writing to {spread.name}")
                figures.add(f"{spread.name}: written", await spread.write(producer, batch, chunks) / 1e6, "M rows/s")
        for number, spread in product(range(arguments.rounds), [*small, large]):
            say(f"round {number + 1}: reading {spread.name}")
            figures.add(f"{spread.name}: pulled", await spread.pull(client, expected) / 1e6, "M rows/s")
    figures.print()


# -- output ----------------------------------------------------------------------------------------------


def print_table(figures: Figures) -> None:
    """The best of each, relative to the largest chunks, in Markdown; then all samples as JSON."""
    print("| chunks | way | as | alone, M rows/s | together, M rows/s | | of chunks of 256 KiB |")
    print("|--:|---|---|--:|--:|--:|--:|")
    for chunk_bytes, way, what in product(CHUNK_BYTES, WAYS, ("batches", "records")):
        alone, together = (figures.best(f"{chunk_bytes // KIB} KiB, {way}, {what}, {joined}") for joined in JOINED)
        largest = figures.best(f"{CHUNK_BYTES[-1] // KIB} KiB, {way}, {what}, together")
        print(
            f"| {chunk_bytes // KIB} KiB | {way} | {what} | {alone:.2f} | {together:.2f} | {together / alone:.1f}x |"
            f" {together / largest:.0%} |"
        )
    print("\n" + figures.json(), flush=True)


def main() -> None:
    """Measure as the command line says."""
    made = parser(__doc__)
    made.add_argument("--part", choices=("sizes", "spread"), default="sizes")
    made.add_argument("--streams", type=int, default=10_000, help="of the spread")
    made.add_argument("--streamlets", type=int, default=1024, help="likewise")
    made.add_argument("--stream-bytes", type=size, default=32 * MIB, help="values of each stream")
    made.add_argument("--rounds", type=int, default=5)
    arguments = made.parse_args()
    with directory(arguments) as root:
        asyncio.run((run if arguments.part == "sizes" else run_spread)(arguments, root))


if __name__ == "__main__":
    main()
