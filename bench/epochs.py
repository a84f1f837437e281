"""The cost of epochs beside plain reading, and their benefit over a strict merge: ``python -m bench.epochs``.

For each length of epochs a history lies in eight streamlets, in chunks that end where epochs do, as producers cut them:
so short epochs have small chunks. Each history is read in turns, in the same cluster: by a plain consumer, in epochs
whose batches are in the order of entries, by an ordered consumer, and by a strict merge, record by record, of what
eight plain readers give (StreamMine3G 3.6.4 and 4.2). `bench.epochs_live` measures the cost of epochs while they are
filled.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from bench.common import BROKER, IN_MEMORY, Figures, say
from bench.cpu import run_s
from kera.client import EARLIEST, Client
from kera.core.errors import StreamExists
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.local.cluster import LocalCluster, RunningCluster

PLAIN = "plain consumer"
ENTRY_ORDER = "epochs, in the order of entries"
ORDERED = "ordered consumer"
STRICT = "strict merge, record by record"
STREAMLETS = 8
ARENA_BYTES = 2 << 30
RECORDS_PER_MS = 2
"""Records per ms of event time, in each streamlet."""
CHUNK_RECORDS_MAX = 1000
CHUNKS_MAX = 16_000
"""Maximum of chunks of a history: with short epochs, it limits the number of records."""
STRICT_RECORDS_MAX = 160_000
"""The strict merge reads only this many records of a history, since it is very slow."""
RECORD_BYTES = 100
VALUE = b"x" * RECORD_BYTES
EPOCHS_MS = (1, 10, 100, 1000, 10_000)


class Reading(NamedTuple):
    """The figures of one reader with one history."""

    records: int
    seconds: float
    client_s: float
    """Processor time of this process."""
    broker_s: float

    @property
    def thousands_per_s(self) -> float:
        """Thousand records per second."""
        return self.records / self.seconds / 1000

    @property
    def millions_per_core_s(self) -> float:
        """Records by the reader's processor time alone."""
        return self.records / self.client_s / 1e6


def chunk_records(epoch_ms: int) -> int:
    """The number of records in a chunk of a history."""
    return min(CHUNK_RECORDS_MAX, RECORDS_PER_MS * epoch_ms)


def history_records(epoch_ms: int, records_max: int) -> int:
    """The number of records of a history; chunks and epochs are complete."""
    records = min(records_max, CHUNKS_MAX * chunk_records(epoch_ms))
    of_epoch = STREAMLETS * RECORDS_PER_MS * epoch_ms
    return max(1, records // of_epoch) * of_epoch


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.epochs", description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=3_200_000, help="of a history at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs-ms", type=int, nargs="+", default=EPOCHS_MS, metavar="MS")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kera-bench-") as directory:
        figures = Figures("epochs", arguments, Path(directory))
        with cluster(Path(directory)) as running:
            for epoch_ms, name, reading in readings(
                running, arguments.epochs_ms, rounds=arguments.rounds, records_max=arguments.records
            ):
                figures.add(figure(epoch_ms, name), reading.thousands_per_s, "1000/s")
                figures.add(core_figure(epoch_ms, name), reading.millions_per_core_s, "M/core-s")
    figures.print()
    print(f"\nMillions of records per second of the reader's processor time:\n\n{table(figures, arguments.epochs_ms)}")


def cluster(directory: Path) -> AbstractContextManager[RunningCluster]:
    """One broker that keeps its data in memory."""
    return LocalCluster.running(data_dir=directory, arena_bytes=ARENA_BYTES, broker_settings=IN_MEMORY)


def figure(epoch_ms: int, name: str) -> str:
    """The name of a figure."""
    return f"{name}, {epoch_ms} ms"


def core_figure(epoch_ms: int, name: str) -> str:
    """The name of a figure by processor time."""
    return f"{figure(epoch_ms, name)}, by processor time"


def table(figures: Figures, epochs_ms: Sequence[int] = EPOCHS_MS) -> str:
    """The curve by processor time, which other load of the machine disturbs least, as Markdown."""
    lines = [
        "| epoch | records in a chunk | plain | entry order | ordered | strict merge | ordered / strict |",
        "|---|---|---|---|---|---|---|",
    ]
    for epoch_ms in epochs_ms:
        plain, entry, ordered, strict = (
            figures.median(core_figure(epoch_ms, name)) for name in (PLAIN, ENTRY_ORDER, ORDERED, STRICT)
        )
        lines.append(
            f"| {epoch_ms:,} ms | {chunk_records(epoch_ms):,} | {plain:.3g}"
            f" | {entry:.3g} ({entry / plain:.2g} of plain)"
            f" | {ordered:.3g} ({ordered / plain:.2g}) | {strict:.3g} | {ordered / strict:.2g} |"
        )
    return "\n".join(lines)


