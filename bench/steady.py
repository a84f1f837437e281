"""Shared by benchmarks of the control plane: data to carry over, a steady producer, and a check of both.

A stream is filled with large records (`fill`), while or after which a `Steady` producer sends a small one to each
streamlet every few milliseconds and keeps when each was acknowledged: producers were stalled for as long as there was
no acknowledgement. `check` reads all of it again.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import time
from array import array
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from bench.common import TIMEOUT_S
from kera.client import Client, Producer
from kera.core.base.settings import KIB, MIB

NUMBER_BYTES = 8
POLL_S = 0.01


class Wrong(Exception):
    """Something was lost, repeated or changed."""


# -- large records ---------------------------------------------------------------------------------------------


class Filled:
    """The data of a filled stream, by streamlet."""

    def __init__(self, streamlets: int, record_bytes: int, chunk_bytes: int = MIB) -> None:
        """`chunk_bytes`: the size of the records of a batch, which becomes one chunk."""
        self.record_bytes = record_bytes
        self.records = [0] * streamlets
        self.checksums = [0] * streamlets
        rows = max(1, chunk_bytes // record_bytes)
        self._noise = np.random.default_rng(7).integers(0, 256, (rows, record_bytes), np.uint8)
        self._offsets = pa.py_buffer(np.arange(0, (rows + 1) * record_bytes, record_bytes, dtype=np.int32))

    @property
    def bytes(self) -> int:
        """The size of all values."""
        return sum(self.records) * self.record_bytes

    def next_batch(self, streamlet: int) -> pa.RecordBatch:
        """About as many records as fill a chunk; each starts with its number."""
        block = self._noise.copy()
        rows, first = len(block), self.records[streamlet]
        numbers = np.arange(first, first + rows, dtype=">u8")
        block[:, :NUMBER_BYTES] = numbers.view(np.uint8).reshape(rows, NUMBER_BYTES)
        self.records[streamlet] += rows
        self.checksums[streamlet] = crc32c(block.data, self.checksums[streamlet])
        return pa.record_batch(
            {"value": pa.Array.from_buffers(pa.binary(), rows, [None, self._offsets, pa.py_buffer(block)])}
        )


async def fill(client: Client, stream: str, filled: Filled, bytes_wanted: int) -> float:
    """Send `bytes_wanted` to all streamlets in turn; returns the seconds until everything is acknowledged."""
    begun_s = time.monotonic()
    until = filled.bytes + bytes_wanted
    async with client.producer(chunk_bytes_max=MIB, request_bytes_max=4 * MIB, buffer_bytes_max=64 * MIB) as producer:
        while filled.bytes < until:
            for streamlet in range(len(filled.records)):
                await producer.send_batch(stream, filled.next_batch(streamlet), streamlet=streamlet)
        await producer.flush()
    return time.monotonic() - begun_s


# -- small ones ------------------------------------------------------------------------------------------------


class Steady:
    """Sends a number to each streamlet every few milliseconds."""

    def __init__(self, producer: Producer, stream: str, streamlets: int, *, first: int, pause_s: float) -> None:
        """`first`: the first number of each streamlet."""
        self.sent = [first] * streamlets
        self.times_s = [array("d") for _ in range(streamlets)]
        """When each was acknowledged, by the monotonic clock."""
        self.latencies_s = [array("d") for _ in range(streamlets)]
        self.stopping = False
        self._producer = producer
        self._stream = stream
        self._pause_s = pause_s
        self._waiting: list[asyncio.Queue[tuple[float, Any] | None]] = [asyncio.Queue() for _ in range(streamlets)]

    async def run(self) -> None:
        """Send until `stopping`, and until everything is acknowledged."""
        async with asyncio.TaskGroup() as tasks:
            for streamlet in range(len(self.sent)):
                tasks.create_task(self._collect(streamlet))
            while not self.stopping:
                for streamlet, waiting in enumerate(self._waiting):
                    value = self.sent[streamlet].to_bytes(NUMBER_BYTES, "big")
                    waiting.put_nowait(
                        (time.monotonic(), self._producer.send(self._stream, value, streamlet=streamlet))
                    )
                    self.sent[streamlet] += 1
                await asyncio.sleep(self._pause_s)
            for waiting in self._waiting:
                waiting.put_nowait(None)

    async def _collect(self, streamlet: int) -> None:
        while (item := await self._waiting[streamlet].get()) is not None:
            sent_s, pending = item
            await pending
            self.times_s[streamlet].append(now_s := time.monotonic())
            self.latencies_s[streamlet].append(now_s - sent_s)

    async def go_on(self, streamlets: Iterable[int] | None = None, count: int = 20) -> None:
        """Wait until this many more records of each streamlet are acknowledged."""
        wanted = {at: len(self.times_s[at]) + count for at in streamlets or range(len(self.sent))}
        async with asyncio.timeout(TIMEOUT_S):
            while any(len(self.times_s[at]) < enough for at, enough in wanted.items()):
                await asyncio.sleep(POLL_S)

    def stall_s(self, streamlets: Iterable[int], begun_s: float, ended_s: float) -> float:
        """The longest time between two acknowledgements of one of these streamlets that touches this period."""
        return max(_longest_gap_s(self.times_s[at], begun_s, ended_s) for at in streamlets)


def _longest_gap_s(times_s: Sequence[float], begun_s: float, ended_s: float) -> float:
    first = max(bisect.bisect_left(times_s, begun_s) - 1, 0)
    last = min(bisect.bisect_right(times_s, ended_s), len(times_s) - 1)
    return max((times_s[at + 1] - times_s[at] for at in range(first, last)), default=0.0)


@contextlib.asynccontextmanager
async def steady(client: Client, stream: str, *, first: int = 0, pause_s: float) -> AsyncIterator[Steady]:
    """A steady producer in the background; everything is acknowledged when the block ends without an error."""
    async with client.producer(chunk_bytes_max=4 * KIB, delivery_timeout_ms=300_000) as producer:
        description = await producer.prepare(stream)
        running = Steady(producer, stream, description.config.streamlets, first=first, pause_s=pause_s)
        task = asyncio.create_task(running.run())
        try:
            yield running
            running.stopping = True
            async with asyncio.timeout(TIMEOUT_S):
                await task
        finally:
            task.cancel()
            await asyncio.wait([task])


# -- the check -------------------------------------------------------------------------------------------------


class Read:
    """The data that were read from a stream, by streamlet: large records and small ones, each in order."""

    def __init__(self, streamlets: int, record_bytes: int) -> None:
        self.records = [0] * streamlets
        self.checksums = [0] * streamlets
        self.small = [0] * streamlets
        self._record_bytes = record_bytes

    def take(self, streamlet: int, column: Any) -> None:
        """Take the values of a chunk; either all are large or all are small. Raises `Wrong`."""
        _, offsets, data = column.buffers()
        ends = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
        values = memoryview(data)[ends[0] : ends[-1]]
        large = int(ends[1] - ends[0]) == self._record_bytes
        counts = self.records if large else self.small
        rows = np.frombuffer(values, np.uint8).reshape(len(column), -1)
        numbers = rows[:, :NUMBER_BYTES].copy().view(">u8").ravel()
        due = counts[streamlet]
        if not np.array_equal(numbers, np.arange(due, due + len(column), dtype=">u8")):
            raise Wrong(f"record {int(numbers[0])} of streamlet {streamlet} came where {due} was due")
        counts[streamlet] += len(column)
        if large:
            self.checksums[streamlet] = crc32c(values, self.checksums[streamlet])


async def check(client: Client, stream: str, filled: Filled, small: Sequence[int]) -> float:
    """Check that a stream has exactly these records; nothing may be under way. Returns the seconds of reading."""
    begun_s = time.monotonic()
    found = Read(len(filled.records), filled.record_bytes)
    async with asyncio.timeout(TIMEOUT_S), client.consumer(stream, start="earliest", end="latest") as consumer:
        async for chunk in consumer.batches():
            found.take(chunk.entry.streamlet_id, chunk.batch["value"])
    for what, there, due in (
        ("large records", found.records, filled.records),
        ("checksums", found.checksums, filled.checksums),
        ("small records", found.small, list(small)),
    ):
        if there != due:
            raise Wrong(f"{what} of {stream}: {there}, and not {due}")
    return time.monotonic() - begun_s
