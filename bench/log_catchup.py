"""A stream much larger than the broker's memory: one reader at its tail, another that comes from its start.

A broker with a small arena takes ``--bytes`` of records. First a stretch of twice the arena, so that there is history
on disk only; then rounds in which a reader follows the tail, in turn alone and beside one that reads from the start.
Reported: how fast the tail reader gets what the producer sends, in either case, and the ratio; the broker's memory and
its arena file at their largest. Checked: every reader gets all records, in order, with all their bytes; at the end one
reads the whole stream. Producer and readers are processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from bench.common import TIMEOUT_S, Broker, Figures, alternating, broker, directory, parser, say, size
from kera.client import Client, Position
from kera.core.base.process import DIE_WITH_PARENT_VARIABLE, die_with_parent
from kera.core.base.settings import KIB, MIB

STREAM = "catchup"
BATCH_BYTES = 512 * KIB


class Wrong(Exception):
    """Something was lost, repeated or changed."""


def values_of(column: Any) -> memoryview:
    """All bytes of the values in a column, one after the other."""
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    return memoryview(data)[ends[0] : ends[-1]]


# -- the processes -----------------------------------------------------------------------------------------------


async def produce(bootstrap: str, record_bytes: int, first: int, count: int) -> dict[str, Any]:
    """Send records `first`, …; each starts with its number."""
    rows = BATCH_BYTES // record_bytes
    noise = np.frombuffer(os.urandom(rows * record_bytes), np.uint8).reshape(rows, record_bytes)
    offsets = pa.py_buffer(np.arange(0, (rows + 1) * record_bytes, record_bytes, dtype=np.int32))
    checksum = 0
    async with (
        await Client.connect(bootstrap) as client,
        client.producer(chunk_bytes_max=MIB, buffer_bytes_max=16 * MIB) as producer,
    ):
        await producer.prepare(STREAM)
        begun_s = time.monotonic()
        for start in range(first, first + count, rows):
            here = min(rows, first + count - start)
            block = noise[:here].copy()
            block[:, :8] = np.arange(start, start + here, dtype=">u8").view(np.uint8).reshape(here, 8)
            checksum = crc32c(block.data, checksum)
            column = pa.Array.from_buffers(pa.binary(), here, [None, offsets, pa.py_buffer(block)])
            await producer.send_batch(STREAM, pa.record_batch({"value": column}))
        await producer.flush()
    return {"seconds": time.monotonic() - begun_s, "checksum": checksum, "records": count}


async def consume(
    bootstrap: str, record_bytes: int, position: Position | None, first: int, count: int
) -> dict[str, Any]:
    """Read records `first`, … from a position on; without `count`, until the input says stop."""
    checksum = records = 0
    begun_s = end_s = 0.0
    stopped = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    async with (
        await Client.connect(bootstrap) as client,
        client.consumer(STREAM, start={0: [position]} if position else "earliest", fetch_wait_ms=50) as consumer,
    ):
        print(json.dumps({"ready": True}), flush=True)
        batches = aiter(consumer.batches())
        while True:
            following = asyncio.ensure_future(anext(batches))
            await asyncio.wait({following} if count else {following, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():  # the input says stop, and there is nothing more to read
                following.cancel()
                await asyncio.wait({following})
                break
            chunk = following.result()
            begun_s = begun_s or time.monotonic()
            values = values_of(chunk.batch["value"])
            rows = len(values) // record_bytes
            numbers = np.frombuffer(values, np.uint8).reshape(rows, record_bytes)[:, :8].copy().view(">u8").ravel()
            if not np.array_equal(numbers, np.arange(first + records, first + records + rows, dtype=">u8")):
                raise Wrong(f"record {int(numbers[0])} came where {first + records} was due")
            checksum = crc32c(values, checksum)
            records += rows
            end_s = time.monotonic()
            if records == count or (not count and stopped.done()):
                break
    return {"seconds": end_s - begun_s, "checksum": checksum, "records": records}


async def work(task: dict[str, Any]) -> None:
    """Be one of these processes."""
    if task.pop("role") == "produce":
        result = await produce(**task)
    else:
        task["position"] = task["position"] and Position(*task["position"])
        result = await consume(**task)
    print(json.dumps(result), flush=True)
    os._exit(0)  # a thread may still wait for standard input


class Worker:
    """One of these functions in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, role: str, **task: Any) -> Worker:
        """Start a process; a reader is connected when this returns."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.log_catchup", "--worker", json.dumps({"role": role, **task})),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, DIE_WITH_PARENT_VARIABLE: "1"},
        )
        worker = cls(process)
        if role == "consume":
            await worker._line()
        return worker

    async def _line(self) -> dict[str, Any]:
        if self._process.stdout is None:
            raise Wrong("no output")
        async with asyncio.timeout(TIMEOUT_S):
            line = await self._process.stdout.readline()
        if not line:
            raise Wrong(f"a worker ended with code {await self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    async def result(self) -> dict[str, Any]:
        """Wait for its end; returns its result."""
        found = await self._line()
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()
        return found

    async def stop(self) -> dict[str, Any]:
        """Stop a reader without an end."""
        if self._process.stdin is not None:
            self._process.stdin.write(b"stop\n")
        return await self.result()


# -- the measurement ---------------------------------------------------------------------------------------------


async def watch(made: Broker, peaks: dict[str, int]) -> None:
    """Keep the peaks of the broker's memory."""
    while True:
        found = {**made.memory(), "arena file": made.arena.stat().st_blocks * 512}
        for name, value in found.items():
            peaks[name] = max(peaks.get(name, 0), value)
        await asyncio.sleep(0.5)