def readings(
    running: RunningCluster, epochs_ms: Sequence[int], *, rounds: int, records_max: int
) -> Iterator[tuple[int, str, Reading]]:
    """Run each reader on each history, in turns."""
    for epoch_ms in epochs_ms:
        asyncio.run(_fill(running.bootstrap, epoch_ms, history_records(epoch_ms, records_max)))
        say(f"epochs of {epoch_ms} ms: {history_records(epoch_ms, records_max):,} records")
    for _ in range(rounds):
        for epoch_ms in epochs_ms:
            for name, read in READERS.items():
                yield epoch_ms, name, asyncio.run(_read(running, epoch_ms, name, read, records_max))


def core_speeds(running: RunningCluster, epoch_ms: int, records_max: int) -> dict[str, float]:
    """The speed of each reader, measured once with one history: million records per second of its processor time."""
    with contextlib.suppress(StreamExists):  # it exists from an earlier round
        asyncio.run(_fill(running.bootstrap, epoch_ms, history_records(epoch_ms, records_max)))
    return {
        name: asyncio.run(_read(running, epoch_ms, name, read, records_max)).millions_per_core_s
        for name, read in READERS.items()
    }


async def _read(running: RunningCluster, epoch_ms: int, name: str, read: Reader, records_max: int) -> Reading:
    broker = running.processes[BROKER]
    records = history_records(epoch_ms, records_max)
    expected = min(records, STRICT_RECORDS_MAX) if name == STRICT else records
    async with await Client.connect(running.bootstrap) as client:
        await client.describe(_stream(epoch_ms))  # connected, and looked up
        broker_s, client_s, begun = run_s(broker), time.process_time(), time.perf_counter()
        found = 0
        async for some in read(client, _stream(epoch_ms), expected):
            found += some
        reading = Reading(found, time.perf_counter() - begun, time.process_time() - client_s, run_s(broker) - broker_s)
    if found < expected * 0.99:
        raise SystemExit(f"{name}, epochs of {epoch_ms} ms: {found} records were read, and not {expected}")
    return reading


def _stream(epoch_ms: int) -> str:
    return f"history-{epoch_ms}"


async def _fill(bootstrap: str, epoch_ms: int, records: int) -> None:
    """Each streamlet gets its share, in chunks whose times ascend; the last one closes all epochs."""
    share, size = records // STREAMLETS, chunk_records(epoch_ms)
    times = np.arange(share, dtype=np.int64) * 1000 // RECORDS_PER_MS
    values = pa.array([VALUE] * size, pa.binary())
    async with await Client.connect(bootstrap) as client:
        await client.admin.create_stream(
            _stream(epoch_ms), streamlets=STREAMLETS, epoch_ms=epoch_ms, punctuation="producers"
        )

        async def fill(streamlet: int) -> None:
            appender = await client.appender(
                _stream(epoch_ms), producer_id=(1 << 63) + streamlet, producer_epoch=1, chunk_bytes_max=1 << 20
            )
            chunks = [times[first : first + size] for first in range(0, share, size)]
            for sequence, part in enumerate([*chunks, times[-1:] + 2000 * max(EPOCHS_MS)]):
                column = pa.array(part, pa.timestamp("us", "UTC"))
                await appender.append(streamlet, rows_of(column, values), sequence)

        await asyncio.gather(*map(fill, range(STREAMLETS)))


def rows_of(times: pa.Array, values: pa.Array) -> pa.RecordBatch:
    """All columns of records without keys."""
    keys = pa.array([[]] * len(times), DEFAULT_SCHEMA.field("keys").type)
    headers = pa.nulls(len(times), DEFAULT_SCHEMA.field("headers").type)
    return pa.RecordBatch.from_arrays([times, keys, values[: len(times)], headers], schema=DEFAULT_SCHEMA)


# -- the readers: each gives how many records have come ----------------------------------------------------------

Reader = Callable[[Client, str, int], AsyncIterator[int]]


async def _plain(client: Client, stream: str, _: int) -> AsyncIterator[int]:
    async with client.consumer(stream, start="earliest", end="latest") as consumer:
        async for chunk in consumer.batches():
            yield chunk.batch.num_rows


async def _entry_order(client: Client, stream: str, _: int) -> AsyncIterator[int]:
    async with client.epochs(stream, start="earliest", end="latest") as epochs:
        async for epoch in epochs:
            yield epoch.records


async def _ordered(client: Client, stream: str, _: int) -> AsyncIterator[int]:
    async with client.ordered_consumer(stream, start="earliest", end="latest") as consumer:
        async for ordered in consumer.batches():
            yield ordered.batch.num_rows


async def _strict(client: Client, stream: str, records: int) -> AsyncIterator[int]:
    """The first of each streamlet, record by record in the order of times."""
    parts, share = [], records // STREAMLETS
    for streamlet in range(STREAMLETS):
        times: list[int] = []
        async for chunk in client.read_range(stream, streamlet, 0, EARLIEST, None):
            times += chunk.batch["timestamp"].cast(pa.int64()).to_pylist()
            if len(times) >= share:
                break
        parts.append(zip(times[:share], repeat(streamlet), range(share), strict=False))
    count = 0
    for _ in heapq.merge(*parts):
        count += 1
    yield count


READERS: dict[str, Reader] = {PLAIN: _plain, ENTRY_ORDER: _entry_order, ORDERED: _ordered, STRICT: _strict}


if __name__ == "__main__":
    main()
