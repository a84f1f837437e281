"""The rate that a broker sustains with its log on disk: ``python -m bench.sustained_disk``, MB/s of values,
acknowledgements.

A producer sends batches as fast as it goes for a while, to a stream whose retention removes segments meanwhile: to a
broker whose log stays in memory, and to one that writes it to disk. The raw disk is measured before and after, with
files of a segment's size, written around the page cache and durable, one after the other: new ones, of which the oldest
are removed as retention does, and the same ones again. `kept up` is the log on disk over the lower of 0.8 of memory and
0.9 of the raw disk with new files: 1 or more is as good as it gets. `stop` is how long a stop took after that.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import mmap
import os
import statistics
import sys
import time
from array import array
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.common import IN_MEMORY, Figures, broker, directory, parser, say, size
from kera.broker.storage.disk import LocalDisk
from kera.cli.bench._payload import records_per_chunk
from kera.client import Client
from kera.client.settings import ProducerSettings
from kera.core.base.settings import MIB

RECORD_BYTES = 100
IN_MEMORY_SHARE = 6
"""If memory is this many times the retention, no data are due to be written: see `bench.compare.kera`."""


class RawDisk:
    """Files of a segment's size in a directory of their own."""

    def __init__(self, root: Path, segment_bytes: int, kept: int) -> None:
        """`kept`: this many files stay, and a newer one removes the oldest."""
        self._root = root
        self._disk = LocalDisk(root)
        self._kept = kept
        self._segment = memoryview(mmap.mmap(-1, segment_bytes))
        self._segment[:] = os.urandom(segment_bytes)
        self._next = 0

    def _write(self, number: int) -> None:
        path = self._root / f"raw-{number}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | self._disk.direct, 0o600)
        if os.pwritev(fd, [self._segment], 0, os.RWF_DSYNC) != len(self._segment):
            raise OSError(f"{path} was not written at once")
        os.close(fd)

    def measure(self, seconds: float) -> tuple[float, float]:
        """MB/s of new files, and of overwritten ones."""
        for _ in range(self._kept):
            self._write(self._next)
            self._next += 1
        begun_s, count = time.perf_counter(), 0
        while time.perf_counter() < begun_s + seconds:
            self._write(self._next)
            (self._root / f"raw-{self._next - self._kept}").unlink()
            self._next += 1
            count += 1
        new = count * len(self._segment) / 1e6 / (time.perf_counter() - begun_s)
        begun_s, count = time.perf_counter(), 0
        while time.perf_counter() < begun_s + seconds:
            self._write(self._next - 1 - count % self._kept)
            count += 1
        return new, count * len(self._segment) / 1e6 / (time.perf_counter() - begun_s)

    def remove(self) -> None:
        """Remove all files."""
        for path in self._root.glob("raw-*"):
            path.unlink()


async def send(client: Client, name: str, arguments: argparse.Namespace) -> tuple[float, list[float]]:
    """MB/s of acknowledged values, and the time until each batch was acknowledged, in ms."""
    await client.admin.create_stream(name, retention_bytes=arguments.retention_bytes)
    rows = records_per_chunk(RECORD_BYTES, arguments.batch_bytes, lean=ProducerSettings().lean)
    values = pa.Array.from_buffers(
        pa.binary(),
        rows,
        [
            None,
            pa.py_buffer(np.arange(0, (rows + 1) * RECORD_BYTES, RECORD_BYTES, dtype=np.int32)),
            pa.py_buffer(os.urandom(rows * RECORD_BYTES)),
        ],
    )
    batch = pa.record_batch({"value": values})
    took_ms = array("d")

    async def follow(delivery: Awaitable[Any], given_s: float) -> None:
        await delivery
        took_ms.append((time.perf_counter() - given_s) * 1e3)

    async with client.producer(chunk_bytes_max=arguments.batch_bytes) as producer, asyncio.TaskGroup() as tasks:
        begun_s = time.perf_counter()
        while (given_s := time.perf_counter()) < begun_s + arguments.seconds:
            tasks.create_task(follow(await producer.send_batch(name, batch), given_s))
        await producer.flush()
        return len(took_ms) * rows * RECORD_BYTES / 1e6 / (time.perf_counter() - begun_s), list(took_ms)


async def run(arguments: argparse.Namespace, root: Path) -> Figures:
    """Run all rounds."""
    figures = Figures("sustained_disk", arguments, root)
    raw = RawDisk(root, arguments.segment_bytes, arguments.retention_bytes // arguments.segment_bytes)
    ways: dict[str, dict[str, Any]] = {
        "memory": {"arena_bytes": IN_MEMORY_SHARE * arguments.retention_bytes, **IN_MEMORY},
        "disk": {"arena_bytes": arguments.arena_bytes},
    }
    for number in range(arguments.rounds):
        reached, of_disk = {}, []
        for way in arguments.ways:
            say(f"round {number + 1} of {arguments.rounds}: {way}")
            folder = root / f"{way}-{number}"
            if way == "disk":
                of_disk.append(raw.measure(arguments.raw_seconds))
            async with contextlib.AsyncExitStack() as stack:
                made = await stack.enter_async_context(
                    broker(folder, segment_bytes=arguments.segment_bytes, **ways[way])
                )
                async with await Client.connect(made.cluster.bootstrap) as client:
                    reached[way], took_ms = await send(client, "sustained", arguments)
                begun_s = time.perf_counter()
            figures.add(f"{way}: stop", time.perf_counter() - begun_s, "s")
            if way == "disk":
                of_disk.append(raw.measure(arguments.raw_seconds))
            figures.add(f"{way}: values", reached[way], "MB/s")
            for share in (50, 99, 100):
                figures.add(f"{way}: acknowledged, p{share}", float(np.percentile(took_ms, share)), "ms")
        if of_disk:
            new, same = (statistics.mean(figure) for figure in zip(*of_disk, strict=True))
            figures.add("raw disk: new files, the oldest removed", new, "MB/s")
            figures.add("raw disk: the same files again", same, "MB/s")
            due = min(0.9 * new, 0.8 * reached.get("memory", float("inf")))
            figures.add("kept up", reached["disk"] / due, "")
    raw.remove()
    return figures


def main() -> int:
    """Measure."""
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=1)
    made.add_argument("--seconds", type=float, default=60, help="of sending, each way")
    made.add_argument("--raw-seconds", type=float, default=3, help="of each figure of the raw disk, before and after")
    made.add_argument("--ways", nargs="+", choices=("memory", "disk"), default=["memory", "disk"])
    made.add_argument("--batch-bytes", type=size, default=MIB)
    made.add_argument("--segment-bytes", type=size, default=8 * MIB)
    made.add_argument("--arena-bytes", type=size, default=2048 * MIB, help="of the broker that writes to disk")
    made.add_argument("--retention-bytes", type=size, default=768 * MIB)
    arguments = made.parse_args()
    with directory(arguments) as root:
        figures = asyncio.run(run(arguments, root))
        figures.print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
