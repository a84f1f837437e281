"""What epochs cost beside reading as it comes: ``python -m bench.epochs``.

One history over eight streamlets is read in turns, in the same cluster: by a plain consumer in batches, in epochs whose
batches are in the order of entries, in epochs whose rows are sorted by time, and by a strict merge, record by record,
of what eight plain readers give (StreamMine3G 4.2). Epochs go from shorter than a chunk to a tenth of all.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.common import Figures
from kera.client import EARLIEST, Client
from kera.core.schema import DEFAULT_SCHEMA
from kera.local.cluster import LocalCluster

STREAM = "history"
PLAIN = "plain consumer"
STREAMLETS = 8
ARENA_BYTES = 1 << 30
RECORDS_OF_BATCH = 1000
VALUE = b"x" * 100
EPOCHS_MS = (1, 10, 100, 1000, 10_000)
STRICT_SHARE = 10
"""The strict merge reads one of so many records: it is that slow."""


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.epochs", description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=1_600_000, help="in all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--history-s", type=int, default=100, help="over which the times of the records are spread")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kera-bench-") as directory:
        figures = Figures("epochs", arguments, Path(directory))
        with LocalCluster.running(data_dir=Path(directory), arena_bytes=ARENA_BYTES) as cluster:
            asyncio.run(_measure(cluster.bootstrap, arguments, figures))
    figures.print()


async def _measure(bootstrap: str, arguments: argparse.Namespace, figures: Figures) -> None:
    async with await Client.connect(bootstrap) as client:
        await client.admin.create_stream(STREAM, streamlets=STREAMLETS, epoch_ms=1, punctuation="producers")
        await _fill(client, arguments.records, arguments.history_s)
        for _ in range(arguments.rounds):
            await _time(figures, PLAIN, arguments.records, _plain(client))
            for epoch_ms in EPOCHS_MS:
                await _time(
                    figures, f"epochs of {epoch_ms} ms, in entry order", arguments.records, _epochs(client, epoch_ms)
                )
                if epoch_ms >= 100:
                    await _time(
                        figures,
                        f"epochs of {epoch_ms} ms, sorted",
                        arguments.records,
                        _epochs(client, epoch_ms, rows=True),
                    )
            await _time(figures, "strict merge", arguments.records // STRICT_SHARE, _strict(client, arguments.records))
    plain = figures.median(PLAIN)
    for epoch_ms in EPOCHS_MS:
        name = f"epochs of {epoch_ms} ms, in entry order"
        figures.notes[name] = f"of plain: {figures.median(name) / plain:.2f}"
    strict = figures.median("strict merge")
    name = f"epochs of {EPOCHS_MS[-1]} ms, sorted"
    figures.notes[name] = f"of strict: {figures.median(name) / strict:.1f}"


async def _time(figures: Figures, name: str, expected: int, reading: AsyncIterator[int]) -> None:
    begun, read = time.perf_counter(), 0
    async for records in reading:
        read += records
    seconds = time.perf_counter() - begun
    if read < expected * 0.99:
        raise SystemExit(f"{name}: {read} records were read, and not {expected}")
    figures.add(name, read / seconds / 1000, "1000/s")


async def _fill(client: Client, records: int, history_s: int) -> None:
    """Each streamlet gets its share, in chunks whose times ascend; the last one closes all epochs."""
    share = records // STREAMLETS
    times = np.linspace(0, history_s * 1e6, share, dtype=np.int64)
    values = pa.array([VALUE] * RECORDS_OF_BATCH, pa.binary())
    for streamlet in range(STREAMLETS):
        appender = await client.appender(
            STREAM, producer_id=(1 << 63) + streamlet, producer_epoch=1, chunk_bytes_max=1 << 20
        )
        sequence = 0
        for sequence, first in enumerate(range(0, share, RECORDS_OF_BATCH)):
            part = pa.array(times[first : first + RECORDS_OF_BATCH], pa.timestamp("us", "UTC"))
            await appender.append(streamlet, rows_of(part, values), sequence)
        last = pa.array([int(history_s * 1e6) + 2000 * EPOCHS_MS[-1]], pa.timestamp("us", "UTC"))
        await appender.append(streamlet, rows_of(last, values), sequence + 1)


def rows_of(times: pa.Array, values: pa.Array) -> pa.RecordBatch:
    """All columns of records without keys."""
    keys = pa.array([[]] * len(times), DEFAULT_SCHEMA.field("keys").type)
    headers = pa.nulls(len(times), DEFAULT_SCHEMA.field("headers").type)
    return pa.RecordBatch.from_arrays([times, keys, values[: len(times)], headers], schema=DEFAULT_SCHEMA)


async def _plain(client: Client) -> AsyncIterator[int]:
    async with client.consumer(STREAM, start="earliest", end="latest") as consumer:
        async for chunk in consumer.batches():
            yield chunk.batch.num_rows


async def _epochs(client: Client, epoch_ms: int, *, rows: bool = False) -> AsyncIterator[int]:
    async with client.epochs(STREAM, epoch_ms=epoch_ms, start="earliest", end="latest") as epochs:
        async for epoch in epochs:
            yield epoch.rows().num_rows if rows else epoch.records


async def _strict(client: Client, records: int) -> AsyncIterator[int]:
    """A part of each streamlet, record by record in the order of times."""
    parts = []
    share = records // STREAMLETS // STRICT_SHARE
    for streamlet in range(STREAMLETS):
        times: list[int] = []
        async for chunk in client.read_range(STREAM, streamlet, 0, EARLIEST, None):
            times += chunk.batch["timestamp"].cast(pa.int64()).to_pylist()
            if len(times) >= share:
                break
        parts.append(_marked(times[:share], streamlet))
    count = 0
    for _ in heapq.merge(*parts):
        count += 1
    yield count


def _marked(times: list[int], streamlet: int) -> Iterator[tuple[int, int]]:
    return ((at, streamlet) for at in times)


if __name__ == "__main__":
    main()