async def run(arguments: argparse.Namespace, root: Path) -> None:
    """Run all rounds, and the check."""
    figures = Figures("log_catchup", arguments, root)
    history = min(2 * arguments.arena_bytes, arguments.bytes // 2) // arguments.record_bytes
    per_round = (arguments.bytes // arguments.record_bytes - history) // (2 * arguments.rounds)
    async with (
        broker(root, arena_bytes=arguments.arena_bytes, segment_bytes=arguments.segment_bytes) as made,
        await Client.connect(made.cluster.bootstrap) as client,
    ):
        task: dict[str, Any] = {"bootstrap": made.cluster.bootstrap, "record_bytes": arguments.record_bytes}
        await client.admin.create_stream(STREAM)
        peaks: dict[str, int] = {}
        watching = asyncio.create_task(watch(made, peaks))
        say(f"{history:,} records of history")
        sent = (await (await Worker.start("produce", **task, first=0, count=history)).result())["records"]
        for name in alternating(["alone", "beside a reader from the start"], arguments.rounds):
            say(f"{per_round:,} records, tail reader {name}")
            ((bounds,),) = (await client.bounds(STREAM)).values()
            tail = await Worker.start("consume", **task, position=bounds.end, first=sent, count=per_round)
            behind = None
            if name != "alone":
                behind = await Worker.start("consume", **task, position=None, first=0, count=0)
            producer = await Worker.start("produce", **task, first=sent, count=per_round)
            produced, read = await producer.result(), await tail.result()
            if (read["records"], read["checksum"]) != (produced["records"], produced["checksum"]):
                raise Wrong(f"the tail reader got {read}, the producer sent {produced}")
            sent += per_round
            size_mb = per_round * arguments.record_bytes / 1e6
            figures.add(f"tail reader, {name}", size_mb / read["seconds"], "MB/s")
            if behind is not None:
                caught = await behind.stop()
                figures.add(
                    "reader from the start, meanwhile",
                    caught["records"] * arguments.record_bytes / 1e6 / caught["seconds"],
                    "MB/s",
                )
        say("reading all of it")
        whole = await Worker.start("consume", **task, position=None, first=0, count=sent)
        found = await whole.result()
        figures.add("reading all of it", sent * arguments.record_bytes / 1e6 / found["seconds"], "MB/s")
        watching.cancel()
        metrics = await made.metrics()
    alone, beside = (figures.median(f"tail reader, {name}") for name in ("alone", "beside a reader from the start"))
    figures.add("tail reader beside / alone", beside / alone, "")
    for name, value in peaks.items():
        figures.add(f"most of the broker's {name}", value / MIB, "MiB")
    figures.notes["checked"] = f"{found['records']:,} records in order, {sent * arguments.record_bytes / 1e9:.1f} GB"
    figures.notes["segments"] = ", ".join(
        f"{what} {metrics[f'segments_{what}_total']:,.0f}" for what in ("flushed", "evicted", "loaded")
    )
    figures.print()


def main() -> int:
    """Measure, or be one of the processes."""
    made = parser(__doc__)
    made.add_argument("--bytes", type=size, default=8 << 30)
    made.add_argument("--arena-bytes", type=size, default=1 << 30)
    made.add_argument("--segment-bytes", type=size, default=8 * MIB)
    made.add_argument("--record-bytes", type=int, default=1000)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.worker is not None:
        die_with_parent()
        asyncio.run(work(json.loads(arguments.worker)))
    with directory(arguments) as root:
        asyncio.run(run(arguments, root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
