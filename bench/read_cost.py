"""How many rows a consumer reads in a second from chunks of each size, alone and put together.

    python -m bench.read_cost

For each size a stream of one streamlet is written once, into the broker's memory, with records of 100 bytes; then one
consumer after the other reads it from its start to its end. Pulled and pushed, as batches and as records; with
``joined_bytes_max=0``, each chunk by itself, and with the default. All of that in turns; the best of each counts.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from itertools import product
from pathlib import Path
from typing import Any

from bench.common import Figures, broker, directory, parser, say, size
from kera.cli.bench._payload import make_batch
from kera.client import Client
from kera.core.settings import KIB, MIB

RECORD_BYTES = 100
CHUNK_BYTES = (KIB, 4 * KIB, 16 * KIB, 256 * KIB)
RECORDS_SHARE = 8
"""Records are made of so much of the stream: to make them takes longer than all else."""
WAYS = {"pull": "never", "push": "always"}
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
    """Rows in a second; `records_max`: as records, up to so many."""
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
    """Write, read, print."""
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


def print_table(figures: Figures) -> None:
    """The best of each, beside that of the largest chunks, in Markdown; then all samples as JSON."""
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
    made.add_argument("--stream-bytes", type=size, default=32 * MIB, help="values of each stream")
    made.add_argument("--rounds", type=int, default=5)
    arguments = made.parse_args()
    with directory(arguments) as root:
        asyncio.run(run(arguments, root))


if __name__ == "__main__":
    main()
